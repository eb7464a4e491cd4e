"""Clicks that are generated, see `models.click_log`: a model of them."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import keras

import tfdistill
from models import click_log
from models import dlrm

NUM_IDS, NUMBERS = click_log.NUM_IDS, click_log.NUMBERS
TASKS = ("click", "sale")


def workload(
    log_seed: int = 0,
    rows_per_day: int = 8000,
    learning_rate: float = 1e-3,
    batch_size: int = 512,
    num_steps: int = 440,
    evaluate_every_steps: int = 110,
    embedding_dim: int = 8,
    hidden_units: Sequence[int] = (64, 32),
    burn_in_steps: int = 60,
    weight: float = 2.0,
    every_steps: int = 20,
    refresh_every_steps: int = 5,
) -> tfdistill.Workload:
    """Returns a run on a generated click log, ten seconds on 2 cores.

    The log depends on `log_seed` and not on `seed`: retrains with other seeds
    see the same clicks.

    The defaults were chosen on the log of `log_seed=1`, in one process: rate
    and steps by the log loss of `independent` (of rates 5e-4, 1e-3 and 2e-3),
    the weight as the largest of 1, 2 and 3 that didn't raise the log loss there
    (with 2 and 3, churn fell by 30% and 39%).
    """
    train, held_out = click_log.split(
        click_log.generate(log_seed, rows_per_day)
    )
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
    return tfdistill.Workload(
        model=lambda: build_model(
            embedding_dim=embedding_dim, hidden_units=hidden_units
        ),
        data=((train.inputs, train.labels), (held_out.inputs, held_out.labels)),
        schema=make_schema,
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        optimizer=lambda: keras.optimizers.Adam(rate),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.AUC(from_logits=True, name="auc")],
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(
            from_logits=True
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
        callbacks=lambda: (
            [_StayTogether(every_steps * 3 // 2)]
            if tfdistill.Cluster.from_env().peers
            else []
        ),
    )


def two_tasks(
    log_seed: int = 0,
    rows_per_day: int = 8000,
    num_steps: int = 440,
    evaluate_every_steps: int = 110,
    embedding_dim: int = 8,
    hidden_units: Sequence[int] = (64, 32),
    learned_weights: bool = True,
    auxiliary_heads: bool = True,
    **others: Any,
) -> tfdistill.Workload:
    """Returns the run of `clicks` with sales as a second task.

    The output `sale` is for all rows, clicked or not: a row leads to a sale if
    it is clicked and then bought. So no row is masked, and both outputs are of
    the same rows, in training as in serving. With `auxiliary_heads`, teachers
    teach two further outputs in the place of these, which stay calibrated; with
    `learned_weights`, uncertainty weighs the losses of labels and of teachers.
    Further arguments are passed to `workload`.
    """
    made = workload(
        log_seed=log_seed,
        rows_per_day=rows_per_day,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        **others,
    )
    heads = {f"{task}_soft": task for task in TASKS if auxiliary_heads}
    weights = "uncertainty" if learned_weights else None
    parts = click_log.split(click_log.generate(log_seed, rows_per_day))
    return dataclasses.replace(
        made,
        model=lambda: build_model(
            embedding_dim=embedding_dim,
            hidden_units=hidden_units,
            outputs=[*TASKS, *heads],
        ),
        data=tuple(
            (part.inputs, {"click": part.labels, "sale": part.sales})
            for part in parts
        ),
        schema=lambda: {**make_schema(), "outputs": list(TASKS)},
        loss=dict.fromkeys(TASKS, made.loss),
        loss_weights=weights,
        metrics=lambda: {task: made.metrics() for task in TASKS},
        distillation_output_weights=weights,
        auxiliary_heads=heads,
    )


def dcn(
    # Rows of few examples see tiny gradients.
    initial_accumulator_value: float = 1e-6,
    learning_rate: float = 5e-3,
    batch_size: int = 512,
    num_steps: int = 440,
    evaluate_every_steps: int = 110,
    embedding_dim: int = 8,
    bottom_units: Sequence[int] = (32,),
    num_crosses: int = 2,
    rank: int = 16,
    top_units: Sequence[int] = (64, 32),
    **others: Any,
) -> tfdistill.Workload:
    """Returns the run of `clicks` with a DLRM that crosses, and Adagrad.

    DCN-v2, Wang et al. 2021 (arXiv:2008.13535), in `models.dlrm`. The rate was
    chosen as in `workload`. Further arguments are passed to `workload`.
    """
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
    return dataclasses.replace(
        workload(
            batch_size=batch_size,
            num_steps=num_steps,
            evaluate_every_steps=evaluate_every_steps,
            **others,
        ),
        model=lambda: build_dcn(
            embedding_dim=embedding_dim,
            bottom_units=bottom_units,
            num_crosses=num_crosses,
            rank=rank,
            top_units=top_units,
        ),
        optimizer=lambda: keras.optimizers.Adagrad(
            rate, initial_accumulator_value=initial_accumulator_value
        ),
    )


class _StayTogether(keras.callbacks.Callback):
    """Slows a group down while the version it learns from is old.

    Steps of so small a model take milliseconds, and an export as long as twenty
    of them. One group would soon be far ahead of the other, on a busy machine
    more than on an idle one.
    """

    def __init__(self, max_age_steps: int) -> None:
        super().__init__()
        self._max_age_steps, self._steps = max_age_steps, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        for teacher in self.model.teachers.status():
            age = teacher["age_steps"]
            # Without a version yet, one of step 0 would be as old.
            if (self._steps if age is None else age) > self._max_age_steps:
                time.sleep(0.05)


def make_schema() -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups."""
    return {
        "labels": ["no click", "click"],
        "features": {"ids": NUM_IDS, "numbers": NUMBERS},
    }


def build_model(
    *,
    embedding_dim: int = 8,
    hidden_units: Sequence[int] = (64, 32),
    outputs: Sequence[str] = (),
) -> keras.Model:
    """Returns an embedding of each id, and layers over these and the numbers.

    Args:
        embedding_dim: Numbers an id is embedded in. Default 8.
        hidden_units: Units of each hidden ReLU layer. Default (64, 32).
        outputs: Names of several outputs. By default there is one.

    Returns:
        A model from `{"ids": int32 [batch, 3], "numbers": float32 [batch, 3]}`
        to float32 logits `[batch, 1]`, or a dict of them by output.
    """
    inputs = _inputs()
    embedded = keras.layers.Flatten()(_embedded(inputs["ids"], embedding_dim))
    x = keras.layers.Concatenate()([inputs["numbers"], embedded])
    hidden = dlrm.dense(x, hidden_units)
    # float32 even under a mixed policy: losses want exact logits.
    logits = {
        output: keras.layers.Dense(
            1, dtype="float32", name=f"{output}_logit" if output else "logit"
        )(hidden)
        for output in outputs or ("",)
    }
    return keras.Model(inputs, logits if outputs else logits[""], name="clicks")


def build_dcn(
    *,
    embedding_dim: int = 8,
    bottom_units: Sequence[int] = (32,),
    num_crosses: int = 2,
    rank: int = 16,
    top_units: Sequence[int] = (64, 32),
) -> keras.Model:
    """Returns a DLRM with the cross layers of DCN-v2, see `models.dlrm`.

    Args:
        embedding_dim: Numbers an id is embedded in. Default 8.
        bottom_units: Units of the hidden layers over the numbers, before the
            one of `embedding_dim` units. Default (32,).
        num_crosses: Cross layers. Default 2.
        rank: Rank of their matrices. Default 16.
        top_units: Units of the hidden layers above. Default (64, 32).

    Returns:
        A model with the inputs and outputs of `build_model`.
    """
    inputs = _inputs()
    crossed = dlrm.crossed(
        dlrm.dense(inputs["numbers"], (*bottom_units, embedding_dim)),
        _embedded(inputs["ids"], embedding_dim),
        num_crosses=num_crosses,
        rank=rank,
    )
    logit = dlrm.logit(crossed, top_units)
    return keras.Model(inputs, logit, name="clicks_dcn")


def _inputs() -> dict[str, keras.KerasTensor]:
    return {
        "ids": keras.Input((len(NUM_IDS),), dtype="int32", name="ids"),
        "numbers": keras.Input((len(NUMBERS),), name="numbers"),
    }


def _embedded(ids: keras.KerasTensor, dim: int) -> keras.KerasTensor:
    return tfdistill.layers.ShardedEmbedding(
        list(NUM_IDS.values()), dim, name="embedding"
    )(ids)
