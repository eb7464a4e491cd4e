"""A model's own training step and loss, on one of several replicas.

They are written for one device: losses are means over the rows at hand, and the
gradients go to the optimizer. Here each replica runs them on its own rows, and
gradients are averaged by rows on their way into the optimizer, before it clips
them. So several replicas update as one device does, if each loss is a mean over
the rows of its batch.
"""

import inspect
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.embedding import layer as embedding_layer
from tfdistill.system import keras_internals
from tfdistill.training import global_batch
from tfdistill.training import steps

Logs = steps.Logs
Step = Callable[[Any], Logs]


def is_own(kind: type, name: str) -> bool:
    """Whether neither Keras nor this package wrote a method."""
    home = next(base for base in kind.__mro__ if name in vars(base))
    return home.__module__.partition(".")[0] not in ("keras", "tfdistill")


def loss_of(model: keras.Model, *given: Any, training: bool) -> Any:
    """Calls `compute_loss`, whose `training` a model's own may not have.

    Keras gives it since 3.3, to those that take it.
    """
    if "training" in inspect.signature(model.compute_loss).parameters:
        return model.compute_loss(*given, training=training)
    return model.compute_loss(*given)


def check(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Checks that a model's own `train_step` can run under a strategy."""
    if not is_own(type(model), "train_step"):
        return
    name = f"{type(model).__name__}.train_step"
    remedy = (
        "Leave `train_step` to Keras and put what is special into "
        "`compute_loss`, or into `self.add_loss` in `call` or a layer"
    )
    if replicas.on_servers(strategy):
        raise ValueError(
            "A training step of your own must not be run with parameter "
            f"servers; received {name}. Its tape cannot follow variables that "
            f"are elsewhere. {remedy}; or train with workers only "
            "(MultiWorkerMirroredStrategy)."
        )
    if embedding_layer.layers_of(model):
        raise ValueError(
            "A training step of your own must not be run with a "
            f"layers.ShardedEmbedding; received {name}. The optimizer alone "
            f"cannot update its table by rows. {remedy}."
        )


def mark_built(model: keras.Model) -> None:
    """Says of a model that only its own step calls the layers of: it is built.

    Keras would call it for this, and one such as a GAN has no `call`.
    """
    if is_own(type(model), "train_step"):
        layers = [
            x for x in keras_internals.all_layers(model) if x is not model
        ]
        if layers and all(layer.built for layer in layers):
            model.built = True


def take_gradients(model: keras.Model) -> None:
    """Has replicas meet in each optimizer that a model's own step may use."""
    for optimizer in optimizers_of(model).values():
        keras_internals.pass_gradients_through(optimizer, _averaged)


def optimizers_of(model: keras.Model) -> dict[str, keras.Optimizer]:
    """Returns the optimizers that a model's own step may use, by attribute."""
    return {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.Optimizer)
    }


def _averaged(gradients: list[Any]) -> list[Any]:
    batch = global_batch.GlobalBatch.alone_here()
    if batch is None or not replicas.in_replica():
        return gradients
    return batch.averaged(gradients)


def on_replicas(step: Step, model: keras.Model) -> Step:
    """Returns a step of one device as a step of one of several replicas.

    What it logs is averaged by rows; Keras' metrics are added up elsewhere. A
    replica without rows leaves the metrics of `model` as they are.
    """

    def run(data: Any) -> Logs:
        inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
        batch = global_batch.GlobalBatch.of(inputs)
        variables = [v for m in model.metrics for v in m.variables]
        before = [tf.identity(variable.value) for variable in variables]
        with batch.alone():
            logs = _flat(step(data))
        if batch.may_be_empty:
            for variable, value in zip(variables, before, strict=True):
                now = tf.convert_to_tensor(variable.value)
                variable.assign(tf.where(batch.local > 0, now, value))
        numbers = {
            key: tf.convert_to_tensor(value)
            for key, value in logs.items()
            if _is_number(value)
        }
        means = batch.averaged(list(numbers.values()))
        return {**logs, **dict(zip(numbers, means, strict=True))}

    return run


def _flat(logs: Logs) -> Logs:
    """Logs as Keras shows them: a step may return results of many metrics."""
    found: Logs = {}
    for key, value in logs.items():
        found.update(value if isinstance(value, dict) else {key: value})
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (
        isinstance(value, tf.Tensor | tf.Variable | keras.Variable)
        and tf.as_dtype(value.dtype).is_floating
        and not len(value.shape)
    )
