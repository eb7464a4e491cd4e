"""What one task of a group does: data, model, exchange, fit, results."""

import dataclasses
import importlib
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from launch.config import config
from launch.task import cohort
from launch.task import objectives
from launch.task import outputs
from launch.task import predictions
from launch.task import served
from launch.task import students
from tfdistill import data
from tfdistill import data_checks
from tfdistill import labels
from tfdistill.observe import summaries


def make(
    config: config.Config, cluster: tfdistill.Cluster
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns this task's training data and its validation data.

    Raises DataError or OptionsError, whichever are at fault.
    """
    source = importlib.import_module(f"models.{config.data.name}")
    mode = config.data.mode
    if mode == "coordinated":
        # All groups read what the first one would.
        cluster, mode = dataclasses.replace(cluster, group=0), "shared"
    try:
        return source.make_datasets(
            cluster,
            global_batch_size=config.data.global_batch_size,
            data=mode,
            seed=config.data.seed,
            **config.data.source,
        )
    except TypeError as cause:
        raise students.OptionsError(
            f"`data.path` or `data.arguments` do not fit: {cause}."
        ) from cause
    except (OSError, ValueError) as cause:
        raise data_checks.DataError(str(cause)) from cause


# Predictions that are held at a time: 256 MB of float64.
_LOGITS_AT_ONCE = 2**25


def run(
    config: config.Config,
    cluster: tfdistill.Cluster,
    *,
    verbose: bool = False,
    strategy: tf.distribute.Strategy | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
) -> dict[str, Any]:
    """Trains this task's student with its group, and writes the results.

    Returns the group's results; its metrics on the chief only. Raises DataError
    or OptionsError, whichever are at fault.
    The strategy is by default the cluster's; `callbacks` come after the run's.
    """
    strategy = strategy or tfdistill.make_strategy(cluster)
    if cluster.is_chief and cluster.group == 0:
        outputs.write_config(config, str(cluster.workdir))
    keras.config.set_dtype_policy(config.dtype_policy)
    keras.utils.set_random_seed(students.initial_seed(config, cluster.group))
    train, validation = make(config, cluster)
    train = _labelled(train, config, cluster)
    train, validation = map(data.without_autotune, (train, validation))
    exchange = tfdistill.Exchange(
        str(cluster.exchange), **config.exchange.taken_by(tfdistill.Exchange)
    )
    counts = None
    if config.smoothing.kind == "unigram":
        counts = objectives.label_counts(train)
    canary = _canary(config, cluster, validation)
    mixer = students.make_mixer(config, cluster, canary)
    is_barrier = isinstance(mixer, tfdistill.contrib.MergeBarrier)
    with strategy.scope():
        model = students.make_model(
            config,
            cluster,
            exchange,
            label_counts=counts,
            canary=canary,
            barrier=mixer if is_barrier else None,
        )
    peers = served.ServedPeers(config, cluster, model.student)
    train = peers.label(train)
    callbacks = [*_callbacks(config, cluster), *callbacks]
    held_out = validation
    if isinstance(model.student, cohort.Cohort):
        train, held_out = map(model.student.for_each, (train, held_out))
    measured = _fit(
        model,
        train,
        held_out,
        config,
        cluster,
        exchange,
        mixer,
        callbacks,
        verbose,
    )
    teachers = peers.described(model.teachers.status())
    peers.close()
    # A collective: every worker takes part, and gets all of them.
    predicted = _predict(model, validation, config)
    result = {
        **_summary(config, cluster, model),
        "teachers": teachers,
        **measured,
    }
    if cluster.is_chief and isinstance(model.student, cohort.Cohort):
        _write_cohort(result, predicted, model.student, cluster)
    elif cluster.is_chief:
        _write(result, predicted[0], model.save, cluster)
    return result


def _labelled(
    train: tf.data.Dataset, config: config.Config, cluster: tfdistill.Cluster
) -> tf.data.Dataset:
    """Adds what `launch.label` wrote, if the recipe names it."""
    path = config.codistillation.labels_from
    if path is None or not config.codistillation.enabled:
        return train
    try:
        directory = path.replace("{group}", str(cluster.group))
        return train.apply(labels.read(directory))
    except ValueError as cause:
        raise data_checks.DataError(str(cause)) from cause


def _write(
    result: dict[str, Any],
    predicted: Any,
    save: Callable[[str], None],
    cluster: tfdistill.Cluster,
) -> None:
    """Writes the group's results, and puts its metrics into them."""
    workdir = str(cluster.workdir)
    directory = outputs.group_dir(workdir, cluster.group)
    outputs.write_predictions(directory, predicted)
    outputs.write_student(save, directory)
    result["metrics"] = predicted.figures()
    outputs.write_results(
        result, workdir=workdir, num_groups=cluster.num_groups
    )


def _write_cohort(
    result: dict[str, Any],
    predicted: Sequence[Any],
    model: cohort.Cohort,
    cluster: tfdistill.Cluster,
) -> None:
    """Writes the results of students in one process as those of groups.

    The first student's come last: they are what a completed run is known by.
    """
    size = len(predicted)
    shared = {**result, "process_seconds": result["process_seconds"] / size}
    for number in reversed(range(size)):
        place = dataclasses.replace(cluster, group=number, num_groups=size)
        directory = outputs.group_dir(str(cluster.workdir), number)
        cohort.write_progress(directory, number)
        own = {**shared, "group": number}
        _write(own, predicted[number], model.students[number].save, place)
        if not number:
            result.update(own)


def _canary(
    config: config.Config,
    cluster: tfdistill.Cluster,
    validation: tf.data.Dataset,
) -> Any:
    # Of students in one process, no version is ever checked.
    alone = config.codistillation.num_students > 1
    if alone or not students.learns(config, cluster):
        return None
    return students.make_canary(config, validation)


def _fit(
    model: tfdistill.CodistillModel,
    train: tf.data.Dataset,
    validation: tf.data.Dataset,
    config: config.Config,
    cluster: tfdistill.Cluster,
    exchange: tfdistill.Exchange,
    mixer: tfdistill.mixing.WeightMixer | None,
    callbacks: Sequence[keras.callbacks.Callback],
    verbose: bool,
) -> dict[str, Any]:
    """Trains, and returns what was measured meanwhile."""
    pace = _Pace(config.data.global_batch_size)
    exporter = students.make_exporter(config, cluster, exchange)
    together = tfdistill.StartTogether(
        cluster, limit_secs=config.start_together_secs
    )
    backup = _backup(config, cluster)
    model.fit(
        train,
        validation_data=validation,
        steps_per_epoch=config.evaluate_every_steps,
        epochs=config.num_steps // config.evaluate_every_steps,
        callbacks=[
            *([together] if config.start_together_secs else []),
            *[pace, exporter],
            *([mixer] if mixer else []),
            *[backup, *callbacks],
        ],
        verbose=2 if verbose else 0,
    )
    return {
        "examples_per_second": pace.examples_per_second,
        "seconds": pace.seconds,
        "process_seconds": pace.process_seconds,
        "waited_seconds": together.waited_secs,
        "exports": exporter.totals,
        **({"mixing": mixer.totals} if mixer else {}),
        "resumed_step": backup.resumed_step,
    }


def _predict(
    model: tfdistill.CodistillModel,
    validation: tf.data.Dataset,
    config: config.Config,
) -> list[Any]:
    """Predicts the validation data, a part at a time if logits are many.

    Returns the predictions of each student.
    """
    objective = objectives.of(config.data.name)
    num_batches = int(validation.cardinality())  # Negative if not known.
    found = cohort.students_of(model.student)
    outputs = len(found) * int(np.prod(found[0].output_shape[1:]))
    step = max(1, _LOGITS_AT_ONCE // (outputs * config.data.global_batch_size))
    parts = [
        validation.skip(first).take(step)
        for first in range(0, num_batches, step)
    ]
    if len(parts) < 2:
        parts = [validation]
    predicted: list[list[Any]] = [[] for _ in found]
    for part in parts:
        logits = keras.tree.flatten(model.predict(part, verbose=0))
        labels = np.concatenate([np.asarray(label) for _, label in part])
        for own, kept in zip(logits, predicted, strict=True):
            own = np.asarray(own, np.float64)
            kept.append(objective.predictions(own, labels))
    return list(map(predictions.concatenate, predicted))


def _summary(
    config: config.Config,
    cluster: tfdistill.Cluster,
    model: tfdistill.CodistillModel,
) -> dict[str, Any]:
    steps = int(model.optimizer.iterations.numpy())
    return {
        "group": cluster.group,
        "recipe": config.recipe,
        "steps": steps,
        "examples": steps * config.data.global_batch_size,
        "workers": cluster.num_workers,
        "parameter_bytes": sum(
            int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size
            for v in cohort.students_of(model.student)[0].trainable_variables
        ),
    }


def _backup(
    config: config.Config, cluster: tfdistill.Cluster
) -> tfdistill.Backup:
    directory = outputs.group_dir(str(cluster.workdir), cluster.group)
    every = config.backup_every_steps
    return tfdistill.Backup(directory / "backup", every_steps=every)


def _callbacks(
    config: config.Config,
    cluster: tfdistill.Cluster,
) -> list[keras.callbacks.Callback]:
    """Returns the callbacks; `fit` runs those that write on the chief only."""
    directory = outputs.group_dir(str(cluster.workdir), cluster.group)
    callbacks: list[keras.callbacks.Callback] = [
        tfdistill.RunLog(str(directory)),
        tfdistill.Summaries(
            directory / summaries.DIRECTORY,
            configuration=dataclasses.asdict(config),
        ),
    ]
    learn = config.codistillation
    # Labels from servers come with the data, and those of students in one
    # process with the step: there is nothing to load.
    loads = (
        learn.by != "served"
        or bool(learn.saved_models)
        or learn.include_past is not False
    ) and learn.num_students == 1
    if students.learns(config, cluster) and loads:
        every = config.exchange.refresh_every_steps
        callbacks.append(tfdistill.TeacherLoader(every_steps=every))
    if config.checkpoints != "none":
        best = config.checkpoints == "best"
        name = "best.keras" if best else "checkpoints/{epoch:05d}.keras"
        checkpoint = keras.callbacks.ModelCheckpoint(
            str(directory / name), monitor="val_loss", save_best_only=best
        )
        callbacks.append(tfdistill.BestEffort(checkpoint))
    return callbacks


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
        """Of the whole group; of all epochs but the first, which traces.

        0 if nothing was left to train.
        """
        epochs = self._epochs[1:] or self._epochs
        steps = sum(steps for steps, _ in epochs)
        seconds = sum(seconds for _, seconds in epochs)
        return steps * self._global_batch_size / seconds if seconds else 0.0
