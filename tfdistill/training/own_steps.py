"""A model's own training step and loss, on one of several replicas.

They are written for one device: losses are means over the rows at hand, and the
gradients go to the optimizer. Here each replica runs them on its own rows, and
gradients are averaged by rows on their way into the optimizer, before it clips
them. So several replicas update as one device does, if each loss is a mean over
the rows of its batch, or one of each row, which TensorFlow's tape adds up.

A step that makes something of several rows gets the rows of all replicas.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import tables
from tfdistill.system import keras_internals
from tfdistill.training import global_batch
from tfdistill.training import metric_states
from tfdistill.training import steps
from tfdistill.training import whole_batch

Logs = steps.Logs
Step = Callable[[Any], Logs]


# A model that brings one of these is compiled itself: its own losses and
# metrics count.
_COMPILED = (
    "compile",
    "compute_metrics",
    "metrics",
    "predict_step",
    "test_step",
    "train_step",
)


def is_own(model: keras.Layer, name: str) -> bool:
    """Whether neither Keras nor this package wrote a method of a model."""
    home = next(k for k in type(model).__mro__ if name in vars(k)).__module__
    return home.partition(".")[0] not in ("keras", "tfdistill")


class Own:
    """The methods that a model inside of another defines itself.

    Attributes:
        is_compiled: Whether it is compiled itself.
        has_loss: Whether its `compute_loss` is called; if it is not compiled
            itself, with the losses of the other.
        needs_all_rows: Whether its `train_step` makes something of several
            rows, so that each replica runs its steps on all of them.
        calls_on_all_rows: The same of its `call` in Keras' own steps.
        loss_on_all_rows: The same of its `compute_loss` there; None if not
            known yet.
        spec: The spec of an element of the data that it was last built from.
    """

    def __init__(self, model: keras.Model, *, may_compile: bool) -> None:
        """Finds its methods; only some wrappers may compile it."""
        self._model = model
        self._names = {name for name in _COMPILED if is_own(model, name)}
        self.is_compiled = may_compile and bool(self._names)
        self.has_loss = self.is_compiled or is_own(model, "compute_loss")
        self.needs_all_rows = self.calls_on_all_rows = False
        self.loss_on_all_rows: bool | None = None
        self.spec: Any = None

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def call(self, inputs: object, training: bool | None) -> Any:
        """Calls the model; on replicas with all rows, if it compares them."""
        if self.calls_on_all_rows and replicas.in_replica():
            # Batches of `predict` may be cut into parts of several known sizes.
            own, inputs = global_batch.of_all_replicas(
                inputs, are_alike=global_batch.GlobalBatch.here() is not None
            )
            found = self._model(inputs, training=training)
            return keras.tree.map_structure(
                lambda value: keras_internals.of_logits(
                    value, lambda rows: rows[own]
                ),
                found,
            )
        found = self._model(inputs, training=training)
        # Keras traces it once before the first step.
        is_trace = self.spec is not None and not tf.executing_eagerly()
        if (
            is_trace
            and not replicas.in_replica()
            and _has_replicas(self._model)
            and not replicas.on_servers(self._model.distribute_strategy)
            and whole_batch.compares(self._model, inputs, found)
        ):
            self.calls_on_all_rows = True
            self._tell("call", "compares rows with each other")
        return found

    def look_at_call(
        self, model: keras.Model, spec: object, *, training: bool | None
    ) -> None:
        """Finds out what `call` does with rows, where no trace shows it.

        Keras traces neither before `predict`, nor with `training`, on which
        only a layer's own code can depend. `model` is the wrapper.
        """
        layers = keras_internals.all_layers(self._model) if training else []
        is_known = self.spec is not None and not any(
            is_own(layer, "call") for layer in layers
        )
        strategy = model.distribute_strategy
        if is_known or self.calls_on_all_rows or replicas.on_servers(strategy):
            return
        self.spec = spec
        try:
            with strategy.scope():
                keras_internals.trace_call(model, spec, training=training)
        except Exception:  # Whatever it is, the step itself will say so.
            if self.calls_on_all_rows:
                raise

    def step(self, name: str, data: object) -> Any:
        """Calls one of its steps.

        A step that is itself a `tf.function` is called as plain Python: inside
        the function, replicas could not meet.
        """
        found = inspect.getattr_static(self._model, name)
        is_traced = isinstance(found, tf.types.experimental.PolymorphicFunction)
        if is_traced and _has_replicas(self._model):
            return found.python_function(self._model, data)
        return getattr(self._model, name)(data)

    def compile(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Compiles it by its own `compile`; returns what the other takes."""
        self._model.compile(*args, **kwargs)
        found = self.compiled
        return {**found, "jit_compile": kwargs.get("jit_compile", "auto")}

    @property
    def compiled(self) -> dict[str, Any]:
        """What the other takes of one that is compiled."""
        names = ("optimizer", "run_eagerly", "steps_per_execution")
        return {name: getattr(self._model, name) for name in names}

    def loss(self, *data: object, training: bool) -> Any:
        """Calls its `compute_loss`, to which Keras gives `training` since 3.3.

        A `compute_loss` written for earlier versions does not take it.
        """
        function = self._model.compute_loss
        if "training" in inspect.signature(function).parameters:
            return function(*data, training=training)
        return function(*data)

    def share_of_loss(
        self,
        model: keras.Model,
        batch: global_batch.GlobalBatch,
        *data: object,
        training: bool,
    ) -> tf.Tensor:
        """A replica's share of what `compute_loss` of the wrapper gives.

        `data` are the inputs, targets, outputs and weights.
        """
        x, y, y_pred, weights = data
        is_split = self.has_loss and _has_replicas(model)
        if not is_split:
            return model.compute_loss(x, y, y_pred, weights, training=training)
        own = slice(None)
        # Its own `compile` took the losses, which know of no shares of weights.
        if self.loss_on_all_rows or (weights is not None and self.is_compiled):
            own, (x, y, weights) = global_batch.of_all_replicas((x, y, weights))
            y_pred = global_batch.outputs_of_all_replicas(y_pred)
        with batch.alone():
            loss = model.compute_loss(x, y, y_pred, weights, training=training)
        if loss.shape.rank:  # A loss of each row, which all add up.
            return loss[own]
        return loss * tf.cast(batch.share, loss.dtype)

    def step_of(self, model: keras.Model, name: str) -> Step:
        """The wrapper's `train_step` or `test_step`, for each replica."""
        step = getattr(model, name)
        if not _has_replicas(model):
            return step
        if name not in self:
            if self.loss_on_all_rows is None and self.spec is not None:
                self.loss_on_all_rows = self._loss_compares(model)
                training = keras_internals.takes_training(self._model) or None
                self.look_at_call(model, self.spec, training=training)
            return step
        if name == "train_step":
            self._look(model.distribute_strategy)
            optimizers = keras_internals.optimizers_of(self._model)
            for optimizer in optimizers.values():
                keras_internals.pass_gradients_through(optimizer, _averaged)
        return self._on_replicas(step, model, name)

    def _loss_compares(self, model: keras.Model) -> bool:
        """Whether its own `compute_loss` compares rows with each other."""
        if not is_own(self._model, "compute_loss"):
            return False

        def loss(_: object, data: object) -> Any:
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = self._model(x)
            return model.compute_loss(x, y, y_pred, weights, training=True)

        with model.distribute_strategy.scope():
            return bool(whole_batch.reason(self._model, self.spec, loss))

    def _look(self, strategy: tf.distribute.Strategy) -> None:
        """Finds out whether each replica must have all rows."""
        if self.spec is None:
            return
        with strategy.scope():
            reason = whole_batch.reason(self._model, self.spec)
        self.needs_all_rows = reason is not None
        if reason is not None:
            self._tell("train_step", reason)

    def _tell(self, method: str, reason: str) -> None:
        """Warns of what replicas do on all rows of the data, if they can."""
        name = f"{type(self._model).__name__}.{method}"
        if wrong := keras_internals.not_gathered(self.spec):
            raise ValueError(
                "Data must be dense tensors of numbers if a model needs all "
                f"rows of a batch; received {wrong} for {name}, which "
                f"{reason}. Encode the data before the model, or train on one "
                "device."
            )
        strategy = self._model.distribute_strategy
        if replicas.is_chief(strategy):
            warnings.warn(
                f"{name} of {self._model.name!r} {reason}. So each of "
                f"{strategy.num_replicas_in_sync} replicas computes the whole "
                "batch: results are as on one device, and more replicas "
                "bring no speed.",
                stacklevel=2,
            )

    def _on_replicas(self, step: Step, model: keras.Model, name: str) -> Step:
        """A step of one device as a step of one of several replicas.

        What it logs is averaged by rows; Keras' metrics are added up elsewhere.
        A replica without rows leaves the metrics of `model` as they are, and so
        do all but one that have the same rows.
        """

        def run(data: object) -> Logs:
            if self.needs_all_rows:
                return run_on_all(data)
            inputs, _, weights = keras.utils.unpack_x_y_sample_weight(data)
            if _weigh_rows(weights):
                # Replicas know of no shares of weights.
                self.needs_all_rows = True
                self._tell(name, "gets weights of rows")
                return run_on_all(data)
            batch = global_batch.GlobalBatch.of(inputs)
            variables = metric_states.variables_of(model)
            if not batch.may_be_empty:
                variables = []
            with (
                global_batch.undone_unless(
                    lambda _: batch.local > 0, variables
                ),
                batch.alone(),
            ):
                logs = steps.flat(step(data))
            numbers = {
                key: tf.convert_to_tensor(value)
                for key, value in logs.items()
                if _is_number(value)
            }
            means = batch.averaged(list(numbers.values()))
            return {**logs, **dict(zip(numbers, means, strict=True))}

        def run_on_all(data: object) -> Logs:
            batch, data = global_batch.GlobalBatch.gathered(data)
            own = tf.distribute.get_replica_context().replica_id_in_sync_group
            sums = [
                variable
                for variable in metric_states.variables_of(model)
                if variable.aggregation == "sum"
            ]
            with (
                global_batch.undone_unless(lambda _: tf.equal(own, 0), sums),
                batch.alone(),
            ):
                return steps.flat(step(data))

        return run


def _has_replicas(model: keras.Model) -> bool:
    return model.distribute_strategy.num_replicas_in_sync > 1


def check(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Checks that a model's own `train_step` can run under a strategy."""
    if not is_own(model, "train_step"):
        return
    name = f"{type(model).__name__}.train_step"
    remedy = (
        "Leave `train_step` to Keras and put your own code into "
        "`compute_loss`, or into `self.add_loss` in `call` or a layer"
    )
    if replicas.on_servers(strategy):
        raise ValueError(
            "A training step of your own must not be run with parameter "
            f"servers; received {name}. Its tape can't follow variables on "
            f"other tasks. {remedy}; or train with workers only "
            "(MultiWorkerMirroredStrategy)."
        )
    if tables.tables_of(model):
        raise ValueError(
            "A training step of your own must not be run with a "
            f"layers.ShardedEmbedding; received {name}. The optimizer alone "
            f"cannot update its table by rows. {remedy}."
        )


def mark_built(model: keras.Model) -> None:
    """Marks a model as built if only its `train_step` calls its layers.

    Keras would call the model for this, and a model such as a GAN has no
    `call`.
    """
    if is_own(model, "train_step"):
        layers = [
            x for x in keras_internals.all_layers(model) if x is not model
        ]
        if layers and all(layer.built for layer in layers):
            model.built = True


def build(model: keras.Model, element_spec: object) -> None:
    """Builds what only the model's own `train_step` calls, if anything."""
    parts = keras_internals.all_layers(model)
    if all(part.built for part in parts if part is not model):
        return
    keras_internals.trace_own_step(model, element_spec)
    model.built = True


def has_call(model: keras.Model) -> bool:
    """Whether Keras can build a model by calling it; a GAN has no `call`."""
    home = next(k for k in type(model).__mro__ if "call" in vars(k))
    return home not in keras.Model.__mro__


def _averaged(gradients: list[Any]) -> list[Any]:
    batch = global_batch.GlobalBatch.here()
    if batch is None or not batch.is_alone or not replicas.in_replica():
        return gradients
    return batch.averaged(gradients)


def _weigh_rows(weights: Any) -> bool:
    """Whether the third of a batch is weights; a step's own may be anything."""
    return any(
        weight is not None
        and tf.as_dtype(weight.dtype).is_floating
        and weight.shape.rank == 1
        for weight in keras.tree.flatten(weights)
    )


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (
        isinstance(value, tf.Tensor | tf.Variable | keras.Variable)
        and tf.as_dtype(value.dtype).is_floating
        and not len(value.shape)
    )
