"""Small trainings whose results must not depend on who shares the work.

One table for every place: one device, two replicas of a process, two workers
with one or two replicas each, and a worker with two parameter servers, which
takes the same steps in the same order. A case trains, evaluates and predicts,
and returns all that can be compared with the same on one device, by plain
Keras where that can be.
"""

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import references
from tfdistill import data as tfdistill_data
from tfdistill.embedding import tables
from tfdistill.training import auto_steps
from tfdistill.training import steps

Results = dict[str, np.ndarray]
BATCH_SIZE = 8
FIELD_SIZES = [13, 5, 7]


# ---- data ----


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def regression(num_examples: int = 32) -> tuple[np.ndarray, np.ndarray]:
    rng = _rng()
    x = rng.normal(size=(num_examples, 5)).astype("float32")
    y = (x @ rng.normal(size=(5, 1)) + 0.1).astype("float32")
    return x, y


def weighted(num_examples: int = 30) -> tuple:
    x, y = regression(num_examples)
    weights = _rng().uniform(0, 3, size=num_examples).astype("float32")
    return x, y, weights


def signs(num_examples: int = 43) -> tuple[np.ndarray, np.ndarray]:
    """The same features, and targets 0 and 1."""
    x, y = regression(num_examples)
    return x, (y > 0).astype("float32")


def weighted_signs() -> tuple:
    return *signs(), weighted(43)[2]


def dictionary_data(num_examples: int = 30) -> tuple[dict, dict, dict]:
    x, y, weights = weighted(num_examples)
    kind = np.abs(y[:, 0] * 3).astype("int64") % 3
    return (
        {"a": x, "b": x[:, :2] ** 2},
        {"value": y, "kind": kind},
        {"value": weights, "kind": weights[::-1].copy()},
    )


def clicks() -> tuple[dict, np.ndarray]:
    """Numbers, and an id of each of several fields."""
    x, y = signs()
    ids = [_rng().integers(0, size, len(x)) for size in FIELD_SIZES]
    return {"x": x, "ids": np.stack(ids, axis=1)}, y


def clicks_and_sales() -> tuple[dict, dict, dict]:
    """Two labels of each row, and a weight of the second."""
    x, y = clicks()
    sale = y * (x["x"][:, :1] > 0)
    weight = {"click": np.ones(len(y), "float32"), "sale": weighted(43)[2]}
    return x, {"click": y, "sale": sale}, weight


def ids_only() -> tuple[dict, np.ndarray]:
    x, y = clicks()
    return {"ids": x["ids"]}, y


def wild_clicks() -> tuple[dict, np.ndarray]:
    """The same with ids of 50 bits, of which many come once."""
    x, y = clicks()
    ids = x["ids"] * (x["ids"] < 4) + _rng().zipf(1.6, x["ids"].shape) % 2**50
    return {"x": x["x"], "ids": ids * 1_000_003}, y


def bags() -> tuple[tf.RaggedTensor, np.ndarray]:
    """Bags of ids, some empty, some with ids that are out of range."""
    _, y = signs()
    lengths = _rng().integers(0, 5, len(y))
    ids = _rng().integers(-2, 25, lengths.sum())
    return tf.RaggedTensor.from_row_lengths(ids, lengths), y


def partly_labelled() -> tuple[np.ndarray, np.ndarray]:
    """Classes, of which some are unknown: more to one replica's rows."""
    x, y = regression(27)
    kind = np.abs(y[:, 0] * 3).astype("int64") % 3
    kind[[1, 2, 9, 10, 11, 17, 25]] = -1
    return x, kind


def sparse_rows() -> tuple[tf.SparseTensor, np.ndarray]:
    x = _rng().normal(size=(30, 9)) * (_rng().uniform(size=(30, 9)) < 0.3)
    x = x.astype("float32")
    return tf.sparse.from_dense(x), x.sum(axis=1, keepdims=True)


def sequences() -> tuple[np.ndarray, np.ndarray]:
    tokens = _rng().integers(1, 20, size=(30, 6)).astype("int32")
    for row, length in enumerate(_rng().integers(1, 7, size=30)):
        tokens[row, length:] = 0
    return tokens, np.roll(tokens, -1, axis=1)


# ---- students ----


def dense(
    model_class: type = keras.Model,
    units: int = 1,
    *,
    hidden_units: int = 7,
    **options: Any,
) -> keras.Model:
    """A model of two dense layers; `options` are the first one's."""
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(hidden_units, activation="tanh", **options)(
        inputs
    )
    return model_class(inputs, keras.layers.Dense(units)(hidden))


def shared(*args: Any) -> keras.Model:
    """The functional model whose training is under test."""
    return tfdistill.DistributedModel(keras.Model(*args))


def regularized(model_class: type = keras.Model) -> keras.Model:
    return dense(model_class, kernel_regularizer=keras.regularizers.L2(0.1))


class Subclassed(keras.Model):
    """A user's subclassed model with a regularizer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(
            6, activation="relu", kernel_regularizer=keras.regularizers.L2(0.1)
        )
        self.top = keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        return self.top(self.hidden(inputs))


def dictionaries() -> keras.Model:
    a, b = keras.Input((5,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    hidden = keras.layers.Dense(6, activation="relu")(joined)
    outputs = {
        "value": keras.layers.Dense(1, name="value")(hidden),
        "kind": keras.layers.Dense(3, name="kind")(hidden),
    }
    return keras.Model({"a": a, "b": b}, outputs)


def click_student(table: Any = None) -> keras.Model:
    """A student with a table of several fields and dictionaries as inputs."""
    x = keras.Input((5,), name="x")
    ids = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    table = table or tfdistill.layers.ShardedEmbedding(FIELD_SIZES, 4)
    rows = keras.layers.Flatten()(table(ids))
    both = keras.layers.Concatenate()([x, rows])
    hidden = keras.layers.Dense(6, activation="tanh")(both)
    return keras.Model({"x": x, "ids": ids}, keras.layers.Dense(1)(hidden))


def two_tasks(heads: tuple[str, ...] = ("click", "sale")) -> keras.Model:
    """A student of several outputs over the features of `click_student`."""
    below = click_student()
    hidden = below.layers[-1].input
    outputs = {name: keras.layers.Dense(1, name=name)(hidden) for name in heads}
    return keras.Model(below.input, outputs)


def dynamic_student() -> keras.Model:
    """The same with ids that get rows, of which each server holds some."""
    table = tfdistill.layers.DynamicEmbedding(
        2048, 4, num_fields=len(FIELD_SIZES), admit_after=3, evict="count"
    )
    return click_student(table)


def bag_student() -> keras.Model:
    """A student of bags; ids that are out of range are id 3."""
    ids = keras.Input((None,), dtype="int64", ragged=True)
    mean, pairs = (
        tfdistill.layers.ShardedEmbedding(
            20, 4, combiner=combiner, combine_on_servers=True, oov_index=3
        )(ids)
        for combiner in ("mean", "fm")
    )
    top = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    return keras.Model(ids, top(mean) + pairs)


def normalized(**options: Any) -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4)(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.5, **options)(hidden)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def sparse_inputs() -> keras.Model:
    inputs = keras.Input((9,), sparse=True)
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def masked_sequence() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32")
    rows = keras.layers.Embedding(20, 4, mask_zero=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(20)(rows))


class Penalty:
    """A loss of a model's own beside the compiled one.

    Without `training`, as before Keras 3.3.
    """

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
    ) -> Any:
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * keras.ops.mean(y_pred**2)


class Penalized(Penalty, keras.Model):
    """A finished model with a loss of its own."""


def penalized_table() -> keras.Model:
    inputs = keras.Input((len(FIELD_SIZES),), dtype="int64", name="ids")
    rows = keras.layers.Embedding(max(FIELD_SIZES), 4)(inputs)
    top = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))
    return Penalized({"ids": inputs}, top(keras.layers.Flatten()(rows)))


class Counted(keras.metrics.Metric):
    """Counts batches' rows in int32, from four on."""

    def __init__(self, name: str = "counted") -> None:
        super().__init__(name=name)
        self.count = self.add_variable((), "zeros", dtype="int32")

    def update_state(self, y_true: Any, *_: Any, **__: Any) -> None:
        self.count.assign(self.count + tf.shape(y_true)[0])

    def reset_state(self) -> None:
        self.count.assign(4)

    def result(self) -> Any:
        return self.count


class Extremes(keras.metrics.Metric):
    """The largest prediction and the least label, from elsewhere than zero."""

    def __init__(self) -> None:
        super().__init__(name="extremes")
        # Keras does not always reset them before the first epoch.
        start = keras.initializers.Constant
        self.most = self.add_variable((), start(-np.inf))
        self.least = self.add_variable((), start(-0.5), dtype="float64")
        self.told = self.add_variable((), start(1.0), aggregation="mean")

    def update_state(self, y_true: Any, y_pred: Any, **_: Any) -> None:
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_pred)))
        least = keras.ops.min(keras.ops.cast(y_true, "float64"))
        self.least.assign(keras.ops.minimum(least, self.least))
        self.told.assign(3.0)

    def reset_state(self) -> None:
        self.most.assign(-np.inf)
        self.least.assign(-0.5)
        self.told.assign(1.0)

    def result(self) -> Any:
        # As tensors: in place of a variable Keras logs what it has later.
        names = "most", "least", "told"
        return {name: getattr(self, name) + 0 for name in names}


class OwnStep(keras.Model):
    """A finished model with steps as in Keras' guide, a tape in one of them."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, y_pred)
        found = {m.name: m.result() for m in self.metrics if m.name != "loss"}
        return {**found, "step_loss": loss}


class OwnLosses(keras.Model):
    """A finished model of two optimizers, its losses none of `compile`'s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.MeanSquaredError("squared")
        self.loss_fn = keras.losses.Huber(0.5)

    def compile(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().compile(optimizer, jit_compile=False)
        self.top_optimizer = keras.optimizers.SGD(0.2, global_clipnorm=0.02)
        self.top_optimizer.build(self.layers[-1].trainable_variables)

    @property
    def metrics(self) -> list[keras.Metric]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        x, y = data
        top = self.layers[-1].trainable_variables
        rest = self.layers[-2].trainable_variables
        with tf.GradientTape(persistent=True) as tape:
            y_pred = self(x, training=True)
            loss = self.loss_fn(y, y_pred) + sum(self.losses)
            other = keras.ops.mean(keras.ops.abs(y_pred - y)) + loss
        self.top_optimizer.apply(tape.gradient(other, top), top)
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, rest), rest, strict=True)
        )
        self.tracker.update_state(y, y_pred)
        return {"squared": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        self.tracker.update_state(y, self(x, training=False))
        return {"squared": self.tracker.result()}


# ---- the table ----


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One training: what differs from the plain one.

    Attributes:
        optimizer: Makes the optimizer.
        student: Makes the student.
        data: Makes features, labels and perhaps weights.
        feed: How `fit` gets them: as a "dataset", as "arrays" to shuffle, by a
            "function" on servers, or each worker its "share" early.
        compiled: Makes what else to compile with.
        wrap: Makes what trains of the student.
        is_plain: Whether plain Keras is the reference: not where its Adam or
            Ftrl moves all rows of a table, and ours those of the batch.
        teacher: Makes a model in memory to learn from, outside of any scope.
        heads: The auxiliary heads of a student that has a teacher.
        agree_on: On which rows it learns from the teacher; "rows" for a data
            set of the inputs, in batches of 7.
        steps_per_execution: The reference takes single steps.
        steps_per_epoch: Of repeated data, in whole executions, as Keras takes
            no others; None for finite data.
        callbacks: Makes callbacks.
        policy: Of the numbers' type.
        tolerance: Largest difference.
    """

    optimizer: Callable[[], Any] = lambda: sgd(0.1)
    student: Callable[[], keras.Model] = dense
    data: Callable[[], tuple] = lambda: regression(27)
    feed: str = "dataset"
    compiled: Callable[[], dict] = dict
    wrap: Callable[[keras.Model], Any] = tfdistill.DistributedModel
    is_plain: bool = True
    teacher: Callable[[], keras.Model] | None = None
    heads: dict[str, str] | None = None
    agree_on: str = "batch"
    steps_per_execution: Any = 1
    steps_per_epoch: int | None = None
    callbacks: Callable[[], list] = list
    policy: str = "float32"
    tolerance: float = 2e-6


sgd, adam = keras.optimizers.SGD, keras.optimizers.Adam


def _decay(rate: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.7)


def _rates() -> list:
    return [keras.callbacks.LearningRateScheduler(lambda e: [0.2, 0.03][e])]


class _Grown(steps.SteppedCallback):
    """Has executions grow, and is due every 20 steps; not in plain Keras."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Each number is taken for faster than the one before, at once."""
        super().on_train_begin(logs)
        self._at_once = mock.patch.multiple(
            auto_steps, _LEAST_SECS=0.0, _LEAST_GAIN=0.0
        )
        self._at_once.start()
        self._due, self._seen = steps.EverySteps(20), []
        if isinstance(self.model, tfdistill.DistributedModel):
            # A busy machine takes longer for one step than is worth sharing.
            self.model.trainer.auto_steps._longest_secs = math.inf

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if isinstance(self.model, tfdistill.DistributedModel):
            super().on_train_batch_end(batch, logs)
            self._seen.append(self.step)

    def on_train_end(self, logs: Any = None) -> None:
        self._at_once.stop()
        if self._seen:
            last = self._seen[-1]
            assert len(self._seen) < last / 1.5, f"{self._seen}: no growth"
            assert set(range(20, last, 20)) <= set(self._seen), self._seen


def _kinds(**options: Any) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, **options
    )


def _signs(**others: Any) -> Callable[[], dict]:
    """Compiles with the loss of targets 0 and 1."""
    return lambda: {
        "loss": keras.losses.BinaryCrossentropy(from_logits=True),
        **others,
    }


def _own_loss(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.abs(y_true - y_pred) ** 1.5, axis=-1)


def _of_whole_batch(y_true: Any, y_pred: Any) -> Any:
    error = keras.ops.sum(keras.ops.square(y_true - y_pred))
    return error / (1 + keras.ops.sum(keras.ops.abs(y_pred)))


CASES: dict[str, Case] = {
    # Sums before it clips, and ends with an execution of fewer steps.
    "momentum_clipped": Case(
        optimizer=lambda: sgd(_decay(0.3), momentum=0.5, global_clipnorm=0.05),
        steps_per_execution=3,
    ),
    "dictionaries": Case(
        optimizer=lambda: keras.optimizers.AdamW(0.01, use_ema=True),
        student=dictionaries,
        data=dictionary_data,
        compiled=lambda: {
            "loss": {
                "value": keras.losses.MeanSquaredError(
                    reduction="mean_with_sample_weight"
                ),
                "kind": _kinds(reduction="sum"),
            },
            "loss_weights": {"value": 0.5, "kind": 2.0},
            "metrics": {"kind": "accuracy"},
        },
        tolerance=2e-5,
    ),
    # The last batch leaves some replicas without a row.
    "weighted_one_left": Case(
        data=lambda: weighted(17),
        compiled=lambda: {"metrics": [Extremes()], "weighted_metrics": ["mse"]},
    ),
    "decayed_subclassed": Case(
        optimizer=lambda: tfdistill.optimizers.with_kernel_decay(
            sgd, coupled=True
        )(
            0.1,
            momentum=0.9,
            weight_decay=keras.optimizers.schedules.PiecewiseConstantDecay(
                [2, 5], [0.1, 0.01, 0.0]
            ),
        ),
        student=Subclassed,
        compiled=lambda: {"loss": _own_loss},
        steps_per_execution=3,
        tolerance=2e-5,
    ),
    "arrays_shuffled": Case(feed="arrays"),
    "mixed_bfloat16": Case(policy="mixed_bfloat16", tolerance=2e-2),
    "synchronized_normalization": Case(
        student=lambda: normalized(synchronized=True),
        data=lambda: regression(17),
        tolerance=2e-5,
    ),
    "whole_batch": Case(
        data=lambda: weighted(17),
        compiled=lambda: {"loss": _of_whole_batch},
        tolerance=2e-5,
    ),
    # Keras makes the rows of such gradients distinct, in each batch.
    "sparse_adam": Case(
        optimizer=lambda: adam(0.01),
        student=sparse_inputs,
        data=sparse_rows,
        tolerance=2e-5,
    ),
    # With Keras' own table, the norm of whose gradients counts.
    "masked_sequence": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1, global_clipnorm=0.1),
        student=masked_sequence,
        data=sequences,
        compiled=lambda: {"loss": _kinds(), "metrics": ["accuracy"]},
        steps_per_execution=3,
    ),
    # Each step has another number of distinct rows on each worker.
    "tables": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=click_student,
        data=clicks,
        compiled=_signs(metrics=["mae"]),
        steps_per_execution=3,
    ),
    "tables_lazy_adam": Case(
        optimizer=lambda: adam(_decay(0.02), global_clipnorm=0.1),
        student=click_student,
        data=clicks,
        # On servers alone; elsewhere it changes nothing.
        compiled=_signs(
            metrics=["mae"], rows_ahead=tfdistill.contrib.RowsAhead(2)
        ),
        is_plain=False,
        steps_per_execution=5,
        steps_per_epoch=10,
        tolerance=2e-5,
    ),
    "ids_by_column": Case(
        optimizer=lambda: adam(0.02, global_clipnorm=0.1),
        student=dynamic_student,
        data=wild_clicks,
        teacher=dynamic_student,
        agree_on="both",
        compiled=_signs(
            distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy()
        ),
        is_plain=False,
        steps_per_execution=3,
        tolerance=2e-5,
    ),
    "rates_auc": Case(
        optimizer=lambda: sgd(0.1, momentum=0.9),
        data=lambda: signs(48),
        feed="share",
        compiled=lambda: _signs(
            metrics=[
                "mae",
                "AUC",
                Counted(),
                Extremes(),
                keras.metrics.RootMeanSquaredError(),
                keras.metrics.F1Score(threshold=0.5),
            ]
        )(),
        steps_per_execution=3,
        steps_per_epoch=6,
        callbacks=_rates,
    ),
    "steps_found": Case(
        data=lambda: regression(400),
        steps_per_execution="auto",
        callbacks=lambda: [_Grown()],
        tolerance=2e-5,
    ),
    "taught_in_memory": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        teacher=lambda: dense(hidden_units=9),
        agree_on="both",
        data=weighted_signs,
        compiled=_signs(
            distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy()
        ),
        is_plain=False,
        steps_per_execution=5,
        tolerance=2e-5,
    ),
    # With weights of losses that are learned, of labels and of the teacher.
    "two_tasks_taught": Case(
        optimizer=lambda: keras.optimizers.Adagrad(0.1),
        student=lambda: two_tasks(("click", "sale", "click_soft")),
        teacher=two_tasks,
        heads={"click_soft": "click"},
        agree_on="rows",
        data=clicks_and_sales,
        compiled=lambda: {
            "loss": {
                name: keras.losses.BinaryCrossentropy(from_logits=True)
                for name in ("click", "sale")
            },
            "loss_weights": "uncertainty",
            "metrics": {"click": ["mae"]},
            "distillation_loss": (
                tfdistill.losses.BinarySoftTargetCrossEntropy()
            ),
            "distillation_output_weights": "uncertainty",
        },
        is_plain=False,
        steps_per_execution=5,
        tolerance=2e-5,
    ),
    "partly_labelled": Case(
        student=lambda: dense(units=3),
        data=partly_labelled,
        compiled=lambda: {
            "loss": _kinds(ignore_class=-1),
            "metrics": ["accuracy"],
        },
    ),
    # By the names that `compile` takes.
    "muon": Case(optimizer=lambda: "muon", tolerance=2e-5),
    # `fit` of Keras 3.15 makes its first step from weights of 0: it copies
    # them to the optimizer in a trace, where the copies are lost.
    "schedule_free": Case(
        optimizer=lambda: "schedulefreeadamw", is_plain=False, tolerance=2e-5
    ),
    # Models with steps and losses of their own.
    "own_loss": Case(
        optimizer=lambda: sgd(0.1, momentum=0.9),
        student=penalized_table,
        data=ids_only,
        compiled=_signs(metrics=["mae"]),
        steps_per_execution=5,
    ),
    "own_step": Case(
        optimizer=lambda: adam(0.01, clipnorm=0.05),
        student=lambda: regularized(OwnStep),
        data=lambda: regression(25),
        steps_per_execution=3,
        tolerance=2e-5,
    ),
    "own_losses": Case(
        optimizer=lambda: sgd(0.3, momentum=0.5, clipvalue=0.01),
        student=lambda: regularized(OwnLosses),
    ),
    # For servers only. Replicas refuse bags, and each would normalize by its
    # own rows.
    "bags_by_function": Case(
        optimizer=lambda: keras.optimizers.Ftrl(0.2),
        student=bag_student,
        data=bags,
        feed="function",
        compiled=_signs(),
        is_plain=False,
    ),
    "normalized_by_function": Case(
        optimizer=lambda: keras.optimizers.RMSprop(0.01, weight_decay=0.01),
        student=normalized,
        data=weighted_signs,
        feed="function",
        compiled=_signs(metrics=["mae"], weighted_metrics=["mse"]),
        steps_per_execution=5,
    ),
}

# What a place takes a path of its own in; those of "more" places are deep.
PLACES = {
    "one_device": ("momentum_clipped", "dictionaries", "steps_found"),
    "two_replicas": (
        "momentum_clipped",
        "dictionaries",
        "weighted_one_left",
        "mixed_bfloat16",
        "synchronized_normalization",
        "sparse_adam",
        "tables",
        "taught_in_memory",
        "partly_labelled",
        "muon",
        "schedule_free",
        "own_step",
    ),
    "two_workers": ("rates_auc",),
    "more_on_two_workers": (
        "tables",
        "decayed_subclassed",
        "own_losses",
        "whole_batch",
        "arrays_shuffled",
        "masked_sequence",
        "steps_found",
        "own_loss",
        "two_tasks_taught",
    ),
    "two_workers_of_two": (
        "momentum_clipped",
        "synchronized_normalization",
        "tables_lazy_adam",
    ),
    "servers": (
        "bags_by_function",
        "ids_by_column",
        "tables_lazy_adam",
        "rates_auc",
        "tables",
        "steps_found",
        "two_tasks_taught",
        "own_loss",
        "normalized_by_function",
    ),
}


def of(place: str) -> dict[str, Case]:
    """Returns the cases of a place."""
    return {name: CASES[name] for name in PLACES[place]}


# ---- training ----


def _batched(data: tuple) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(data).batch(BATCH_SIZE)


def _fed(case: Case, data: tuple, strategy: Any) -> dict:
    """The data as `fit` gets them."""
    if case.feed == "arrays":
        x, y = data
        return {"x": x, "y": y, "batch_size": BATCH_SIZE, "shuffle": True}
    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    if case.feed == "share" and not on_servers:
        dataset = tfdistill_data.worker_shard(
            tf.data.Dataset.from_tensor_slices(data),
            tfdistill.Cluster.from_env(),
            global_batch_size=BATCH_SIZE,
        )
        return {"x": dataset.repeat().batch(BATCH_SIZE)}
    if case.feed == "function" and on_servers:
        return {
            "x": lambda context: _batched(data).shard(
                context.num_input_pipelines, context.input_pipeline_id
            )
        }
    dataset = _batched(data)
    return {"x": dataset.repeat() if case.steps_per_epoch else dataset}


def _wrapped(
    case: Case, student: keras.Model, teacher: Any, inputs: Any
) -> Any:
    """What trains the student."""
    if teacher is None:
        return case.wrap(student)
    teachers = tfdistill.teachers.FixedTeacher(teacher)
    agree_on: Any = case.agree_on
    if agree_on == "rows":
        agree_on = tf.data.Dataset.from_tensor_slices(inputs).batch(7)
    return tfdistill.CodistillModel(
        student,
        teachers=teachers,
        auxiliary_heads=case.heads,
        agree_on=agree_on,
    )


def run(case: Case, strategy: Any, *, is_reference: bool = False) -> Results:
    """Trains one case and returns all that must be equal."""
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(case.policy)
    data = case.data()
    teacher = case.teacher() if case.teacher else None
    # Above the scope, as the metrics at the top of a script.
    compiled = {"loss": "mse", "metrics": ["mae"], **case.compiled()}
    with strategy.scope():
        student = model = case.student()
        if not (is_reference and case.is_plain):
            model = _wrapped(case, student, teacher, data[0])
        model.compile(
            case.optimizer(),
            steps_per_execution=1 if is_reference else case.steps_per_execution,
            jit_compile=False,
            **compiled,
        )
    history = model.fit(
        **{"shuffle": False, **_fed(case, data, strategy)},
        epochs=2,
        steps_per_epoch=case.steps_per_epoch,
        validation_data=_batched(data),
        callbacks=case.callbacks(),
        verbose=0,
    )
    evaluated = model.evaluate(_batched(data), verbose=0, return_dict=True)
    predicted = model.predict(_batched(data), verbose=0)
    keras.config.set_dtype_policy("float32")
    results = {f"log_{k}": np.array(v) for k, v in history.history.items()}
    results |= {f"eval_{k}": np.array(v) for k, v in evaluated.items()}
    results |= {f"weight_{k}": v for k, v in student_weights(student).items()}
    for i, value in enumerate(keras.tree.flatten(predicted)):
        results[f"prediction_{i}"] = np.asarray(value).astype("float64")
    results["iterations"] = model.optimizer.iterations.numpy()
    return results


def reference(name: str) -> Results:
    """Returns what plain Keras makes of a case on one device, if it can.

    Where it cannot (`Case.is_plain`), it is what ours makes of it there.
    """
    strategy = tf.distribute.get_strategy()
    return references.kept(
        f"training-{name}",
        lambda: run(CASES[name], strategy, is_reference=True),
    )


def student_weights(student: keras.Model) -> Results:
    """Returns a student's weights by index, tables whole."""
    found = tables.variables_of(student)
    return {str(i): np.asarray(v.value) for i, v in enumerate(found)}


def assert_equal(actual: Results, expected: Results, tolerance: float) -> None:
    """Compares; ours may log more than plain Keras does, never less."""
    assert not expected.keys() - actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name],
            value,
            rtol=max(tolerance * 10, 1e-5),
            atol=tolerance,
            err_msg=name,
        )


def found_in(arrays: Any, name: str) -> Results:
    """Takes one case's results out of a file of several."""
    return {
        key.removeprefix(f"{name}/"): arrays[key]
        for key in arrays.files
        if key.startswith(f"{name}/")
    }


# ---- a task of two workers ----


def _use_all_devices(number: int) -> None:
    """Gives a worker of several a replica on each of its CPU devices.

    TensorFlow does so for GPUs; of CPUs it takes the first only.
    """
    from tensorflow.python.distribute import collective_all_reduce_strategy

    def devices(self: Any, resolver: Any, worker: str) -> tuple[Any, str]:
        found = tuple(f"{worker}/device:CPU:{i}" for i in range(number))
        return found, "CPU"

    extended = collective_all_reduce_strategy.CollectiveAllReduceExtended
    extended._initialize_local_devices = devices


def main(path: str, place: str) -> None:
    """Runs the cases of a place as one worker and writes their results."""
    devices = 2 if place == "two_workers_of_two" else 1
    if devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * devices
        )
        _use_all_devices(devices)
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    if strategy.num_replicas_in_sync != devices * cluster.num_workers:
        raise RuntimeError(f"{strategy.num_replicas_in_sync} replicas")
    results = {}
    for name, case in of(place).items():
        print("case", name, flush=True)
        found = run(case, strategy)
        results |= {f"{name}/{key}": value for key, value in found.items()}
    np.savez(f"{path}/worker_{cluster.task_index}.npz", **results)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
