"""CodistillModel: the Keras face of a student, its teachers and its trainer."""

import os
import warnings
from typing import Any

import keras
import tensorflow as tf

from tfdistill import schedules
from tfdistill.backup import callback as callback_lib
from tfdistill.cluster import identity
from tfdistill.exports import student_graph
from tfdistill.observe import run_log
from tfdistill.observe import summaries
from tfdistill.parameter_server import trainer
from tfdistill.teachers import on_servers
from tfdistill.teachers import teacher_set
from tfdistill.teachers import term
from tfdistill.training import global_batch
from tfdistill.training import multi_worker
from tfdistill.training import steps
from tfdistill.training import trainer as replica_trainer

# A wrapper calls its student as a layer; these would never be run.
_STEPS = (
    "train_step",
    "compute_loss",
    "compute_metrics",
    "test_step",
    "predict_step",
)


class WrappedStudent:
    """Answers for `self.student` where Keras asks the model itself."""

    student: keras.Model

    @property
    def output_names(self) -> list[str]:
        """Names of the student's outputs, if its outputs have names.

        `compile` looks for them, so that a dict of losses, metrics or targets
        finds the outputs of a functional model that returns a list.
        """
        return self.student.output_names


def check_student(student: Any) -> None:
    """Checks that wrapping a student loses nothing of it.

    Args:
        student: What was given as the student.

    Raises:
        ValueError: It is no `keras.Model`, or has a training step, a loss or
            metrics of its own, which would never be run.
    """
    if not isinstance(student, keras.Model):
        raise ValueError(
            "`student` must be a keras.Model; received "
            f"{type(student).__name__}. Pass the model itself, not a "
            "function that builds it."
        )
    own = [name for name in _STEPS if _is_own(type(student), name)]
    if own:
        raise ValueError(
            "`student` must leave training to the model that wraps it; "
            f"received {type(student).__name__} with its own "
            f"{', '.join(own)}, which would never be run. Give the loss and "
            "the metrics to `compile`, a further term to `self.add_loss` in "
            "`call` or a layer; or wrap a model of the same layers without "
            "these methods."
        )


def _is_own(kind: type, name: str) -> bool:
    """Whether somebody else than Keras or this package wrote a method."""
    home = next(base for base in kind.__mro__ if name in vars(base))
    return home.__module__.partition(".")[0] not in ("keras", "tfdistill")


class StudentFiles:
    """Saves and loads `self.student` for the model that wraps it."""

    student: keras.Model

    def save(self, filepath: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the student as a `.keras` file; see `keras.Model.save`."""
        self.student.save(filepath, **kwargs)

    def save_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Saves the student's weights; see `keras.Model.save_weights`."""
        self.student.save_weights(filepath, **kwargs)

    def load_weights(
        self, filepath: str | os.PathLike[str], **kwargs: Any
    ) -> None:
        """Loads the student's weights; see `keras.Model.load_weights`."""
        self.student.load_weights(filepath, **kwargs)

    def export(self, filepath: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Exports the student as a SavedModel; see `keras.Model.export`."""
        return self.student.export(filepath, **kwargs)

    def get_compile_config(self) -> None:
        """Returns nothing: `compile` is called anew, with the teachers' part.

        Otherwise Keras would save the task's half of it alone.
        """
        return None


def add_launched_callbacks(callbacks: Any, *, follows_peers: bool) -> Any:
    """Adds a `RunLog` and `Summaries` in a launched run.

    Warns of teachers that nobody follows, and of a group that nobody hears.

    Args:
        callbacks: What `fit` was given.
        follows_peers: Whether the model has teachers in other groups.

    Returns:
        The callbacks to run.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    found = keras.tree.flatten(callbacks or [])
    follows = any(getattr(c, "follows_teachers", False) for c in found)
    if follows_peers and not follows:
        warnings.warn(
            "The model has teachers in other groups and `fit` got no "
            "tfdistill.TeacherLoader, so none will ever arrive. Add "
            "tfdistill.TeacherLoader(every_steps=...) to `callbacks`.",
            stacklevel=4,
        )
    cluster = identity.Cluster.from_env()
    exports = any(getattr(c, "exports_student", False) for c in found)
    if follows_peers and cluster.num_groups > 1 and not exports:
        warnings.warn(
            f"This is group {cluster.group} of {cluster.num_groups}, and `fit` "
            "got no tfdistill.StudentExporter, so the other groups will never "
            "learn from it. Add tfdistill.StudentExporter(exchange, "
            "every_steps=...) to `callbacks`.",
            stacklevel=4,
        )
    directory = cluster.group_dir
    if directory and not _has(found, run_log.RunLog):
        found.append(run_log.RunLog(directory))
    if directory and not _has(found, summaries.Summaries):
        path = f"{directory}/{summaries.DIRECTORY}"
        found.append(summaries.Summaries(path))
    for callback in found:
        if isinstance(callback, summaries.Summaries):
            callback.observe(found)
    return found


def _has(callbacks: list[keras.callbacks.Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


_TRACKERS = ("task_loss", "distillation_loss")


@keras.saving.register_keras_serializable(package="tfdistill")
class CodistillModel(
    StudentFiles,
    steps.StepDetails,
    WrappedStudent,
    on_servers.RemoteTeaching,
    trainer.ParameterServerTraining,
    callback_lib.ResumableTraining,
    multi_worker.MultiWorkerTraining,
    keras.Model,
):
    """Trains a student on its task and on what its teachers predict.

    The loss of a step is

        task_loss + w(step) * psi(mean of the teachers' predictions, own)

    with one psi on the aggregate (Anil et al. 2018, Algorithm 1). The second
    term is absent while `w(step)` is 0 and while no healthy teacher is
    there. Teachers run in inference mode on the student's own batch.

    `evaluate`, `predict`, `save`, `save_weights`, `load_weights` and `export`
    concern the student alone: no file of it knows of teachers.

    `fit` logs `loss`, `task_loss`, `distillation_loss` (unweighted),
    `distillation_weight` (the weight in force at the last step),
    `teacher_staleness` (mean over peers in use at the last step, in steps;
    NaN while there is none) and the compiled metrics.

    Example:
        >>> student = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(3)]
        ... )
        >>> model = CodistillModel(student)
        >>> model.compile("sgd", "mse")
    """

    def __init__(
        self,
        student: keras.Model,
        *,
        teachers: teacher_set.TeacherSet | None = None,
        name: str | None = None,
    ) -> None:
        """Wraps a student. Make both inside the strategy's scope.

        Args:
            student: Any Keras 3 model: functional, subclassed, multi-output.
            teachers: Whom to learn from. Defaults to nobody: plain training.
            name: Name of the model.

        Raises:
            ValueError: `student` is not a `keras.Model`, or has a training
                step or loss of its own.
        """
        check_student(student)
        super().__init__(name=name or f"codistill_{student.name}")
        self.student = student
        self.built = student.built
        # In a tuple of a plain object: Keras must not track teachers.
        self._untracked = _Untracked(teachers or teacher_set.TeacherSet())

    @property
    def teachers(self) -> teacher_set.TeacherSet:
        """Whom the student learns from."""
        return self._untracked.teachers

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Runs the student."""
        return self.student(inputs, training=training)

    def compile(
        self,
        *args: Any,
        distillation_loss: Any = None,
        distillation_weight: Any = 1.0,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            *args: As for `keras.Model.compile`.
            distillation_loss: A `tfdistill.losses.DistillationLoss` for every
                output; or, by output, a dict, list or tuple of them with None
                for outputs that are not distilled. Needed with teachers.
            distillation_weight: A number or a callable of the global step
                (int64 scalar tensor) that gives a float scalar, such as the
                schedules of `tfdistill.schedules`. Default 1.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            ValueError: There are teachers and no `distillation_loss`.
        """
        if len(self.teachers) and distillation_loss is None:
            raise ValueError(
                "`compile` needs a `distillation_loss` when the model has "
                f"teachers; received None with {len(self.teachers)} of them. "
                "For classes: tfdistill.losses.SoftTargetCrossEntropy()."
            )
        super().compile(*args, **kwargs)
        self._untracked.term = term.DistillationTerm(
            distillation_loss,
            task_loss=self.loss,
            output_names=getattr(self.student, "output_names", None),
        )
        self._untracked.loss = distillation_loss
        self._untracked.weight = schedules.get(distillation_weight)
        self._task_tracker = keras.metrics.Mean("task_loss")
        self._distillation_tracker = keras.metrics.Mean("distillation_loss")

    @property
    def distillation(self) -> dict[str, Any]:
        """The `distillation_loss` and `distillation_weight` compiled with."""
        return {
            "distillation_loss": self._untracked.loss,
            "distillation_weight": self._untracked.weight,
        }

    # ---- one step ----

    def train_step(self, data: Any) -> multi_worker.Logs:
        """Runs one codistilled update on one replica's part of the batch.

        Args:
            data: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The logs of the step.
        """
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        step = tf.convert_to_tensor(self.optimizer.iterations)
        with batch.scope(), self.gradient_tape() as tape:
            y_pred = self(x, training=True)
            task_loss = self.compute_loss(
                x, y, y_pred, sample_weight, training=True
            )
            loss, logs = task_loss, _no_distillation(task_loss.dtype)
            if len(self.teachers):
                with tape.stop_recording():
                    weight = tf.cast(
                        self._untracked.weight(step), task_loss.dtype
                    )
                    soft = self.teachers.predict(
                        x, step=step, active=weight > 0, like=y_pred
                    )
                distillation_loss = self._untracked.term(
                    soft, y_pred, sample_weight
                )
                with tape.stop_recording():
                    compared = self._untracked.term.compare(
                        soft, y_pred, sample_weight
                    )
                weight *= term.strength(soft, weight.dtype)
                loss += weight * tf.cast(distillation_loss, loss.dtype)
                self.record_loss(distillation_loss, batch, "distillation_loss")
                logs = {
                    "distillation_weight": weight,
                    "teacher_staleness": soft.staleness,
                    **steps.hidden(*compared),
                }
            scaled = self.optimizer.scale_loss(loss)
        self.apply_summed_gradients(tape, scaled)
        self.record_loss(loss, batch)
        self.record_loss(task_loss, batch, "task_loss")
        metrics = self.compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, **logs, steps.EXAMPLES: batch.total}

    def test_step(self, data: Any) -> multi_worker.Logs:
        """Evaluates the student alone on one replica's part of the batch.

        Args:
            data: `x`, `(x, y)` or `(x, y, sample_weight)`.

        Returns:
            The logs of the step, without those of distillation.
        """
        logs = super().test_step(data)
        return {k: v for k, v in logs.items() if k not in _TRACKERS}

    def complete_callbacks(self, callbacks: Any) -> Any:
        """Adds a `RunLog` and `Summaries` in a launched run.

        Args:
            callbacks: What `fit` was given.

        Returns:
            The callbacks to run.
        """
        return add_launched_callbacks(
            callbacks, follows_peers=self.teachers.follows_peers
        )

    def make_train_function(self, force: bool = False) -> Any:
        """Builds what `fit` calls; makes the teachers' variables first."""
        if self.train_function is not None and not force:
            return self.train_function
        if len(self.teachers):
            self.teachers.attach(self.graph, self.distribute_strategy)
        super().make_train_function(force)
        execute = self.train_function

        def train_function(iterator: Any) -> multi_worker.Logs:
            logs = self.shown_logs(execute(iterator))
            self.examples_of_last_execution = (
                logs.pop(steps.EXAMPLES) * self.steps_per_execution
            )
            return logs

        self.train_function = train_function
        return train_function

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates the student alone; see `keras.Model.evaluate`."""
        if self.student.built:
            self.batch_statistics.average()
        return super().evaluate(*args, **kwargs)

    @property
    def batch_statistics(self) -> replica_trainer.BatchStatistics:
        """The student's batch statistics, which replicas keep apart."""
        if self._untracked.statistics is None:
            self._untracked.statistics = replica_trainer.BatchStatistics(
                self.student, self.distribute_strategy
            )
        return self._untracked.statistics

    @property
    def graph(self) -> student_graph.StudentGraph:
        """The student's inference, traced once for the data of `fit`."""
        if self._untracked.graph is None:
            self._untracked.graph = student_graph.StudentGraph(
                self.student, self.input_spec_of_data
            )
        return self._untracked.graph

    def get_config(self) -> dict[str, Any]:
        """Returns the student, serialized; teachers are not part of it."""
        return {
            "student": keras.saving.serialize_keras_object(self.student),
            "name": self.name,
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "CodistillModel":
        """Makes the model from `get_config`, without teachers."""
        student = keras.saving.deserialize_keras_object(
            config["student"], custom_objects=custom_objects
        )
        return cls(student, name=config["name"])


class _Untracked:
    """Holds what is no part of the model, out of reach of Keras' tracking."""

    def __init__(self, teachers: teacher_set.TeacherSet) -> None:
        self.teachers = teachers
        self.term: Any = None
        self.loss: Any = None
        self.weight: Any = None
        self.graph: student_graph.StudentGraph | None = None
        self.statistics: replica_trainer.BatchStatistics | None = None


def _no_distillation(dtype: Any) -> multi_worker.Logs:
    return {
        "distillation_weight": tf.zeros([], dtype),
        "teacher_staleness": tf.constant(float("nan")),
    }
