"""CodistillModel: the Keras face of a student, its teachers and its trainer."""

import functools
import json
import re
import types
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import losses
from tfdistill import multi_worker
from tfdistill import schedules
from tfdistill.cluster import identity
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.embedding import layer as embedding_layer
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.observe import run_log
from tfdistill.observe import summaries
from tfdistill.observe import teaching
from tfdistill.system import keras_internals
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import teacher_list
from tfdistill.teachers import term
from tfdistill.training import fit_arguments
from tfdistill.training import global_batch
from tfdistill.training import own_steps
from tfdistill.training import steps
from tfdistill.training import trainer as replica_trainer
from tfdistill.training import wrapper

# A wrapper calls its student as a layer; these would never be run.
_STEPS = ("train_step", "compute_metrics", "test_step", "predict_step")


def check_student(student: Any) -> None:
    """Checks that wrapping a student loses nothing of it.

    Its own training step, loss or metrics would never be run.
    """
    if not isinstance(student, keras.Model):
        raise ValueError(
            "`student` must be a keras.Model; received "
            f"{type(student).__name__}. Pass the model itself, not a "
            "function that builds it."
        )
    own = [name for name in _STEPS if own_steps.is_own(type(student), name)]
    if own:
        raise ValueError(
            "`student` must leave training to the model that wraps it; "
            f"received {type(student).__name__} with its own "
            f"{', '.join(own)}, which would never be run. Give the loss and "
            "the metrics to `compile`, a further term to `self.add_loss` in "
            "`call` or a layer, or a whole loss to the student's own "
            "`compute_loss`; or wrap a model of the same layers without "
            "these methods."
        )
    is_hub = any(
        kind.__module__.partition(".")[0] == "keras_hub"
        for kind in type(student).__mro__
    )
    if is_hub and getattr(student, "preprocessor", None) is not None:
        raise ValueError(
            "`student` must be given inputs that are preprocessed already; "
            f"received {type(student).__name__} with a preprocessor, which "
            "would never be run. Set `student.preprocessor = None`, or pass "
            "preprocessor=None to its constructor, and map the data: "
            "`dataset.map(preprocessor)`."
        )


def _is_keras(part: Any) -> bool:
    """Whether plain Keras can load an optimizer, loss or metric from a file."""
    if part is None or isinstance(part, str):
        return True
    if callable(part) and hasattr(part, "__name__"):
        return part.__module__.startswith("keras.")
    try:
        text = json.dumps(keras.saving.serialize_keras_object(part))
    except Exception:  # A user's class may do anything, or lack a config.
        return False
    homes = re.findall(r'"module": "([^"]*)"', text)
    return all(home.partition(".")[0] == "keras" for home in homes)


def add_launched_callbacks(
    arguments: dict[str, Any],
    teachers: teacher_list.TeacherList,
    cluster: identity.Cluster,
) -> None:
    """Adds a `RunLog` and `Summaries` in a launched run, to those of `fit`.

    Warns of teachers that nobody follows, and of a group that nobody hears.
    """
    callbacks = arguments.get("callbacks")
    is_list = isinstance(callbacks, keras.callbacks.CallbackList)
    found = keras.tree.flatten(getattr(callbacks, "callbacks", callbacks) or [])
    exports = _has(found, steps.Exporter)
    teachers.has_exporter = exports
    if is_list:
        _introduce(found)
        return
    follows = _has(found, steps.Loader)
    if teachers.moves_at_refreshes and not follows:
        warnings.warn(
            "The model has teachers in other groups, or in its own past, and "
            "`fit` got no tfdistill.TeacherLoader, so they stay as they are "
            "or never arrive. Add "
            "tfdistill.TeacherLoader(every_steps=...) to `callbacks`.",
            stacklevel=3,
        )
    if teachers.needs_versions and cluster.num_groups > 1 and not exports:
        warnings.warn(
            f"This is group {cluster.group} of {cluster.num_groups}, and `fit` "
            "got no tfdistill.StudentExporter, so the other groups will never "
            "learn from it. Add tfdistill.StudentExporter(exchange, "
            "every_steps=...) to `callbacks`.",
            stacklevel=3,
        )
    directory = cluster.group_dir
    run_log.add_to(found, directory)
    if directory and not _has(found, summaries.Summaries):
        path = f"{directory}/{summaries.DIRECTORY}"
        found.append(summaries.Summaries(path))
    if len(teachers):
        found = [teaching.TeachingWatch(), *found]
    _introduce(found)
    arguments["callbacks"] = found


def _introduce(callbacks: list[keras.callbacks.Callback]) -> None:
    """Shows all callbacks to those of this package."""
    for callback in callbacks:
        if isinstance(callback, steps.SteppedCallback):
            callback.meet(callbacks)


def _has(callbacks: list[keras.callbacks.Callback], kind: type) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


# What is logged of the loss besides `loss` itself.
_PARTS = ("task_loss", "distillation_loss", "feature_loss")


@keras.saving.register_keras_serializable(package="tfdistill")
class CodistillModel(
    steps.Codistilled,
    wrapper.Wrapper,
    multi_worker.MultiWorkerTraining,
    keras.Model,
):
    """Trains a student on its task and on what its teachers predict.

    The loss of a step is

        task_loss + w(step) * psi(mean of the teachers' predictions, own)

    with one psi on the aggregate (Anil et al. 2018, Algorithm 1). The second
    term is absent while `w(step)` is 0 or no healthy teacher is in use.
    Teachers run in inference mode on the student's own batch.

    `evaluate`, `predict`, `save`, `save_weights`, `load_weights` and `export`
    use only the student. Its files contain nothing of the teachers. A saved
    student loads compiled with the task's part of `compile`, if optimizer,
    loss and metrics are Keras' own.

    `fit` logs `loss`, `task_loss`, `distillation_loss` (unweighted),
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

    def __init__(
        self,
        student: keras.Model,
        *,
        teachers: teacher_lib.Teacher
        | Sequence[teacher_lib.Teacher]
        | None = None,
        name: str | None = None,
    ) -> None:
        """Wraps a student. Make both inside the strategy's scope.

        Args:
            student: Any Keras 3 model: functional, subclassed, multi-output.
            teachers: Whom to learn from: one of `tfdistill.teachers`, or a list
                of them. Defaults to nobody: plain training.
            name: Name of the model.

        Raises:
            ValueError: `student` is not a `keras.Model`, has a training step
                of its own or a preprocessor; or `teachers` are none.
        """
        check_student(student)
        super().__init__(name=name or f"codistill_{student.name}")
        self.student = student
        self.built = student.built
        self._has_compiled_student = False
        self._has_own_loss = own_steps.is_own(type(student), "compute_loss")
        self._projections: list[keras.Layer] = []
        strategy = tf.distribute.get_strategy()
        self.codistillation = term.Codistillation(
            student,
            teacher_list.TeacherList(
                teachers, strategy_lib.cluster_of(strategy)
            ),
        )

    def make_trainer(self) -> replica_trainer.Trainer:
        """Makes what trains this model under its strategy."""
        return multi_worker.trainer_of(
            self,
            before_tracing=functools.partial(self.codistillation.attach, self),
        )

    def wrapped_model(self) -> keras.Model:
        """Returns the student."""
        return self.student

    @property
    def teachers(self) -> teacher_list.TeacherList:
        """Whom the student learns from."""
        return self.codistillation.teachers

    @property
    def graph(self) -> student_graph.StudentGraph:
        """The student's inference, traced once for the data of `fit`."""
        return self.codistillation.graph(self)

    @property
    def distillation(self) -> dict[str, Any]:
        """What `compile` was given beside Keras' own arguments."""
        return {
            "distillation_loss": self.codistillation.loss,
            "distillation_weight": self.codistillation.weight,
            "feature_loss": self.codistillation.feature_loss,
        }

    def compile(
        self,
        *args: Any,
        distillation_loss: Any = None,
        distillation_weight: Any = 1.0,
        feature_loss: losses.FeatureDistillation | None = None,
        **kwargs: Any,
    ) -> None:
        """Configures training.

        Args:
            *args: As for `keras.Model.compile`.
            distillation_loss: A `tfdistill.losses.DistillationLoss` for every
                output; or, by output, a dict, list or tuple of them with None
                for outputs that are not distilled. Needed with teachers,
                unless there is a `feature_loss`. With `loss=None` the student
                learns from them only.
            distillation_weight: A number or a callable of the global step
                (int64 scalar tensor) that gives a float scalar, such as the
                schedules of `tfdistill.schedules`. Default 1.
            feature_loss: What is compared of hidden layers. Default: nothing.
            **kwargs: As for `keras.Model.compile`.

        Raises:
            ValueError: There are teachers and neither a `distillation_loss`
                nor a `feature_loss`; or the latter does not fit both models.
        """
        is_compared = distillation_loss is not None or feature_loss is not None
        if len(self.teachers) and not is_compared:
            raise ValueError(
                "`compile` needs a `distillation_loss` when the model has "
                f"teachers; received None with {len(self.teachers)} of them. "
                "For classes: tfdistill.losses.SoftTargetCrossEntropy()."
            )
        if self.teachers.swaps_predictions:
            args, kwargs = (), self._without_xla(args, kwargs)
        super().compile(*args, **kwargs)
        self.codistillation.compile(
            distillation_loss,
            schedules.get(distillation_weight),
            task_loss=self.loss,
            feature_loss=feature_loss,
        )
        projections = self.codistillation.projections
        if projections or self._projections:
            # An attribute, by which the optimizer and backups find them.
            self._projections = projections
        keras_compile = types.MethodType(keras.Model.compile, self)
        arguments = fit_arguments.bind(keras_compile, args, kwargs)
        self._compile_student(arguments)
        # Attributes, by which Keras finds metrics.
        self._task_tracker = keras.metrics.Mean("task_loss")
        self._distillation_tracker = keras.metrics.Mean("distillation_loss")
        self._feature_tracker = (
            keras.metrics.Mean("feature_loss") if feature_loss else None
        )

    def _without_xla(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Returns the arguments without XLA, which waits for no peer."""
        keras_compile = types.MethodType(keras.Model.compile, self)
        arguments = fit_arguments.bind(keras_compile, args, kwargs)
        if arguments.get("jit_compile", "auto") not in ("auto", False, None):
            raise ValueError(
                "`jit_compile` must be left out of `compile` if peers teach by "
                "their predictions; received "
                f"{arguments['jit_compile']!r}. XLA cannot compile what the "
                "groups send each other."
            )
        return {**arguments, "jit_compile": False}

    def _compile_student(self, arguments: dict[str, Any]) -> None:
        """Has files of the student say how it was compiled, as Keras' do.

        Unless that needs classes beyond Keras' own, without which the file
        would not load; or the student has a `compile` of its own, which Keras
        could not call again; or the optimizer's state is not in this process,
        or partly that of a `ShardedEmbedding` or of projections. A student's
        own `compute_loss` may use what this model is compiled with.
        """
        if self._has_own_loss:
            keras_internals.lend_compiled_loss(self, self.student)
            self.student.compiled, self.student.optimizer = False, None
            return
        parts = [self.optimizer, arguments.get("loss")]
        parts += [arguments.get(n) for n in ("metrics", "weighted_metrics")]
        is_elsewhere = replicas.on_servers(self.distribute_strategy) or [
            *embedding_layer.layers_of(self.student),
            *self._projections,
        ]
        is_plain = not own_steps.is_own(type(self.student), "compile")
        if (
            not is_elsewhere
            and is_plain
            and all(map(_is_keras, keras.tree.flatten(parts)))
        ):
            # Not the student's own method, which may do anything else.
            keras.Model.compile(
                self.student, **{**arguments, "optimizer": self.optimizer}
            )
            self._has_compiled_student = True
        elif self._has_compiled_student:
            # What was said of it before is not true any more.
            self.student.compiled, self.student.optimizer = False, None

    def fit(self, *args: Any, **kwargs: Any) -> keras.callbacks.History:
        """Trains the student; takes what `keras.Model.fit` takes.

        In a launched run it adds a `RunLog` and `Summaries`. The `Backup`, if
        there is one, decides where to begin (`backup.callback.session`), checks
        are added (`training.guards.over`), and the trainer prepares the data
        and runs Keras' own loop (`training.trainer.ReplicaTrainer`) or that
        over the workers of parameter servers
        (`parameter_server.trainer.ServerTrainer`). Callbacks run in this order,
        those in brackets only if they are needed:

            [_Before], _DataWatch, FiniteLoss, [_Restoring], [TeachingWatch],
            yours, [RunLog], [Summaries], [Backup], [_BackUpAndEnd],
            [StepWatchdog], [_After]

        Resumes from a `tfdistill.Backup` among the callbacks. Under parameter
        servers one batch of the data is one step of one worker, and
        `steps_per_epoch` counts the steps of all workers.

        Args:
            *args: As for `keras.Model.fit`.
            **kwargs: As for `keras.Model.fit`; see `MultiWorkerTraining.fit`.

        Returns:
            The `History`, equal on all workers.

        Raises:
            ValueError: Arguments are out of range or contradict each other, or
                a backup is of another model.
            data_checks.DataError: The data are empty, faulty or too few.
            RuntimeError: The loss is not finite; see `FiniteLoss`.
        """
        keras_fit = types.MethodType(keras.Model.fit, self)
        arguments = fit_arguments.bind(keras_fit, args, kwargs)
        cluster = strategy_lib.cluster_of(self.distribute_strategy)
        add_launched_callbacks(arguments, self.teachers, cluster)
        return super().fit(**arguments)

    # ---- one step ----

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the task's loss; 0 if the student has teachers and no task.

        See `keras.Model.compute_loss`. A student's own `compute_loss` is
        called in its place. On several replicas each calls it with its own
        rows, and its value is taken for a mean over these.
        """
        given = (x, y, y_pred, sample_weight)
        if self._has_own_loss:
            return own_steps.loss_of(self.student, *given, training=training)
        if self.loss is None and not self.losses and self.codistillation:
            return tf.zeros([], keras.config.floatx())
        return super().compute_loss(*given, training=training)

    def _is_split(self, name: str) -> bool:
        if name == "compute_loss" and self._has_own_loss:
            return self.distribute_strategy.num_replicas_in_sync > 1
        return super()._is_split(name)

    def train_step(self, data: Any) -> steps.Logs:
        """Runs one codistilled update on one replica's part of the batch."""
        data, labels = attached.detach(data)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        batch = global_batch.GlobalBatch.of(x)
        counter = keras_internals.num_batches(self.optimizer)
        step = tf.convert_to_tensor(counter)
        with batch.scope(), self.trainer.tape() as tape:
            y_pred, hidden = self.codistillation.run_student(self, x)
            task_loss = self._share_of_loss(
                batch, x, y, y_pred, weights, training=True
            )
            paid = self.codistillation.term(
                tape,
                step,
                x,
                y_pred,
                weights,
                dtype=task_loss.dtype,
                hidden=hidden,
                labels=labels,
            )
            loss = task_loss
            if paid:
                loss += paid.weight * tf.cast(paid.loss, loss.dtype)
            scaled = self.optimizer.scale_loss(loss)
        with self.codistillation.averaged(self.optimizer):
            self.trainer.apply(tape, scaled, batch)
        shares = {"loss": loss, "task_loss": task_loss}
        logs = {
            "distillation_weight": tf.zeros([], task_loss.dtype),
            "teacher_staleness": tf.constant(float("nan")),
        }
        if paid:
            shares, logs = shares | paid.shares, paid.logs
        batch.record(self.metrics, shares)
        metrics = self.compute_metrics(x, y, y_pred, weights)
        return {**metrics, **logs, steps.EXAMPLES: batch.total}

    def test_step(self, data: Any) -> steps.Logs:
        """Evaluates only the student on one replica's part of the batch."""
        logs = super().test_step(attached.detach(data)[0])
        return {k: v for k, v in logs.items() if k not in _PARTS}

    def predict_step(self, data: Any) -> Any:
        """Predicts by the student; see `MultiWorkerTraining.predict_step`."""
        return super().predict_step(attached.detach(data)[0])

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates only the student; see `keras.Model.evaluate`."""
        if self.student.built:
            self.codistillation.average_statistics(self.distribute_strategy)
        return super().evaluate(*args, **kwargs)

    # ---- copies of the model ----

    def __reduce__(self) -> Any:
        """Copies and pickles as Keras does, which knows of no teachers."""
        if self.codistillation:
            raise ValueError(
                "A CodistillModel with teachers must not be copied or "
                f"pickled; received one with {len(self.teachers)}, which the "
                "copy would lack. Copy `model.student` and wrap the copy: "
                "tfdistill.CodistillModel(copy, teachers=...)."
            )
        return super().__reduce__()

    def get_compile_config(self) -> None:
        """Returns nothing: `compile` is called again, with the teachers' part.

        Otherwise Keras would save only the task's half of it.
        """
        return None

    def get_config(self) -> dict[str, Any]:
        """Returns the student, serialized; of the teachers their number."""
        return {
            "student": keras.saving.serialize_keras_object(self.student),
            "name": self.name,
            "num_teachers": len(self.teachers),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: Any = None
    ) -> "CodistillModel":
        """Makes the model from `get_config`, if it has no teachers.

        Raises:
            ValueError: It has, and the copy would lack them.
        """
        if config.get("num_teachers"):
            raise ValueError(
                "A CodistillModel with teachers must not be cloned; received "
                f"{config['name']!r} with {config['num_teachers']}, which the "
                "clone would lack. Clone the student and wrap the clone: "
                "tfdistill.CodistillModel("
                "keras.models.clone_model(model.student), teachers=...)."
            )
        student = keras.saving.deserialize_keras_object(
            config["student"], custom_objects=custom_objects
        )
        return cls(student, name=config["name"])
