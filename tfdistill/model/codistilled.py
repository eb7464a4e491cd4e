"""CodistillModel: a student learns its task, and from its teachers."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import schedules
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.model import distributed
from tfdistill.observe import run_log
from tfdistill.observe import summaries
from tfdistill.system import keras_internals
from tfdistill.teachers import auto_burn_in
from tfdistill.teachers import auxiliary
from tfdistill.teachers import churn_budget
from tfdistill.teachers import labels as labels_lib
from tfdistill.teachers import roles
from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import teacher_list
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import steps
from tfdistill.training import uncertainty

Logs = steps.Logs


def _check_preprocessor(student: keras.Model) -> None:
    is_hub = any(
        kind.__module__.partition(".")[0] == "keras_hub"
        for kind in type(student).__mro__
    )
    if is_hub and getattr(student, "preprocessor", None) is not None:
        raise ValueError(
            "`student` must receive preprocessed inputs; received "
            f"{type(student).__name__} with a preprocessor, which would never "
            "run. Set `student.preprocessor = None`, or pass preprocessor=None "
            "to its constructor, and map the data: `dataset.map(preprocessor)`."
        )


@keras.saving.register_keras_serializable(package="tfdistill")
class CodistillModel(steps.Codistilled, distributed.DistributedModel):
    """Trains a student on its task and on its teachers' predictions.

    The loss of a step is

        task_loss + w(step) * psi(mean of the teachers' predictions, own)

    with one psi on the aggregate (Anil et al. 2018, Algorithm 1). The second
    term is absent while `w(step)` is 0 or no healthy teacher is in use.
    Teachers run in inference mode on the student's own batch, or on the rows
    that `agree_on` gives. With `auxiliary_heads`, `own` are the outputs that
    only learn from teachers.

    `evaluate`, `predict`, `save`, `save_weights`, `load_weights` and `export`
    use only the student. Its files contain neither the teachers nor how it was
    compiled.

    `fit` logs `loss`, `task_loss`, `distillation_loss` (unweighted),
    `teacher_loss` (with teachers: the mean task loss of those in use, on rows
    of the batches before the last five refreshes; NaN if there is none),
    `distillation_weight` (the weight in force at the last step),
    `teacher_staleness` (mean over peers, and one's own past, in use at the
    last step, in steps; NaN while there is none) and the compiled metrics.

    Example:
        >>> student = keras.Sequential(
        ...     [keras.Input((4,)), keras.layers.Dense(3)]
        ... )
        >>> model = CodistillModel(student)
        >>> model.compile("sgd", "mse")
    """

    # Its own loops may do the same as Keras', as KerasHub's loops do.
    _NEVER_RUN: tuple[str, ...] = (
        "train_step",
        "compute_metrics",
        "test_step",
        "predict_step",
    )
    _task_tracker: Any = None

    def __init__(
        self,
        student: keras.Model,
        *,
        teachers: teacher_lib.Teacher
        | Sequence[teacher_lib.Teacher]
        | None = None,
        auxiliary_heads: Mapping[str, str] | None = None,
        agree_on: str | tf.data.Dataset | Callable[[Any], Any] = rows_lib.BATCH,
        name: str | None = None,
    ) -> None:
        """Wraps a student. Make both inside the strategy's scope.

        Args:
            student: Any Keras 3 model: functional, subclassed, multi-output.
            teachers: The teachers to learn from: one of `tfdistill.teachers`,
                or a list of them. Defaults to no teachers: plain training.
            auxiliary_heads: Outputs of `student`, a functional model that
                returns a dict, that learn from teachers in place of others:
                with `{"click_soft": "click"}`, the teachers' `click` teaches
                `click_soft`, and `click` learns from labels only. A head has no
                label and is only used in training; `CodistillModel.student`
                doesn't have it. Without teachers it isn't trained either.
                Defaults to no heads.
            agree_on: The rows on which the student learns from its teachers.
                "batch": the rows it is trained on. "mixed": one row for each
                two neighbors in the batch, with each column from one of the
                two; pictures, and sequences of floats, are a weighted sum. The
                student answers about them in inference mode, as its teachers
                do. "both": every second row of the batch, and the mixed rows. A
                function of the batch's inputs returns other rows, any number of
                them. A `tf.data.Dataset` of batches of inputs, without
                labels and of any size, is repeated by `fit`: step s gets its
                batch s, both counted from 0, also after a restart. Labels count
                on the batch only. Default "batch".
            name: Name of the model.

        Raises:
            ValueError: `student` is not a `keras.Model`, overrides the training
                step or has a preprocessor; `teachers` contains something else;
                `auxiliary_heads` names other outputs; or `agree_on` has another
                value, is an empty data set, or isn't "batch" although a
                teacher answers about the batch only.
        """
        _check_preprocessor(student)
        with_heads = student
        if auxiliary_heads:
            student = auxiliary.student_of(with_heads, auxiliary_heads)
        self._wrap(
            student,
            name=name,
            argument="student",
            prefix="codistill",
            may_compile=False,
        )
        cluster = strategy_lib.cluster_of(tf.distribute.get_strategy())
        self.teachers = teacher_list.TeacherList(teachers, cluster)
        self._agree_on = rows_lib.checked(agree_on, self.teachers)
        self._heads: auxiliary.AuxiliaryHeads | None = None
        if auxiliary_heads and len(self.teachers):
            self._heads = auxiliary.AuxiliaryHeads(with_heads, auxiliary_heads)
        self._graph: student_graph.StudentGraph | None = None

    @property
    def student(self) -> keras.Model:
        """The student."""
        return self.model

    @property
    def graph(self) -> student_graph.StudentGraph:
        """The student's inference, traced once for the data of `fit`."""
        if self._graph is None:
            if self.trainer.input_spec is None:
                raise RuntimeError(
                    "The model has not seen any data yet, so the spec of its "
                    "inputs is unknown. Call `fit` first."
                )
            self._graph = student_graph.StudentGraph(
                self.student, self.trainer.input_spec
            )
        return self._graph

    # ---- what a training asks of it ----

    def bare(self, data: object) -> Any:
        """Returns data, or their spec, without what is there for teachers."""
        if isinstance(data, steps.WithRows):
            data = data.data
        return attached.detach(data)[0]

    def rows_beside(self) -> tf.data.Dataset | None:
        """Returns the rows that teachers are asked about, if they are data."""
        is_data = isinstance(self._agree_on, tf.data.Dataset)
        return self._agree_on if is_data and len(self.teachers) else None

    def stateful(self) -> dict[str, steps.Stateful]:
        """Returns the teachers: backups keep their versions and values."""
        return {"teachers": self.teachers} if len(self.teachers) else {}

    def before_tracing(self) -> Any:
        """Makes what a step needs of teachers; returns what travels along."""
        if len(self.teachers):
            rows_lib.check_inputs(self._agree_on, self.trainer.input_spec)
            strategy, last = self.distribute_strategy, self.trainer.last
            self.teachers.attach(self.graph, strategy, last)
        return self.teachers.remote

    def compile(
        self,
        *args: Any,
        distillation_loss: object = None,
        distillation_weight: float | str | Callable[[tf.Tensor], Any] = "auto",
        distillation_output_weights: object = None,
        distillation_sample_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            *args: As for `keras.Model.compile`.
            distillation_loss: A `tfdistill.losses.DistillationLoss` for every
                output; or, by output, a dict, list or tuple of them with None
                for outputs that are not distilled. Needed with teachers.
                With `loss=None` the student learns from them only.
            distillation_weight: A number or a callable of the global step
                (int64 scalar tensor) that gives a float scalar, such as the
                schedules of `tfdistill.schedules` and
                `callbacks.ChurnBudget`. Default "auto": 0 until the first
                steep fall of the task loss is over, then 1; see
                `teachers.auto_burn_in`.
            distillation_output_weights: By output, as `distillation_loss`, a
                number by which its distillation loss is multiplied, as Keras'
                `loss_weights` for the task; or `"uncertainty"`, to learn these
                factors, logged as `<output>_distillation_loss_weight`. Default
                1 each.
            distillation_sample_weights: Whether sample weights count for the
                distillation loss, too. With False, all rows are distilled
                alike: rows without a label have weight 0 beside rows with one.
                Masks count in any case. Default True.
            **kwargs: As for `DistributedModel.compile`.

        Raises:
            ValueError: There are teachers and no `distillation_loss`, or an
                argument is unknown.
        """
        fit_arguments.check_names(
            keras.Model.compile,
            kwargs,
            *("distillation_loss", "distillation_weight"),
            *("distillation_output_weights", "distillation_sample_weights"),
            "rows_ahead",
        )
        if len(self.teachers) and distillation_loss is None:
            raise ValueError(
                "`compile` needs a `distillation_loss` when the model has "
                f"teachers; received None with {len(self.teachers)} of them. "
                "For classes: tfdistill.losses.SoftTargetCrossEntropy()."
            )
        super().compile(*args, **kwargs)
        chosen = self._cluster.method
        if chosen and chosen.weight_decay:
            optimizer = keras_internals.inner(self.optimizer)
            optimizer.weight_decay = chosen.weight_decay
        names = steps.output_names(self.student)
        weights = distillation_output_weights
        if uncertainty.is_asked(weights):
            weights = None
            if len(self.teachers):
                weights = uncertainty.of_distillation(
                    distillation_loss, names, self._learned
                )
        is_auto = distillation_weight == auto_burn_in.AUTO
        self.teachers.compile(
            distillation_loss,
            auto_burn_in.AutoBurnIn()
            if is_auto
            else schedules.get(distillation_weight),
            task_loss=self.loss,
            output_names=names,
            weights=weights,
            by_sample_weight=distillation_sample_weights,
        )
        # Attributes, by which Keras finds metrics; and keeps them, so once.
        if self._task_tracker is None:
            self._task_tracker, self._distillation_tracker = map(
                keras.metrics.Mean, steps.PARTS
            )

    @property
    def _kind(self) -> type[distributed.DistributedModel]:
        return CodistillModel

    @property
    def _exchanges(self) -> bool:
        return super()._exchanges or self.teachers.swaps_predictions

    def _callbacks(self, arguments: dict[str, Any]) -> list[Any]:
        found = super()._callbacks(arguments)
        self.teachers.begin_fit(
            validation_data=arguments.get("validation_data"),
            has_exporter=steps.first(found, steps.Exporter) is not None,
        )
        weight = self.teachers.weight
        kinds = auto_burn_in.AutoBurnIn, churn_budget.ChurnBudget
        if isinstance(weight, kinds) and weight not in found:
            # Before an exporter publishes the last step.
            found.insert(0, weight)
        cluster = self._cluster
        roles.check(found, self.teachers, cluster)
        roles.turn_exchanges(found, self.teachers, cluster, of=self.optimizer)
        summaries.add_to(found, cluster.group_dir)
        watch = [run_log.TeachingWatch()] if len(self.teachers) else []
        return [*watch, *found]

    # ---- one step ----

    def _outputs(
        self, x: object, training: bool | None = False
    ) -> tuple[Any, Any]:
        """Returns the student's outputs, and those that learn from teachers."""
        if self._heads is not None:
            return self._heads(x, training=training)
        outputs = self(x, training=training)
        return outputs, outputs

    def compute_loss(
        self,
        x: object = None,
        y: object = None,
        y_pred: object = None,
        sample_weight: object = None,
        training: bool = True,
    ) -> Any:
        """Returns the task loss, or 0 if there are teachers and no task."""
        has_task = self._own.has_loss or self.loss is not None or self.losses
        if not has_task and len(self.teachers):
            return tf.zeros([], keras.config.floatx())
        return super().compute_loss(
            x, y, y_pred, sample_weight, training=training
        )

    def train_step(self, data: object) -> Logs:
        """Runs one codistilled update on one replica's part of the batch."""
        agree_on = self._agree_on
        if isinstance(data, steps.WithRows):
            agree_on = rows_lib.given(data.rows)
            data = data.data
        data, labels = attached.detach(data)
        if labels and self.teachers.loss:
            labels_lib.check_read(labels, self.teachers)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        counter = keras_internals.num_batches(self.optimizer)
        step = tf.convert_to_tensor(counter)
        with batch.scope(), self.trainer.tape() as tape:
            y_pred, taught = self._outputs(x, training=self.in_training)
            task_loss = self._own.share_of_loss(
                self, batch, x, y, y_pred, weights, training=True
            )
            rows = rows_lib.Rows(
                inputs=x,
                outputs=y_pred,
                taught=taught,
                sample_weight=weights,
                targets=y,
                count=batch,
            )
            term = self.teachers.term(
                tape,
                step,
                rows,
                agree_on=agree_on,
                run=self._outputs,
                dtype=task_loss.dtype,
                labels=labels,
            )
            loss = task_loss
            if term.loss is not None:
                loss += term.weight * tf.cast(term.loss, loss.dtype)
            scaled = self.optimizer.scale_loss(loss)
        learned = uncertainty.logs(self._learned)
        self.trainer.apply(tape, scaled, batch)
        shares = {"loss": loss, "task_loss": task_loss}
        if term.loss is not None:
            shares["distillation_loss"] = term.loss
        batch.record(self.metrics, shares)
        return {
            **self.compute_metrics(x, y, y_pred, weights),
            "distillation_weight": term.weight,
            **term.logs,
            **learned,
            steps.EXAMPLES: batch.total,
        }

    def test_step(self, data: object) -> Logs:
        """Evaluates only the student on one replica's part of the batch."""
        logs = super().test_step(data)
        return {k: v for k, v in logs.items() if k not in steps.PARTS}

    def get_config(self) -> dict[str, Any]:
        """Returns the student, serialized, if the model has no teachers."""
        if len(self.teachers):
            raise ValueError(
                "A CodistillModel with teachers must not be copied, cloned or "
                f"pickled; received {self.name!r} with {len(self.teachers)}, "
                "which the copy would lack. Copy `model.student` and wrap the "
                "copy: tfdistill.CodistillModel(copy, teachers=...)."
            )
        return super().get_config()
