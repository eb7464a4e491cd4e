"""CodistillModel: one student, trained with the help of frozen teachers."""

from typing import Any

import keras
import tensorflow as tf

from tfdistill import added_callbacks
from tfdistill import distillation_term
from tfdistill import global_batch
from tfdistill import multiworker
from tfdistill import parameter_server_training
from tfdistill import remote_teaching
from tfdistill import resumable_training
from tfdistill import schedules
from tfdistill import statistics
from tfdistill import step_details
from tfdistill import student_files
from tfdistill import student_graph
from tfdistill import teacher as teacher_lib
from tfdistill import wrapped_student

_TRACKERS = ("task_loss", "distillation_loss")


@keras.saving.register_keras_serializable(package="tfdistill")
class CodistillModel(
    student_files.StudentFiles,
    step_details.StepDetails,
    wrapped_student.WrappedStudent,
    remote_teaching.RemoteTeaching,
    parameter_server_training.ParameterServerTraining,
    resumable_training.ResumableTraining,
    multiworker.MultiWorkerTraining,
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
        teachers: teacher_lib.TeacherSet | None = None,
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
        wrapped_student.check(student)
        super().__init__(name=name or f"codistill_{student.name}")
        self.student = student
        self.built = student.built
        # In a tuple of a plain object: Keras must not track teachers.
        self._untracked = _Untracked(teachers or teacher_lib.TeacherSet())

    @property
    def teachers(self) -> teacher_lib.TeacherSet:
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
        self._untracked.term = distillation_term.DistillationTerm(
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

    def train_step(self, data: Any) -> multiworker.Logs:
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
                weight *= distillation_term.strength(soft, weight.dtype)
                loss += weight * tf.cast(distillation_loss, loss.dtype)
                self.record_loss(distillation_loss, batch, "distillation_loss")
                logs = {
                    "distillation_weight": weight,
                    "teacher_staleness": soft.staleness,
                    **step_details.hidden(*compared),
                }
            scaled = self.optimizer.scale_loss(loss)
        self.apply_summed_gradients(tape, scaled)
        self.record_loss(loss, batch)
        self.record_loss(task_loss, batch, "task_loss")
        metrics = self.compute_metrics(x, y, y_pred, sample_weight)
        return {**metrics, **logs, step_details.EXAMPLES: batch.total}

    def test_step(self, data: Any) -> multiworker.Logs:
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
        return added_callbacks.completed(
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

        def train_function(iterator: Any) -> multiworker.Logs:
            logs = self.shown_logs(execute(iterator))
            self.examples_of_last_execution = (
                logs.pop(step_details.EXAMPLES) * self.steps_per_execution
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
    def batch_statistics(self) -> statistics.BatchStatistics:
        """The student's batch statistics, which replicas keep apart."""
        if self._untracked.statistics is None:
            self._untracked.statistics = statistics.BatchStatistics(
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

    def __init__(self, teachers: teacher_lib.TeacherSet) -> None:
        self.teachers = teachers
        self.term: Any = None
        self.loss: Any = None
        self.weight: Any = None
        self.graph: student_graph.StudentGraph | None = None
        self.statistics: statistics.BatchStatistics | None = None


def _no_distillation(dtype: Any) -> multiworker.Logs:
    return {
        "distillation_weight": tf.zeros([], dtype),
        "teacher_staleness": tf.constant(float("nan")),
    }
