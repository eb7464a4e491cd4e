"""What one task of a group does: data, model, fit, results."""

import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill import data
from tfdistill import workload as workload_lib
from tfdistill.follow import screen
from tfdistill.held_out import callback as measuring_lib
from tfdistill.held_out import objectives
from tfdistill.held_out import predictions
from tfdistill.observe import run_log
from tfdistill.observe import summaries
from tfdistill.recipes import optimizers
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes

Workload = workload_lib.Workload
# Predictions that are held at a time: 256 MB of float64.
_LOGITS_AT_ONCE = 2**25


def run(
    recipe: recipes.Recipe,
    cluster: tfdistill.Cluster,
    *,
    verbose: bool = False,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict[str, Any]:
    """Trains this task's student with its group, and writes the results.

    Returns the group's results; its metrics on the chief only. Raises DataError
    or OptionsError, whichever are at fault. `callbacks` come after the run's.
    """
    strategy = tfdistill.make_strategy(cluster)
    workload = recipe.workload()
    if workload.schema:  # Its files are read once, not by teachers and exports.
        workload = dataclasses.replace(
            workload, schema=functools.cache(workload.schema)
        )
    if cluster.is_chief and cluster.group == 0:
        outputs.write_config(recipe, str(cluster.workdir))
    _seed(workload, cluster)
    train, validation = map(data.without_autotune, open_data(workload, cluster))
    _seed(workload, cluster)
    exchange = tfdistill.Exchange(str(cluster.exchange))
    loss = task_loss(workload, train)
    with strategy.scope():
        model = make_model(workload, cluster, exchange, loss=loss)
    directory = outputs.group_dir(str(cluster.workdir), cluster.group)
    measuring = measuring_lib.Measuring()
    backup = tfdistill.callbacks.Backup(
        directory / "backup",
        every_steps=workload.backup_every_steps,
        warm_start=workload.warm_start or None,
    )
    model.fit(
        train,
        validation_data=validation,
        steps_per_epoch=workload.epoch_steps,
        epochs=workload.num_steps // workload.epoch_steps,
        callbacks=[
            measuring,
            *_callbacks(
                workload,
                cluster,
                exchange,
                backup,
                has_teachers=bool(len(model.teachers)),
            ),
            *callbacks,
        ],
        verbose=2 if verbose else 0,
    )
    # A collective: every worker takes part, and gets all of them.
    predicted = _predict(model, validation, workload, loss)
    result = {
        "group": cluster.group,
        "recipe": recipe.recipe,
        "workers": cluster.num_workers,
        **measuring.measured(),
        "resumed_step": backup.resumed_step,
    }
    if cluster.is_chief:
        judged, *others = predicted
        outputs.write_predictions(directory, predicted[judged])
        outputs.write_student(model.save, directory)
        result["metrics"] = predicted[judged].figures()
        if others:
            result["metrics_by_output"] = {
                name: predicted[name].figures() for name in others
            }
        outputs.write_results(
            result, workdir=str(cluster.workdir), num_groups=cluster.num_groups
        )
    return result


def initial_seed(workload: Workload, group: int) -> int:
    """Returns the seed of a group's initial weights.

    Groups that mix their weights begin with the same ones; else no two groups
    and runs share one.
    """
    number = 0 if workload.mixer else group
    drawn = np.random.SeedSequence([workload.seed, number])
    return int(drawn.generate_state(1)[0])


def _seed(workload: Workload, cluster: tfdistill.Cluster) -> None:
    keras.config.set_dtype_policy(workload.dtype_policy)
    keras.utils.set_random_seed(initial_seed(workload, cluster.group))


def open_data(
    workload: Workload, cluster: tfdistill.Cluster
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns this group's training data and its validation data.

    Raises DataError or OptionsError, whichever are at fault.
    """
    workers = cluster.num_workers
    if not cluster.uses_parameter_servers and workload.batch_size < workers:
        raise recipes.OptionsError(
            "`batch_size` must be at least the number of workers of a group, "
            f"{workers}; received {workload.batch_size}. Batches are global: "
            "raise it, or use fewer workers."
        )
    try:
        return workload.datasets(cluster)
    except TypeError as cause:
        raise recipes.OptionsError(
            f"The data doesn't accept these arguments: {cause}."
        ) from cause
    except (OSError, ValueError) as cause:
        raise data.DataError(str(cause)) from cause


def task_loss(workload: Workload, train: tf.data.Dataset) -> Any:
    """Returns the loss of the labels, or a dict of losses by output.

    Raises OptionsError if results cannot be judged by it.
    """
    loss = workload.loss
    if not isinstance(loss, keras.losses.Loss | Mapping):
        loss = loss(train)
    try:
        for each in _by_output(loss).values():
            objectives.of(each)
    except ValueError as cause:
        raise recipes.OptionsError(str(cause)) from cause
    return loss


def _by_output(loss: object) -> Mapping[str, keras.losses.Loss]:
    """Returns losses by output; the only output of a model is named ""."""
    return loss if isinstance(loss, Mapping) else {"": loss}


def make_student(workload: Workload) -> keras.Model:
    """Returns a student without teachers.

    Raises OptionsError if the model refuses its arguments.
    """
    try:
        return workload.model()
    except (TypeError, ValueError) as cause:
        raise recipes.OptionsError(
            f"The model doesn't accept these arguments: {cause}"
        ) from cause


def make_model(
    workload: Workload,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
    *,
    loss: object,
) -> tfdistill.CodistillModel:
    """Returns the compiled student with its teachers.

    Call it in the strategy's scope.
    """
    model = tfdistill.CodistillModel(
        make_student(workload),
        teachers=_teachers(workload, exchange),
        auxiliary_heads=workload.auxiliary_heads,
        agree_on=workload.agree_on,
    )
    model.compile(
        _optimizer(workload, cluster, model),
        loss,
        loss_weights=workload.loss_weights,
        metrics=_metrics(workload, loss),
        distillation_loss=workload.distillation_loss
        or tfdistill.losses.SoftTargetCrossEntropy(from_logits=True),
        distillation_weight=workload.distillation_weight,
        distillation_output_weights=workload.distillation_output_weights,
        steps_per_execution=workload.steps_per_execution,
    )
    return model


def _metrics(workload: Workload, loss: object) -> Any:
    """Returns the metrics, a log loss of each output among them."""
    given = workload.metrics()
    if not isinstance(loss, Mapping):
        return [*given, objectives.of(loss).log_loss()]
    by_output = given or {}
    return {
        name: [*by_output.get(name, ()), objectives.of(each).log_loss()]
        for name, each in loss.items()
    }


def _teachers(
    workload: Workload, exchange: tfdistill.Exchange
) -> list[tfdistill.teachers.Teacher]:
    """Returns the teachers; peers get the settings that all groups share."""
    made = workload.teachers() if workload.teachers else []
    found = list(made) if isinstance(made, list | tuple) else [made]
    for one in found:
        if isinstance(one, tfdistill.teachers.Peers):
            one.exchange = one.exchange or exchange
            if workload.schema and not one.schema:
                one.schema = screen.digests(workload.schema())
    return found


def _optimizer(
    workload: Workload,
    cluster: tfdistill.Cluster,
    model: tfdistill.CodistillModel,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer of a group that learns from others, or not."""
    make = workload.optimizer
    if not len(model.teachers) and workload.optimizer_alone:
        make = workload.optimizer_alone
    try:
        optimizer = make()
        if workload.optimizer_name:
            optimizer = optimizers.named(optimizer, workload.optimizer_name)
        layers = tfdistill.layers
        tables = layers.ShardedEmbedding, layers.DynamicEmbedding
        has_tables = any(isinstance(x, tables) for x in model.student.layers)
        if cluster.uses_parameter_servers or has_tables:
            layers.ShardedEmbedding.check_optimizer(optimizer)
    except (TypeError, ValueError) as cause:
        raise recipes.OptionsError(str(cause)) from cause
    return optimizer


def _callbacks(
    workload: Workload,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
    backup: keras.callbacks.Callback,
    *,
    has_teachers: bool,
) -> list[keras.callbacks.Callback]:
    """Returns all of them; `fit` runs those that write on the chief only."""
    callbacks = tfdistill.callbacks
    directory = outputs.group_dir(str(cluster.workdir), cluster.group)
    found: list[keras.callbacks.Callback] = []
    if workload.start_together_secs:
        found.append(
            callbacks.WaitForGroups(
                cluster, limit_secs=workload.start_together_secs
            )
        )
    found.append(
        callbacks.StudentExporter(
            exchange,
            group=cluster.group,
            schema=workload.schema and workload.schema(),
            **{"every_steps": workload.every_steps, **workload.exporter},
        )
    )
    if workload.mixer:
        found.append(workload.mixer())
    found += [
        backup,
        run_log.RunLogger(str(directory)),
        callbacks.CodistillTensorBoard(directory / summaries.DIRECTORY),
    ]
    if has_teachers:
        found.append(
            callbacks.TeacherLoader(every_steps=workload.refresh_every_steps)
        )
    if workload.checkpoints != "none":
        best = workload.checkpoints == "best"
        name = "best.keras" if best else "checkpoints/{epoch:05d}.keras"
        checkpoint = keras.callbacks.ModelCheckpoint(
            str(directory / name), monitor="val_loss", save_best_only=best
        )
        found.append(callbacks.IgnoreStorageErrors(checkpoint))
    return [*found, *workload.callbacks()]


def _predict(
    model: tfdistill.CodistillModel,
    validation: tf.data.Dataset,
    workload: Workload,
    loss: object,
) -> dict[str, Any]:
    """Predicts the validation data, a part at a time if logits are many.

    By output, those that have a loss: in the order of the losses.
    """
    num_batches = int(validation.cardinality())  # Negative if not known.
    logits_each = sum(
        int(np.prod(output.shape[1:])) for output in model.student.outputs
    )
    step = max(1, _LOGITS_AT_ONCE // (logits_each * workload.batch_size))
    parts = [
        validation.skip(first).take(step)
        for first in range(0, num_batches, step)
    ]
    if len(parts) < 2:
        parts = [validation]
    losses = _by_output(loss)
    predicted: dict[str, list[Any]] = {name: [] for name in losses}
    for part in parts:
        logits = model.predict(part, verbose=0)
        labels = [label for _, label in part]
        for name, each in losses.items():
            found = objectives.of(each).predictions(
                np.asarray(_part(logits, name), np.float64),
                np.concatenate([np.asarray(_part(y, name)) for y in labels]),
            )
            predicted[name].append(found)
    return {
        name: predictions.concatenate(found)
        for name, found in predicted.items()
    }


def _part(values: Any, output: str) -> Any:
    return values[output] if output else values
