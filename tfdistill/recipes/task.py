"""What one task of a group does: data, model, fit, results."""

import dataclasses
import functools
import time
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
    watched = _Watched(
        workload,
        cluster,
        exchange,
        has_teachers=bool(len(model.teachers)),
    )
    model.fit(
        train,
        validation_data=validation,
        steps_per_epoch=workload.epoch_steps,
        epochs=workload.num_steps // workload.epoch_steps,
        callbacks=[*watched.callbacks, *callbacks],
        verbose=2 if verbose else 0,
    )
    # A collective: every worker takes part, and gets all of them.
    predicted = _predict(model, validation, workload, loss)
    result = {
        **_summary(recipe, workload, cluster, model),
        "teachers": model.teachers.status(),
        **watched.measured(),
    }
    if cluster.is_chief:
        workdir = str(cluster.workdir)
        directory = outputs.group_dir(workdir, cluster.group)
        judged, *others = predicted
        outputs.write_predictions(directory, predicted[judged])
        outputs.write_student(model.save, directory)
        result["metrics"] = predicted[judged].figures()
        if others:
            result["metrics_by_output"] = {
                name: predicted[name].figures() for name in others
            }
        outputs.write_results(
            result, workdir=workdir, num_groups=cluster.num_groups
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


def _by_output(loss: Any) -> Mapping[str, keras.losses.Loss]:
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
    loss: Any,
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
        distillation_loss_weights=workload.distillation_loss_weights,
        steps_per_execution=workload.steps_per_execution,
    )
    return model


def _metrics(workload: Workload, loss: Any) -> Any:
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
    workload: Workload, cluster: tfdistill.Cluster, model: Any
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


class _Watched:
    """The callbacks of a run, and what they have measured."""

    def __init__(
        self,
        workload: Workload,
        cluster: tfdistill.Cluster,
        exchange: tfdistill.Exchange,
        *,
        has_teachers: bool,
    ) -> None:
        callbacks = tfdistill.callbacks
        directory = outputs.group_dir(str(cluster.workdir), cluster.group)
        self._pace = _Pace(workload.batch_size)
        self._exporter = callbacks.StudentExporter(
            exchange,
            group=cluster.group,
            schema=workload.schema and workload.schema(),
            **{"every_steps": workload.every_steps, **workload.exporter},
        )
        self._together = callbacks.WaitForGroups(
            cluster, limit_secs=workload.start_together_secs
        )
        self._mixer = workload.mixer and workload.mixer()
        self._backup = callbacks.Backup(
            directory / "backup",
            every_steps=workload.backup_every_steps,
            warm_start=workload.warm_start or None,
        )
        loader = callbacks.TeacherLoader(
            every_steps=workload.refresh_every_steps
        )
        best = workload.checkpoints == "best"
        name = "best.keras" if best else "checkpoints/{epoch:05d}.keras"
        checkpoint = keras.callbacks.ModelCheckpoint(
            str(directory / name), monitor="val_loss", save_best_only=best
        )
        # All; `fit` runs those that write on the chief only.
        self.callbacks = [
            *([self._together] if workload.start_together_secs else []),
            *[self._pace, self._exporter],
            *([self._mixer] if self._mixer else []),
            self._backup,
            run_log.RunLogger(str(directory)),
            callbacks.CodistillTensorBoard(directory / summaries.DIRECTORY),
            *([loader] if has_teachers else []),
            *(
                [callbacks.IgnoreStorageErrors(checkpoint)]
                if workload.checkpoints != "none"
                else []
            ),
            *workload.callbacks(),
        ]

    def measured(self) -> dict[str, Any]:
        """Returns the facts of the training for the results."""
        return {
            "examples_per_second": self._pace.examples_per_second,
            "seconds": self._pace.seconds,
            "process_seconds": self._pace.process_seconds,
            "waited_seconds": self._together.waited_secs,
            "exports": {
                **self._exporter.totals,
                "every_steps": self._exporter.every_steps,
            },
            **({"mixing": self._mixer.totals} if self._mixer else {}),
            "resumed_step": self._backup.resumed_step,
        }


def _predict(
    model: tfdistill.CodistillModel,
    validation: tf.data.Dataset,
    workload: Workload,
    loss: Any,
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


def _summary(
    recipe: recipes.Recipe,
    workload: Workload,
    cluster: tfdistill.Cluster,
    model: tfdistill.CodistillModel,
) -> dict[str, Any]:
    steps = int(model.optimizer.iterations.numpy())
    return {
        "group": cluster.group,
        "recipe": recipe.recipe,
        "steps": steps,
        "examples": steps * workload.batch_size,
        "workers": cluster.num_workers,
        "parameter_bytes": sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
            for v in model.student.trainable_variables
        ),
    }


class _Pace(keras.callbacks.Callback):
    """Measures training without tracing and without evaluation."""

    def __init__(self, global_batch_size: int) -> None:
        super().__init__()
        self._global_batch_size = global_batch_size
        # Steps and seconds of each epoch of this process.
        self._epochs: list[tuple[int, float]] = []
        self._epoch_start = self._start = self._process_start = 0.0
        self._first_batch: int | None = None
        self.seconds = self.process_seconds = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = time.perf_counter()
        self._process_start = time.process_time()

    def on_train_end(self, logs: Any = None) -> None:
        self.seconds = time.perf_counter() - self._start
        self.process_seconds = time.process_time() - self._process_start

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._first_batch = None
        self._epoch_start = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Not 0 in an epoch that was resumed.
        if self._first_batch is None:
            self._first_batch = batch

    def on_test_begin(self, logs: Any = None) -> None:
        # Between the last step of an epoch and its evaluation.
        steps = self.params["steps"] - (self._first_batch or 0)
        seconds = time.perf_counter() - self._epoch_start
        self._epochs.append((steps, seconds))

    @property
    def examples_per_second(self) -> float:
        """The whole group's, in all epochs except the first, which traces.

        0 if nothing was left to train.
        """
        epochs = self._epochs[1:] or self._epochs
        steps = sum(steps for steps, _ in epochs)
        seconds = sum(seconds for _, seconds in epochs)
        return steps * self._global_batch_size / seconds if seconds else 0.0
