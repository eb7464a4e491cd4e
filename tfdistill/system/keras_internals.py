"""The private Keras names this package needs: each with its reason and check.

Nothing else in the package touches a private name of Keras or TensorFlow.
`tests/system/keras_internals_test.py` fails on the day one of them changes.
"""

import contextlib
import functools
import inspect
import itertools
import os
import random
import threading
import typing
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend import random as backend_random
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as backend_nn
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.export import export_utils
from keras.src.initializers import random_initializers
from keras.src.losses import loss as loss_module
from keras.src.losses import losses as losses_module
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator
from keras.src.trainers import compile_utils
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters import tf_dataset_adapter
from keras.src.utils import rng_utils
from keras.src.utils import tracking
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import none_tensor
from tensorflow.python.ops import collective_ops
from tensorflow.python.ops import script_ops

# By tests/lowest_versions.sh and tests/next_versions.sh: CONTRIBUTING.md.
_TESTED_KERAS = (3, 12), (3, 16)


def check_keras() -> None:
    """Refuses a Keras without the names used here, warns of one not tested."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            "tfdistill needs Keras on TensorFlow; received the backend "
            f"{keras.backend.backend()!r}. Unset KERAS_BACKEND or set it to "
            "'tensorflow'."
        )
    first, last = _TESTED_KERAS
    major, minor = map(int, keras.__version__.split(".")[:2])
    tested = (
        f"tfdistill was tested with Keras {first[0]}.{first[1]} to "
        f"{last[0]}.{last[1]}, and uses private names of Keras; received "
        f"{keras.__version__}"
    )
    if (major, minor) < first:
        raise RuntimeError(f"{tested}. Install one of these.")
    if (major, minor) > last:
        warnings.warn(
            f"{tested}, which is newer. If something fails, install an older "
            f"one: pip install 'keras<{last[0]}.{last[1] + 1}'.",
            stacklevel=2,
        )


@functools.cache
def prepare() -> None:
    """Changes, once in a process, what Keras and TensorFlow have no option for.

    Whoever makes a strategy or a model calls it first.
    """
    _make_scalars_readable()
    base_optimizer.ops = _OpsThatMeet()
    backend_nn._compute_moments_sync = _moments_of_replicas
    adapters = (
        data_adapters.ArrayDataAdapter,
        data_adapters.GeneratorDataAdapter,
        data_adapters.PyDatasetAdapter,
    )
    changes: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (backend_nn, "conv", _shaped),
        (backend_nn, "depthwise_conv", _shaped),
        (collective_ops, "broadcast_recv", _received),
        (collective_ops, "broadcast_send", _sent),
        (keras.Layer, "add_loss", _mark_losses),
        (keras.metrics.Mean, "update_state", _count_by_share),
        (keras.metrics.MeanMetricWrapper, "update_state", _measure_all_rows),
        (loss_module, "scale_loss_for_distribution", _with_switch),
        (loss_module, "unscale_loss_for_distribution", _with_switch),
        (multi_device_iterator_ops, "_create_device_dataset", _not_tuned),
        (script_ops.FuncRegistry, "__call__", _copied),
        (tf.GradientTape, "gradient", _add_up_rows),
        *((adapter, "get_tf_dataset", _passed_on) for adapter in adapters),
    )
    for home, name, by in changes:
        replace(home, name, by)


def is_deterministic() -> bool:
    """Whether operations without a determined result are refused.

    `tf.config.experimental.enable_op_determinism` has no public counterpart
    that asks.
    """
    return framework_config.is_op_determinism_enabled()


class SavedAsInner:
    """A model that TensorFlow's own tools save as its attribute `model`.

    `tf.saved_model.save` asks a Keras model for a signature and for what
    belongs to it, TensorFlow Lite's converter for the specs of its inputs.
    """

    model: keras.Model

    @property
    def _default_save_signature(self) -> Any:
        return self.model._default_save_signature

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: object
    ) -> Any:
        if save_type == "savedmodel":
            return self.model._trackable_children(save_type, **kwargs)
        return super()._trackable_children(save_type, **kwargs)  # type: ignore

    def _get_save_spec(self, dynamic_batch: bool = True) -> Any:
        # Its dtypes are lost on the way to the converter, except for models
        # that it knows by their class.
        raise ValueError(
            "TFLiteConverter.from_keras_model must be given the model inside "
            f"a {type(self).__name__}, its attribute `model`; received the "
            f"{type(self).__name__}. Call from_keras_model(model.model), or "
            "model.export(FILE, format='litert')."
        )


def inner(optimizer: keras.Optimizer) -> keras.Optimizer:
    """Returns what updates the weights, inside of one that scales losses."""
    is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return optimizer.inner_optimizer if is_scaling else optimizer


def leave_reduction_to_caller(optimizer: keras.Optimizer) -> None:
    """Makes `optimizer.apply` take gradients that are already reduced.

    Keras 3 clips in `apply` and sums over replicas only afterwards
    (`BaseOptimizer._backend_apply_gradients`), so clipping sees one
    replica's gradient and the update depends on the number of replicas.
    `training.trainer` sums first; the sum inside the optimizer has no public
    switch and is turned off on this instance.
    """
    for instance in (optimizer, inner(optimizer)):
        instance._all_reduce_sum_gradients = list


class _OpsThatMeet:
    """`keras.ops` for optimizers, whose conditions hold updates of variables.

    With `gradient_accumulation_steps`, `BaseOptimizer._backend_apply_gradients`
    updates inside a condition. A replica must not wait for the others in one,
    so the condition is made where replicas have met, and each replica's branch
    inside of it, as `LossScaleOptimizer._tf_apply` does.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(keras.ops, name)

    @staticmethod
    def cond(
        pred: object, true_fn: Callable[[], Any], false_fn: Callable[[], Any]
    ) -> Any:
        """Runs one of two functions, which give nothing on replicas."""
        if not in_replica():
            return keras.ops.cond(pred, true_fn, false_fn)

        def met(
            strategy: tf.distribute.Strategy, preds: object, branches: object
        ) -> None:
            # All replicas have the same.
            chosen = strategy.experimental_local_results(preds)[0]
            each = strategy.extended.call_for_each_replica
            keras.ops.cond(
                chosen,
                lambda: each(lambda taken, _: taken(), args=branches),
                lambda: each(lambda _, taken: taken(), args=branches),
            )

        context = tf.distribute.get_replica_context()
        return context.merge_call(met, args=(pred, (true_fn, false_fn)))


def pass_gradients_through(
    optimizer: keras.Optimizer,
    change: Callable[[list[Any]], list[Any]],
) -> None:
    """Makes `optimizer.apply` take what `change` makes of the gradients.

    A training step of a user's own hands its gradients to the optimizer, so
    that is where replicas must meet: before Keras clips. There is no public
    hook for it; it is set on this instance.
    """
    leave_reduction_to_caller(optimizer)
    original = type(optimizer).apply

    def apply(
        gradients: Sequence[tf.Tensor | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> Any:
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            _build_in_step(optimizer, trainable_variables)
        return original(optimizer, change(list(gradients)), trainable_variables)

    optimizer.apply = apply


def _build_in_step(optimizer: keras.Optimizer, variables: list[Any]) -> None:
    """Builds an optimizer that only a step of several replicas knows.

    Keras would make its variables in the step, whose first values then depend
    on the data.
    """
    context = tf.distribute.get_replica_context()
    if optimizer.built or context is None:
        return

    def build(strategy: tf.distribute.Strategy) -> None:
        with tf.init_scope(), strategy.scope():
            optimizer.build(variables)
        optimizer.built = True

    context.merge_call(build)


class _Here(threading.local):
    """What Keras does otherwise in this thread.

    Whether its losses are left unscaled, and its share of the rows; what
    gathers the rows of all replicas for functions as metrics; and what data
    sets that it makes go through.
    """

    is_off = False
    share: Any = None
    gather: Callable[[Any], Any] | None = None
    change: Callable[[tf.data.Dataset], tf.data.Dataset] | None = None


_here = _Here()


@contextlib.contextmanager
def _holding(**values: object) -> Iterator[None]:
    """Sets attributes of this thread, and afterwards as they were before."""
    before = {name: getattr(_here, name) for name in values}
    vars(_here).update(values)
    try:
        yield
    finally:
        vars(_here).update(before)


def _with_switch(scale: Callable[[Any], Any], value: object) -> Any:
    return value if _here.is_off else scale(value)


def losses_of_one_replica(
    share: object,
) -> contextlib.AbstractContextManager[None]:
    """Leaves Keras' losses of this thread means over the rows it has.

    Keras divides its own losses and regularizers by the number of replicas,
    and cannot know of a mean that a model computes by itself. A sum of both
    has one meaning only if neither is divided. There is no public switch, so
    `prepare` adds one. `share` is that of this replica's rows: by it counts
    what a `Mean` is given of all of them, one number without a weight; it is
    None where all replicas have all rows.
    """
    return _holding(is_off=True, share=share)


def _count_by_share(
    update: Callable[..., Any],
    mean: keras.metrics.Mean,
    values: object,
    sample_weight: object = None,
) -> None:
    """Makes a `Mean` weigh a replica's number by its share of the rows."""
    if sample_weight is None and _here.share is not None:
        given = tf.convert_to_tensor(values)
        sample_weight = _here.share if given.shape.rank == 0 else None
    update(mean, values, sample_weight)


def metrics_gather(
    gather: Callable[[Any], Any],
) -> contextlib.AbstractContextManager[None]:
    """Gives functions as metrics, of one number a batch, what `gather` returns.

    Such as the accuracy of the tokens that aren't padding: a mean of replicas'
    ratios is another number. There is no public hook, so `prepare` adds one.
    """
    return _holding(gather=gather)


def _measure_all_rows(
    update: Callable[..., Any],
    metric: keras.metrics.MeanMetricWrapper,
    y_true: object,
    y_pred: object,
    sample_weight: object = None,
) -> Any:
    """Makes a function of one number a batch see the rows of all replicas."""
    gather, function = _here.gather, metric._fn
    given = y_true, y_pred
    is_over_rows = goes_over_rows(metric)
    is_rowwise = inspect.isfunction(function) and (
        function.__module__.startswith("keras.") and not is_over_rows
    )
    if gather is None or is_rowwise or not all(map(_is_number, given)):
        return update(metric, y_true, y_pred, sample_weight)
    with losses_of_one_replica(_here.share):
        values = tf.convert_to_tensor(function(*given, **metric._fn_kwargs))
        if values.shape.rank != 0 and not is_over_rows:
            return update(metric, y_true, y_pred, sample_weight)
        values = function(*gather(given), **metric._fn_kwargs)
    mask = backend.get_keras_mask(y_pred)
    sample_weight = loss_module.apply_mask(
        sample_weight, mask, dtype=metric.dtype, reduction="sum"
    )
    return keras.metrics.Mean.update_state(metric, values, sample_weight)


# What `fit` makes of a `validation_split`, and of a `class_weight`: of a data
# set by a map, of arrays by their labels.
train_validation_split = array_slicing.train_validation_split
class_weight_map = tf_dataset_adapter.make_class_weight_map_fn
class_weights_of = data_adapter_utils.class_weight_to_sample_weights


@typing.runtime_checkable
class Array(typing.Protocol):
    """What Keras takes for an array: it has a shape."""

    @property
    def shape(self) -> Any:
        """Its sizes; of a tensor, perhaps unknown."""


def may_mask(model: keras.Model) -> bool:
    """Whether a layer may say that places of a sequence don't count."""
    return any(
        isinstance(layer, keras.layers.Masking)
        or (isinstance(layer, keras.layers.Embedding) and layer.mask_zero)
        or not type(layer).compute_mask.__module__.startswith("keras.")
        for layer in all_layers(model)
    )


def function_of(loss: keras.losses.Loss) -> Callable[..., Any] | None:
    """Returns the function that a loss wraps, if it wraps one."""
    is_wrapper = isinstance(loss, losses_module.LossFunctionWrapper)
    return loss.fn if is_wrapper else None


def mask_of(outputs: object) -> Any:
    """Returns what says which places of outputs count; None for all."""
    return backend.get_keras_mask(outputs)


def of_logits(
    values: tf.Tensor, change: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    """Returns `change(values)`, of which Keras takes a loss as of `values`.

    Keras takes a loss of probabilities from the logits under them, if it finds
    these: since logarithms of probabilities are cut off, saturated ones have
    another loss and no gradient (`_get_logits` in keras/src/backend/
    tensorflow/nn.py). It looks for an attribute, then for the operation that
    made the probabilities.

    Args:
        values: Outputs, of any shape and dtype.
        change: What copies or chooses rows.
    """
    logits = getattr(values, "_keras_logits", None)
    if logits is not None:
        changed: Any = change(values)
        changed._keras_logits = change(logits)
        return changed
    operation = None if tf.executing_eagerly() else values.op
    if operation is not None and operation.type in _OF_LOGITS:
        return _OF_LOGITS[operation.type](change(operation.inputs[0]))
    return change(values)


_OF_LOGITS = {"Sigmoid": tf.sigmoid, "Softmax": tf.nn.softmax}


def goes_over_rows(wrapper: keras.losses.Loss | keras.Metric) -> bool:
    """Whether a loss or metric is one number a column, as CosineSimilarity(0).

    Keras keeps the arguments of its functions in `_fn_kwargs` alone.
    """
    kinds = losses_module.LossFunctionWrapper | keras.metrics.MeanMetricWrapper
    return isinstance(wrapper, kinds) and wrapper._fn_kwargs.get("axis") == 0


def _is_number(value: object) -> bool:
    return isinstance(value, tf.Tensor) and value.dtype != tf.string


def _add_up_rows(
    gradient: Callable[..., Any],
    tape: tf.GradientTape,
    target: object,
    sources: object,
    output_gradients: object = None,
    *args: object,
    **kwargs: object,
) -> Any:
    """Makes gradients of losses by row add up over all replicas' rows.

    TensorFlow adds up a target that isn't a scalar. The gradients that one
    replica's step gives its optimizer are averaged by shares of the rows, so a
    loss of each row is divided by the share.
    """
    is_update = _here.share is not None and _have_variables(sources)
    if is_update and output_gradients is None:
        output_gradients = tf.nest.map_structure(_over_share, target)
    return gradient(tape, target, sources, output_gradients, *args, **kwargs)


def _have_variables(sources: object) -> bool:
    return any(
        isinstance(source, keras.Variable | tf.Variable)
        for source in tf.nest.flatten(sources)
    )


def _over_share(target: tf.Tensor) -> Any:
    target = tf.convert_to_tensor(target)
    ones = tf.ones_like(target)
    if not target.shape.rank or target.shape[0] == 1:
        return ones
    return tf.math.divide_no_nan(ones, tf.cast(_here.share, ones.dtype))


def in_replica() -> bool:
    """Whether this code runs for one of several replicas."""
    strategy = tf.distribute.get_strategy()
    is_alone = strategy.num_replicas_in_sync == 1
    return not is_alone and not tf.distribute.in_cross_replica_context()


def _moments_of_replicas(
    x: tf.Tensor, axes: Sequence[int], keepdims: bool
) -> Any:
    """Returns mean and variance over all replicas, as `tf.nn.moments` does.

    Keras subtracts squares there, of which float32 leaves nothing if values
    vary by less than a thousandth, such as years.
    """
    if not in_replica():
        return tf.nn.moments(x, axes, keepdims=keepdims)
    context: Any = tf.distribute.get_replica_context()

    def sums(*values: object) -> list[Any]:
        own = [tf.reduce_sum(v, axis=axes, keepdims=True) for v in values]
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    count, total = sums(tf.ones_like(x), x)
    mean = tf.math.divide_no_nan(total, count)
    (squares,) = sums(tf.math.squared_difference(x, mean))
    found = mean, tf.math.divide_no_nan(squares, count)
    return found if keepdims else [tf.squeeze(each, axes) for each in found]


def _mark_losses(
    add_loss: Callable[[keras.Layer, Any], None],
    layer: keras.Layer,
    loss: object,
) -> None:
    """Adds losses, and notes whose: replicas' threads share the layers."""
    if in_replica():
        for each in keras.tree.flatten(loss):
            each._thread = threading.get_ident()
    add_loss(layer, loss)


def is_of_other_replica(loss: object) -> bool:
    """Whether another replica's thread has given a loss to a layer."""
    own = threading.get_ident()
    return getattr(loss, "_thread", own) != own


def copy_here(value: object) -> Any:
    """Returns the copy of a variable that is read here; else the value.

    TensorFlow's tape does not find it outside of replicas.
    """
    found = value.value if isinstance(value, keras.Variable) else value
    if in_replica() or not isinstance(found, tf.distribute.DistributedValues):
        return value
    return found._primary


def _shaped(
    convolve: Callable[..., Any],
    inputs: tf.Tensor,
    *args: object,
    **kwargs: object,
) -> Any:
    """Gives a convolution of no rows, as on a replica, its right shape.

    TensorFlow's convolutions by oneDNN return the shape of their input, and
    then a bias, a mean or a residual does not fit.
    """
    if inputs.shape[0] or not in_replica():
        return convolve(inputs, *args, **kwargs)
    # A row of zeros instead: what only gives the outputs another shape is
    # left out by TensorFlow, which takes it to change nothing.
    size = tf.shape(inputs)
    rows = tf.cond(
        size[0] > 0,
        lambda: tf.identity(inputs),
        lambda: tf.zeros(tf.concat([[1], size[1:]], 0), inputs.dtype),
    )
    rows.set_shape([None, *inputs.shape[1:]])
    return convolve(rows, *args, **kwargs)[: size[0]]


def data_sets_through(
    change: Callable[[tf.data.Dataset], tf.data.Dataset],
) -> contextlib.AbstractContextManager[None]:
    """Changes the data sets that Keras makes of arrays and Python code.

    It hands them to the strategy at once. There is no public hook for it, so
    `prepare` adds one.
    """
    return _holding(change=change)


def _passed_on(make: Callable[[Any], Any], adapter: object) -> Any:
    dataset = make(adapter)
    return _here.change(dataset) if _here.change else dataset


class _FunctionLoss(losses_module.LossFunctionWrapper):
    """A loss given as a function, by name or as it is; not to be saved."""

    def get_config(self) -> dict[str, Any]:
        return keras.losses.Loss.get_config(self)


class _Crossentropy(keras.losses.Loss):
    """One that labels and predictions choose by their shapes."""

    def call(self, y_true: object, y_pred: object) -> Any:
        return compile_utils.get_loss(self.name, y_true, y_pred).call(
            y_true, y_pred
        )


def loss_of(identifier: object) -> keras.losses.Loss:
    """Makes of a loss, by any name or form, what `compile` makes of it.

    keras/src/trainers/compile_utils.py, `get_loss`: functions get a name that a
    graph may have, labels without a last dimension of one get it, and
    "crossentropy" is one of three. No public name has all of it.
    """
    if str(identifier).lower() in ("crossentropy", "ce"):
        return _Crossentropy(name=identifier)
    loss = compile_utils.get_loss(identifier, None, None)
    if type(loss) is losses_module.LossFunctionWrapper:
        return _FunctionLoss(loss.fn, name=loss.name)
    return loss


# What predictions mean, by the names of their losses in Keras.
_KINDS_OF_LOSSES = {
    name.replace("_", ""): kind
    for kind, names in {
        "classes": (
            *("categorical_crossentropy", "categorical_focal_crossentropy"),
            "sparse_categorical_crossentropy",
        ),
        "binary": ("binary_crossentropy", "binary_focal_crossentropy"),
        "values": (
            *("categorical_hinge", "cosine_similarity", "hinge", "huber"),
            *("log_cosh", "mean_absolute_error", "mean_squared_error"),
            *("mean_absolute_percentage_error", "poisson", "squared_hinge"),
            "mean_squared_logarithmic_error",
        ),
    }.items()
    for name in names
}


def kind_of_loss(loss: object) -> str | None:
    """Returns what a loss of Keras compares, by any of its names and forms.

    "classes", "binary" or "values"; None for other losses, such as a function
    of the user's.

    Example:
        >>> kind_of_loss("bce"), kind_of_loss(keras.losses.Huber())
        ('binary', 'values')
    """
    return _KINDS_OF_LOSSES.get(name_of_loss(loss) or "")


def name_of_loss(loss: object) -> str | None:
    """Returns the name of a loss of Keras, whichever of its forms it has.

    None for losses whose `kind_of_loss` is None.

    Example:
        >>> name_of_loss("mse"), name_of_loss(keras.losses.Huber())
        ('meansquarederror', 'huber')
    """
    if loss is not None and not isinstance(loss, keras.losses.Loss):
        loss = loss_of(loss)
    known = (
        each.__name__.replace("_", "").lower()
        for each in (*type(loss).__mro__, function_of(loss))
        if each is not None and each.__module__.startswith("keras.")
    )
    return next((name for name in known if name in _KINDS_OF_LOSSES), None)


def has_losses_or_metrics(model: keras.Model) -> bool:
    """Whether a model was compiled with some, which Keras builds by its data.

    It calls the model on their first part, which a step of the model's own may
    take for anything.
    """
    metrics = model._compile_metrics
    given = metrics and (
        metrics._user_metrics or metrics._user_weighted_metrics
    )
    return bool(given) or model._compile_loss is not None


def variable_index(optimizer: keras.Optimizer, variable: keras.Variable) -> int:
    """Returns the place of a variable among a built optimizer's variables.

    Keras' own guide to writing optimizers finds slots this way; there is no
    public name for it.
    """
    return int(optimizer._get_variable_index(variable))


def num_batches(optimizer: keras.Optimizer) -> Any:
    """Returns the variable that counts the batches an optimizer was given.

    With `gradient_accumulation_steps`, `iterations` counts only those that
    updated the weights. Keras' learning rate schedules count all of them.
    """
    # Under a LossScaleOptimizer, the inner one counts.
    return inner(optimizer)._iterations


def moving_averages(optimizer: keras.Optimizer) -> list[tuple[Any, Any]]:
    """Returns the trained variables, each with its average if it has one.

    With `use_ema` a finished `fit` leaves the averages in the model. There is
    no public way to them before.
    """
    updating = inner(optimizer)
    if not updating.use_ema or not updating.built:
        return []
    averages = updating._model_variables_moving_average
    return list(zip(updating._trainable_variables, averages, strict=True))


class UpdateStep:
    """An optimizer's own update of one variable, as a function of values.

    A copy of the optimizer is built on a variable of one element, which shows
    what it keeps for each. Its `update_step` then runs in a `StatelessScope`
    with values in the places of these variables.

    Attributes:
        slots: The initial value of each number that it keeps for an element,
            by name, in its order.
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        """Makes the copy; outside of strategies' scopes and traces."""
        self._original = optimizer
        self._own = type(optimizer).from_config(optimizer.get_config())
        self._element = keras.Variable(np.zeros((1, 1), "float32"), name="row")
        known = len(self._own.variables)
        self._own.build([self._element])
        # base_optimizer.py finds slots by the variable that was given.
        self._own._get_variable_index = lambda variable: 0
        kept = self._own.variables[known:]
        self._kept = [v for v in kept if v.shape == self._element.shape]
        self.slots = {
            v.name.removeprefix("row_"): float(np.ravel(v.numpy())[0])
            for v in self._kept
        }

    def __call__(
        self,
        variable: tf.Variable,
        values: Sequence[tf.Tensor],
        gradient: tf.Tensor,
        hyper: Mapping[str, tf.Tensor],
    ) -> list[tf.Tensor]:
        """Returns new values, by elements.

        Args:
            variable: Whose values they are: it may be left out of the decay.
            values: The variable, or some of its rows, and each of `slots`; all
                of one shape and dtype.
            gradient: The same shape and dtype.
            hyper: Float32 scalars: `learning_rate`; `iterations`, the number
                of updates before this one; and for `Nadam` `u_product`.
        """
        own = self._own
        places = [self._element, *self._kept]
        given = [_Assigned(value) for value in values]
        with keras.StatelessScope() as scope:
            found = dict(zip(map(id, places), given, strict=True))
            scalars = {id(own._iterations): hyper["iterations"]}
            if isinstance(own, keras.optimizers.Nadam):
                scalars[id(own._u_product)] = hyper["u_product"]
            scope.state_mapping.update({**found, **scalars})
            rate = hyper["learning_rate"]
            if own.weight_decay and self._original._use_weight_decay(variable):
                # `_apply_weight_decay` in base_optimizer.py.
                decay = tf.cast(rate * own.weight_decay, gradient.dtype)
                given[0].assign_sub(given[0].value * decay)
            own.update_step(gradient, self._element, rate)
        return [each.value for each in given]


class _Assigned:
    """A value that takes assignments, as a TensorFlow variable does."""

    def __init__(self, value: tf.Tensor) -> None:
        self.value = value
        self.dtype, self.shape = value.dtype, value.shape

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self.value, dtype)

    def assign(self, value: object) -> None:
        self.value = tf.convert_to_tensor(value, self.dtype)

    def assign_add(self, value: tf.Tensor) -> None:
        self.value += value

    def assign_sub(self, value: tf.Tensor) -> None:
        self.value -= value


def _make_scalars_readable() -> None:
    """Lets `float` and `int` read variables that replicas share.

    A variable of one device has both, by which callbacks read
    `optimizer.learning_rate` and `optimizer.iterations`.
    """
    shared = distributed_values.DistributedVariable
    for kind in (float, int):
        name = f"__{kind.__name__}__"
        if not hasattr(shared, name):
            setattr(shared, name, lambda self, kind=kind: kind(self.numpy()))


def build_from_spec(
    model: keras.Model,
    element_spec: object,
    *,
    scope: Callable[[], Any],
    optimized: Callable[[keras.Model], list[Any]] | None = None,
    predicts: bool = False,
    by_own_step: Callable[[], None] | None = None,
) -> Any:
    """Builds model, metrics, loss and optimizer from a data set's spec.

    Keras builds from a batch that it reduces over the workers, which fails
    for a tuple of `PerReplica` values (keras#20585). One replica's spec says
    the same without reading any data; the spec of its inputs `x` is returned.
    The optimizer keeps slots for the variables that `optimized` returns of the
    built model, by default all trainable ones. Data that a model `predicts` for
    may lack what metrics and losses are built by. Layers that only a step of
    the model's own calls are built `by_own_step`.
    """
    batch = keras.tree.map_structure(_first_replica, element_spec)
    optimizer = model.optimizer
    build_optimizer = optimizer is not None and not optimizer.built
    with scope():
        try:
            # Keras builds an optimizer that is not built, on all variables.
            if build_optimizer:
                optimizer.built = True
            if predicts:
                _build_for_inference(model, batch)
            else:
                model._symbolic_build(data_batch=batch)
                if by_own_step is None:
                    _build_for_training(model, batch)
                else:
                    by_own_step()
        finally:
            if build_optimizer:
                optimizer.built = False
        if build_optimizer:
            optimizer.build(
                optimized(model) if optimized else model.trainable_variables
            )
    return keras.utils.unpack_x_y_sample_weight(batch)[0]


def predictions_of(batches: list[Any]) -> Any:
    """Returns what `predict` makes of a model's outputs for batches.

    keras/src/backend/tensorflow/trainer.py: arrays, except for outputs that are
    sparse or vary in length.
    """
    return keras.tree.map_structure(
        lambda *parts: keras_trainer.convert_to_np_if_not_ragged(
            keras_trainer.potentially_ragged_concat(list(parts))
        ),
        *batches,
    )


def build_by_a_step(model: keras.Model, element_spec: object) -> None:
    """Builds a model on one device as the first step of Keras' `fit` does.

    By a trace, in which layers may make variables from values, such as the
    states of recurrent ones: `_symbolic_build` allows only initializers.
    """
    x, _, _ = keras.utils.unpack_x_y_sample_weight(
        keras.tree.map_structure(_first_replica, element_spec)
    )
    tf.function(
        lambda x: model(x, training=False), autograph=False
    ).get_concrete_function(x)


def _build_for_training(model: keras.Model, batch: object) -> None:
    """Builds layers that are only called in training.

    Keras builds by a call with `training=False`, and leaves the others to the
    step, where it is too late for the optimizer and for replicas.
    """
    if not all(layer.built for layer in all_layers(model)):
        model(_symbols(batch), training=True)


class TracedStep(NamedTuple):
    """What a trace of a model's own step shows, in the graph of now."""

    data: Any
    # What its tapes differentiate, the gradients, and what optimizers get.
    targets: list[Any]
    gradients: list[Any]
    applied: list[Any]
    # The targets of which weights get gradients.
    losses: list[Any]
    # Keras' variables, each with what it is assigned.
    assigned: list[tuple[keras.Variable, Any]]


def trace_own_step(
    model: keras.Model,
    element_spec: object,
    look: Callable[[TracedStep], None] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Traces a training step of the model's own, and has `look` see it.

    Or a `loss` of a model and a batch, in its place.

    It builds layers that only the step calls. In one process Keras leaves them
    to the first step, where on replicas it is too late. Nothing of the trace
    ever runs: gradients are zeros, and optimizers make no update.
    """
    batch = keras.tree.map_structure(_first_replica, element_spec)
    data = keras.tree.map_structure(_symbol, batch)
    step = inspect.getattr_static(model, "train_step")
    if isinstance(step, tf.types.experimental.PolymorphicFunction):
        step = step.python_function
    step = loss or step
    targets: list[Any] = []
    gradients: list[Any] = []
    applied: list[Any] = []
    losses: list[Any] = []

    def gradient(
        tape: tf.GradientTape,
        target: object,
        sources: object,
        *a: object,
        **k: object,
    ) -> Any:
        targets.extend(tf.nest.flatten(target))
        if _have_variables(sources):
            losses.extend(tf.nest.flatten(target))
        found = tf.nest.map_structure(
            lambda source: tf.zeros_like(tf.convert_to_tensor(source)), sources
        )
        gradients.extend(tf.nest.flatten(found))
        return found

    def apply(*args: object, **kwargs: object) -> None:
        applied.extend(tf.nest.flatten((args, kwargs)))

    def traced(data: object) -> Any:
        # In a scope that keeps what variables are assigned, by their ids.
        scope: Any = backend.get_stateless_scope()
        assigned: list[Any] = []
        keep = scope.add_update

        def add_update(update: object) -> None:
            assigned.append(update)
            keep(update)

        scope.add_update = add_update
        found = step(model, data)
        if loss is not None:
            targets.append(found)
            losses.append(found)
        if look is not None:
            look(
                TracedStep(data, targets, gradients, applied, losses, assigned)
            )
        return found

    with contextlib.ExitStack() as stack:
        homes = (
            (tf.GradientTape, "gradient", gradient),
            *(
                (home, "apply", apply)
                for home in (keras.Optimizer, *optimizers_of(model).values())
            ),
        )
        for home, name, by in homes:
            before = vars(home).get(name)
            setattr(home, name, by)
            if before is None:
                stack.callback(delattr, home, name)
            else:
                stack.callback(setattr, home, name, before)
        backend.compute_output_spec(traced, data)


def _build_for_inference(model: keras.Model, batch: object) -> None:
    """Builds no more than `predict` needs, of whatever the model returns."""
    if not all(layer.built for layer in all_layers(model)):
        trace_call(model, batch, training=False)


def trace_call(
    model: keras.Model, element_spec: object, *, training: bool | None
) -> None:
    """Traces a call of a model with data of a spec, which never runs."""
    batch = keras.tree.map_structure(_first_replica, element_spec)
    backend.compute_output_spec(model, _symbols(batch), training=training)


def _symbols(batch: object) -> Any:
    """Returns what stands for the inputs of a batch's spec."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    return keras.tree.map_structure(_symbol, x)


def _symbol(value: tf.TypeSpec | None) -> Any:
    if value is None:
        return None
    return keras.KerasTensor(
        value.shape, keras.backend.standardize_dtype(value.dtype)
    )


def make_again(variable: keras.Variable) -> None:
    """Makes a variable again, in the present scope, with the value it has.

    Whatever holds the Keras object then has the new variable.
    """
    variable._initialize(variable.value.numpy())


def random_state(
    strategy: tf.distribute.Strategy,
) -> keras.random.SeedGenerator:
    """Returns what Keras draws from in this thread where it is given no seed.

    Keras makes it, a variable, when it first draws. In a step of several
    replicas none can be made, and each of them runs in its own thread:
    `draw_from`. A variable made outside of the strategy's scope would be
    advanced by each replica, so it is replaced. The seeds of a program that
    draws nothing stay as they would be without it.
    """
    drawn = random.getstate()
    with strategy.scope():
        found = seed_generator.global_seed_generator()
        variable = found.state.value
        if not strategy.extended.variable_created_in_scope(variable):
            found = keras.random.SeedGenerator(seed=0)
            found.state.assign(variable.numpy())
            draw_from(found)
    random.setstate(drawn)
    return found


def draw_from(state: keras.random.SeedGenerator) -> None:
    """Makes this thread draw from the `random_state` of another."""
    # keras/src/random/seed_generator.py, `global_seed_generator`; later
    # versions have the name as a constant.
    global_state.set_global_attribute("global_seed_generator", state)


def _first_replica(spec: object) -> Any:
    kinds = tf.distribute.DistributedValues | distributed_values.PerReplicaSpec
    if isinstance(spec, kinds):
        spec = spec._value_specs[0]
    return None if is_none(spec) else spec


# No data: what stands for None in data of replicas.
_NONE_DTYPE = tf.qint8


def is_none(spec: object) -> bool:
    """Whether data have None where they have such a spec, or such a value.

    As for an input that is optional. Keras makes an `Optional` of those in
    arrays.
    """
    kinds = none_tensor.NoneTensorSpec | tf.OptionalSpec
    if isinstance(spec, kinds | tf.experimental.Optional):
        return True
    if isinstance(spec, tf.Tensor | tf.TensorSpec):
        return bool(spec.dtype == _NONE_DTYPE)
    return False


def with_none(data: object) -> Any:
    """Returns data, of a step, as their user made them."""
    return keras.tree.map_structure(
        lambda v: None if is_none(v) else _of_any_rows(v), data
    )


def _of_any_rows(value: object) -> Any:
    """Leaves open how many rows a value has that is known to have none.

    keras/src/backend/tensorflow/numpy.py, `add`: a matrix of no rows is taken
    for a vector, and cannot be added, as layers such as LSTM do.
    """
    if not isinstance(value, tf.Tensor) or not tf.is_symbolic_tensor(value):
        return value
    if not value.shape.rank or value.shape[0] != 0:
        return value
    shape = [None, *value.shape[1:]]
    return tf.compat.v1.placeholder_with_default(value, shape)


def column_of_none(num_rows: tf.Tensor) -> tf.Tensor:
    """Returns what stands for None in a batch of so many rows."""
    return tf.bitcast(tf.zeros([num_rows], tf.int8), _NONE_DTYPE)


def in_order_of_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns what `evaluate` makes of its logs if it is to return a list."""
    return model._flatten_metrics_in_order(logs)


def jobs_of(strategy: tf.distribute.Strategy) -> dict[str, list[str]]:
    """Returns the addresses of a strategy's tasks by job; none for one process.

    `ParameterServerStrategy` keeps its resolver where the public property
    `cluster_resolver` does not look: that is None.
    """
    resolver = strategy.cluster_resolver
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        resolver = strategy._cluster_resolver
    return dict(resolver.cluster_spec().as_dict()) if resolver else {}


def loss_tracker(model: keras.Model) -> keras.Metric | None:
    """Returns the metric by which Keras counts the losses of a model."""
    return model._loss_tracker


def takes_training(model: keras.Model) -> bool:
    """Whether the `call` of a model has `training`, as Keras' own step asks."""
    return bool(model._call_has_training_arg)


def metrics_of(layer: keras.Layer) -> list[keras.Metric]:
    """Returns the metrics among a layer's attributes."""
    return list(layer._metrics)


def not_gathered(element_spec: object) -> str:
    """Returns what of data cannot be added up over replicas, or nothing."""
    for spec in keras.tree.flatten(
        keras.tree.map_structure(_first_replica, element_spec)
    ):
        if spec is None:
            continue
        if isinstance(spec, tf.RaggedTensorSpec | tf.SparseTensorSpec):
            return type(spec).__name__.removesuffix("Spec")
        if tf.as_dtype(spec.dtype) in (tf.string, tf.variant):
            return f"a tensor of {tf.as_dtype(spec.dtype).name}"
    return ""


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns a layer and all layers inside it, from the outside in.

    `keras.Model.layers` names a model's layers, but a layer made of layers has
    no such public attribute.
    """
    return list(layer._flatten_layers())


def optimizers_of(model: keras.Model) -> dict[str, keras.Optimizer]:
    """Returns the optimizers that a model's own step may use, by attribute.

    Its layers may have some, too, such as those that train by themselves.
    """
    found: dict[str, keras.Optimizer] = {}
    in_others: dict[str, keras.Optimizer] = {}
    for layer in all_layers(model):
        prefix = "" if layer is model else f"{layer.name}."
        for name, value in vars(layer).items():
            if isinstance(value, keras.Optimizer):
                found[prefix + name] = value
            elif isinstance(value, list | tuple | dict):
                parts = value.values() if isinstance(value, dict) else value
                in_others |= {
                    f"{prefix}{name}.{i}": part
                    for i, part in enumerate(parts)
                    if isinstance(part, keras.Optimizer)
                }
    # TensorFlow keeps attributes a second time, in another dict.
    known = set(map(id, found.values()))
    return found | {k: v for k, v in in_others.items() if id(v) not in known}


def stateful_layer(model: keras.Model) -> str | None:
    """Returns the name of a layer that keeps a state of each row, if any.

    From batch to batch, as recurrent layers do with `stateful=True`.
    """
    for layer in all_layers(model):
        if getattr(layer, "stateful", False) is True:
            return str(layer.name)
    return None


def frozen_weights(model: keras.Model) -> list[Any]:
    """Returns the weights that would be trained if they were not frozen.

    Moving averages and seeds are not trained either, but change anyway: only
    the list that a layer keeps a weight in distinguishes the two.
    """
    return [
        variable
        for layer in all_layers(model)
        for variable in layer._trainable_variables
        if not variable.trainable
    ]


def export_signature(model: keras.Model) -> Any:
    """Returns the input signature with which `keras.Model.export` exports."""
    return export_utils.get_input_signature(model)


def seed_of(initializer: keras.initializers.Initializer) -> int | None:
    """Returns the number with which one of Keras' initializers draws."""
    is_random = isinstance(initializer, random_initializers.RandomInitializer)
    seed = initializer.seed if is_random else None
    return seed if isinstance(seed, int) else None


def global_seed() -> int | None:
    """Returns the seed of `tf.random.set_seed`, or None if none is set.

    There is no public way to read it without drawing from it.
    """
    from tensorflow.python.eager import context

    seed = context.global_seed()
    return None if seed is None else int(seed)


def tell_cluster(reason: str) -> None:
    """Ends what other workers wait for, with a reason that they raise.

    Without it they hear only that this one has gone, when it no longer answers.
    There is no public name for it.
    """
    from tensorflow.python.eager import context

    with contextlib.suppress(tf.errors.OpError):  # They may have gone.
        context.context().report_error_to_cluster(
            tf.errors.ABORTED, f"tfdistill: another worker failed: {reason}"
        )


def _not_tuned(
    make: Callable[..., tf.data.Dataset], *args: object, **kwargs: object
) -> tf.data.Dataset:
    """Makes strategies pass batches to their devices without autotuning.

    An iterator that goes away waits for its autotuning thread, which may miss
    its wake-up and sleep on for as long as the iterator has lived: on 2 busy
    cores 2 of 12 iterators of 12 s took 9 s and 20 s to go, 0 of 24 without
    autotuning. `tf.distribute` makes these data sets itself and has no option
    for it.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return make(*args, **kwargs).with_options(options)


# What TensorFlow's broadcast takes, by the dtypes that it lacks: so workers
# begin with the first one's values of any numeric dtype, such as a kernel in
# int8. `MultiWorkerMirroredStrategy` broadcasts what a variable begins with.
_SENT_AS = {
    tf.bfloat16: tf.float32,
    tf.int8: tf.int32,
    tf.int16: tf.int32,
    tf.uint8: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.uint64: tf.int64,
}


def _sent(
    send: Callable[..., Any],
    value: object,
    shape: object,
    dtype: object,
    *args: object,
    **more: object,
) -> Any:
    sent_as = _SENT_AS.get(dtype, dtype)
    return send(tf.cast(value, sent_as), shape, sent_as, *args, **more)


def _received(
    receive: Callable[..., Any],
    shape: object,
    dtype: object,
    *args: object,
    **more: object,
) -> Any:
    found = receive(shape, _SENT_AS.get(dtype, dtype), *args, **more)
    return tf.cast(found, dtype)


# EIGEN_MAX_ALIGN_BYTES, which `tf.sysconfig.get_compile_flags` has.
_ALIGNMENT = 64


def _copied(call: Callable[..., Any], registry: object, *args: object) -> Any:
    """Leaves the arrays that Python functions return as they are.

    `tf.numpy_function`, by which TensorFlow and Keras read generators and
    `PyDataset`s, shares the memory of an array that is aligned, and copies any
    other. TensorFlow writes no results into memory that is shared so, but it
    does into a part of it, as a replica's rows are: it overwrote up to half of
    a user's labels. So aligned arrays are copied here: 38 MB took 12 ms. Others
    are not, and few that NumPy makes are aligned.
    """
    result = call(registry, *args)
    if isinstance(result, list):
        return list(map(_unshared, result))
    return _unshared(result)


def _unshared(value: np.ndarray) -> Any:
    """Copies an array that TensorFlow would share; once, to where it does."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind not in "OSU"
    if not is_array or _address(value) % _ALIGNMENT:
        return value
    memory = np.empty(value.nbytes + _ALIGNMENT, np.uint8)
    begin = -_address(memory) % _ALIGNMENT
    copy = memory[begin : begin + value.nbytes].view(value.dtype)
    copy = copy.reshape(value.shape)
    copy[...] = value
    return copy


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _iterator_after(source: Any, num_batches: int) -> Any:
    """Returns an iterator over a data set that begins after some batches.

    They are left out in each worker's own pipeline. An iterator over several
    workers that is read and dropped took 3 ms for each batch, half a minute
    for a long training, as they tell each other that there is one.
    """
    if isinstance(source, tf.data.Dataset):
        return iter(source.skip(num_batches))
    is_clone = "_cloned_datasets" in vars(source)
    name = "_cloned_datasets" if is_clone else "_datasets"
    pipelines = vars(source)[name]
    pairs = source._input_workers._worker_device_pairs
    # One element is the part of one replica.
    vars(source)[name] = [
        each.skip(num_batches * len(devices))
        for each, (_, devices) in zip(pipelines, pairs, strict=True)
    ]
    try:
        return iter(source)
    finally:
        vars(source)[name] = pipelines


# By the beginning of their names in a graph: where operations of data sets that
# draw an order get their two seeds.
_SEEDS = {
    "RandomDataset": (0, 1),
    "ShuffleAndRepeatDataset": (2, 3),
    "ShuffleDataset": (2, 3),
}


def with_seeds(graph: tf.Tensor) -> tf.Tensor:
    """Gives seeds to what draws an order without one in a data set's graph.

    All that make the data set from the graph then draw the same one: a seed of
    0, TensorFlow's for none, is a new one in each process. None of them moves
    on the seeds of another, or of the data set itself.
    """
    if not draws_order(graph):
        return graph
    definition = tf.compat.v1.GraphDef.FromString(graph.numpy())
    functions = definition.library.function
    for nodes, output in [
        (definition.node, ""),
        *((function.node_def, ":output:0") for function in functions),
    ]:
        known = {node.name + output: node for node in nodes}
        for node in list(nodes):
            places = next(
                (at for op, at in _SEEDS.items() if node.op.startswith(op)), ()
            )
            seeds = [known.get(node.input[place]) for place in places]
            if seeds and all(map(_is_zero, seeds)):
                for place, seed in zip(places, seeds, strict=True):
                    own = nodes.add()
                    own.CopyFrom(seed)
                    own.name = f"{node.name}/own_seed_{place}"
                    drawn = int.from_bytes(os.urandom(4), "big")
                    own.attr["value"].tensor.CopyFrom(
                        tf.make_tensor_proto(drawn, tf.int64)
                    )
                    node.input[place] = own.name + output
            if node.op == "ShuffleDatasetV3" and not output:
                # In place of a handle of the data set's own generator.
                own = nodes.add(
                    name=f"{node.name}/generator", op="DummySeedGenerator"
                )
                node.input[-1] = own.name
    return tf.constant(definition.SerializeToString())


def draws_order(graph: tf.Tensor) -> bool:
    """Whether a data set's graph has what may draw an order."""
    return any(op.encode() in graph.numpy() for op in _SEEDS)


def pipeline_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yields a data set, and all that it is made of.

    TensorFlow has no public way to look at a pipeline.
    """
    yield dataset
    if isinstance(dataset, tf.data.Dataset):
        for source in reversed(dataset._inputs()):
            yield from pipeline_of(source)


def is_shuffled(dataset: tf.data.Dataset, *, then_cut: bool) -> bool:
    """Whether a pipeline shuffles; or does and then keeps a part by `shard`."""
    parts = [dataset]
    if then_cut:
        kind = "_ShardDataset"
        parts = [p for p in pipeline_of(dataset) if type(p).__name__ == kind]
    return any(
        type(each).__name__ == "_ShuffleDataset"
        for part in parts
        for each in pipeline_of(part)
    )


def _is_zero(node: tf.compat.v1.NodeDef) -> bool:
    if node is None or node.op != "Const":
        return False
    return bool(tf.make_ndarray(node.attr["value"].tensor) == 0)


class Steps(NamedTuple):
    """What one execution is to do: so many steps of an iterator."""

    iterator: Any
    number: int


def count_batches(board: keras.callbacks.TensorBoard, count: int) -> None:
    """Makes a TensorBoard count more batches than it was called for.

    keras/src/callbacks/tensorboard.py: `on_train_batch_begin` adds one, and
    opens the writer for that step, which asks whether it is to be recorded.
    """
    if not count:
        return
    board._global_train_batch += count
    if board.update_freq != "epoch":
        board._pop_writer()
        board._push_writer(board._train_writer, board._global_train_batch)


def profiled_batches(board: keras.callbacks.TensorBoard) -> tuple[int, int]:
    """Returns the first and the last batch that a TensorBoard profiles.

    Counted from 1; both are 0 or less if there is none.
    """
    return board._start_batch, board._stop_batch


def shuffle_seeds(dataset: tf.data.Dataset) -> list[list[int]]:
    """Returns the seeds of all that shuffles a data set or draws in it.

    Two for each. Both are 0 if the order is another one each time.
    """
    found = []
    for one in pipeline_of(dataset):
        if hasattr(one, "_seed2"):
            found.append([one._seed, one._seed2])
        if not hasattr(one, "_map_func"):
            continue
        for op in one._map_func.function.graph.get_operations():
            if op.type == "RandomShuffle":  # Keras' own, of arrays.
                found.append([op.get_attr("seed"), op.get_attr("seed2")])
            elif op.type.startswith("ShuffleDataset"):
                found.append([*map(tf.get_static_value, op.inputs[2:4])])
    return [[int(seed or 0) for seed in pair] for pair in found]


class EpochData:
    """The data of a `fit` or an `evaluate`, in Keras' iterator over epochs.

    Private, it is handed to `Trainer._maybe_symbolic_build`. It always starts
    at the first batch of an epoch, and takes one number of steps each time.
    """

    def __init__(self, epoch_iterator: keras_trainer.TFEpochIterator) -> None:
        """Changes nothing yet about a `TFEpochIterator`."""
        self._it = epoch_iterator

    @property
    def element_spec(self) -> Any:
        """The spec of the data that are about to be read."""
        return self._it._distributed_dataset.element_spec

    def group(self, next_count: Callable[[], int]) -> None:
        """Takes other numbers of steps each time.

        Keras' own number applies to a whole `fit`. It must be one, so that what
        is left here are groups of single steps, which end with the epoch.
        """
        if "_enumerate_iterator" in vars(self._it):  # A kept one.
            return
        enumerate_singly = self._it._enumerate_iterator

        def grouped() -> Iterator[Any]:
            num_batches = self._it.num_batches
            singly = enumerate_singly()
            for begin, end, iterator in singly:
                count = next_count()
                # At its end Keras opens the data of the next epoch.
                if num_batches:
                    count = min(count, num_batches - begin)
                ends = [
                    end,
                    *(e for _, e, _ in itertools.islice(singly, count - 1)),
                ]
                yield begin, ends[-1], Steps(iterator, len(ends))

        self._it._enumerate_iterator = grouped

    def count(self) -> None:
        """Counts, from now on, how far the data are read."""
        self._enumerate = self._it._enumerate_iterator
        self._make = self._it._get_iterator
        self._num_iterators = 0
        self._it._get_iterator = self._counted
        source = self._it.data_adapter.get_tf_dataset()
        is_known = isinstance(source, tf.data.Dataset)
        self._seeds = shuffle_seeds(source) if is_known else []

    def _counted(self) -> Any:
        self._num_iterators += 1
        return self._make()

    def position(self) -> dict[str, Any]:
        """Returns how far it has been read, as JSON has it."""
        return {
            "iterators": self._num_iterators,
            "batches": self._it._steps_seen,
            "is_kept": self._it._current_iterator is not None,
            "num_batches": self._it._num_batches,
            "seeds": self._seeds,
        }

    def go_to(
        self,
        position: dict[str, Any],
        *,
        batch: int,
        from_batch: Callable[[Any, int], Any],
    ) -> None:
        """Resumes the first epoch at `position`, at its batch `batch`.

        `from_batch` makes a data set that begins at a batch, or returns None
        if the data set must be read up to there.
        """
        self._it._enumerate_iterator = lambda: self._resumed(
            position, batch, from_batch
        )

    def _resumed(
        self,
        position: dict[str, Any],
        batch: int,
        from_batch: Callable[[Any, int], Any],
    ) -> Iterator[Any]:
        it, current = self._it, iter(())
        it._enumerate_iterator = self._enumerate
        # Each iterator moves the seeds of shuffles on, read or not.
        for _ in range(position["iterators"] - 1):
            iter(it._get_iterator())
        if position["iterators"]:
            is_read = batch or position["is_kept"]
            done = position["batches"] if is_read else 0
            whole_data, source = it._get_iterator(), it.data_adapter
            made = from_batch(source.get_tf_dataset(), done) if done else None
            if made is None:
                current = _iterator_after(whole_data, done)
            else:
                strategy = it._distribute_strategy
                current = iter(strategy.experimental_distribute_dataset(made))
        it._steps_seen = position["batches"]
        it._num_batches = it._num_batches or position["num_batches"]
        it._current_iterator = current if position["is_kept"] else None
        whole = it.steps_per_epoch
        limit = whole or it._num_batches
        if batch and limit:
            # Keras keeps the iterator if it was given a number of steps.
            it.steps_per_epoch, it._current_iterator = limit - batch, current
        elif batch:
            it._get_iterator = lambda: current
        for begin, end, source in it._enumerate_iterator():
            it.steps_per_epoch, it._get_iterator = whole, self._counted
            it._steps_seen += 0 if limit else batch
            yield begin + batch, end + batch, source


def lend_compiled(
    model: keras.Model, inner: keras.Model, *, metrics: bool
) -> None:
    """Makes Keras' `compute_loss` of `inner` use what `model` compiled with.

    The losses of single outputs are then metrics of `model`, which logs them.
    With its metrics, `inner.metrics` are those that are counted.
    """
    names = ["_compile_loss"]
    names += ["_compile_metrics", "_loss_tracker"] if metrics else []
    with tracking.DotNotTrackScope():
        for name in names:
            setattr(inner, name, getattr(model, name))


def change_seeds(change: Callable[[int], int]) -> Callable[[], None]:
    """Changes the seeds that Keras draws, and the seeds a program sets for it.

    The seeds of Python, NumPy and TensorFlow, by which programs split data,
    stay. `keras.utils.set_random_seed` sets all of them, and initializers
    without a seed draw theirs from Python's. Returns what undoes it.
    """
    draw, set_all = seed_generator.make_default_seed, rng_utils.set_random_seed

    def drawn() -> int:
        return change(draw())

    @functools.wraps(set_all)
    def set_random_seed(seed: int) -> None:
        set_all(seed)
        key = rng_utils.GLOBAL_RANDOM_SEED
        global_state.set_global_attribute(key, change(seed))

    def put(draw: Callable[[], int], set_all: Callable[[int], None]) -> None:
        seed_generator.make_default_seed = draw
        backend_random.make_default_seed = draw
        for module in (rng_utils, keras.utils, tf.keras.utils):
            module.set_random_seed = set_all

    put(drawn, set_random_seed)
    return lambda: put(draw, set_all)


def give_strategy(
    strategy: tf.distribute.Strategy,
) -> tuple[Callable[[], bool], Callable[[], None]]:
    """Gives this strategy to a program that makes its own strategy.

    A strategy for a single device, or for hardware that this one lacks, is
    refused. Returns what tells whether the program asked for a strategy of
    workers, and what undoes it.
    """
    asked: list[Any] = []
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
        tf.distribute.ParameterServerStrategy,
    )
    if not isinstance(strategy, kinds):
        return lambda: False, lambda: None
    others = (
        tf.distribute.OneDeviceStrategy,
        tf.distribute.TPUStrategy,
        tf.distribute.experimental.CentralStorageStrategy,
        tf.distribute.experimental.TPUStrategy,
    )
    before = [(kind, kind.__init__) for kind in (*kinds, *others)]
    is_given = [True]

    def new(cls: type, *args: object, **kwargs: object) -> Any:
        if not is_given:
            return object.__new__(cls)
        asked.append(cls)
        return strategy

    for kind, init in before[: len(kinds)]:

        def first(
            self: Any,
            *args: object,
            init: Callable[..., None] = init,
            **kw: object,
        ) -> None:
            if self is not strategy:
                init(self, *args, **kw)

        kind.__new__, kind.__init__ = new, first

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ValueError(
            "A script must not make another strategy than its run has, on "
            "several workers, servers or devices; received "
            f"{type(self).__name__} where "
            f"{type(strategy).__name__} is in force. Leave it out, or make a "
            "tf.distribute.MirroredStrategy(), which gives the run's; or train "
            "in one task that sees one device."
        )

    for kind in others:
        kind.__init__ = refuse

    def undo() -> None:
        is_given.clear()  # Python cannot take a `__new__` away again.
        for kind, init in before:
            kind.__init__ = init

    of_workers = kinds[1:]
    return lambda: any(issubclass(kind, of_workers) for kind in asked), undo


def replace_functions(
    **functions: Callable[..., Any],
) -> Callable[[], None]:
    """Replaces functions of Keras by name, wherever it has them.

    Each new one gets Keras' own before its arguments. Returns what undoes it.
    """
    homes = "backend", "models", "saving", "utils"
    places = [
        getattr(package, home)
        for package in (keras, tf.keras)
        for home in homes
        if hasattr(package, home)
    ]
    undo = contextlib.ExitStack()
    for module in places:
        for name, by in functions.items():
            if hasattr(module, name):
                undo.callback(replace(module, name, by))
    return undo.close


def replace(
    home: object, name: str, by: Callable[..., Any]
) -> Callable[[], None]:
    """Replaces a function of a module, or a method of a class.

    The new one gets the old one before its arguments. Returns what undoes it.
    """
    own = vars(home)[name]

    @functools.wraps(own)
    def new(*args: object, **kwargs: object) -> Any:
        return by(own, *args, **kwargs)

    setattr(home, name, new)
    return lambda: setattr(home, name, own)


def replace_checkpoint_writer(by: Callable[..., str]) -> Callable[[], None]:
    """Replaces what `tf.train.Checkpoint` and its managers write by."""
    return replace(tf.train.Checkpoint, "_write", by)


class _OverReplicas:
    """`synchronized` of a `BatchNormalization`: true in one of replicas."""

    def __get__(self, layer: keras.Layer, kind: object = None) -> Any:
        if layer is None:
            return self
        own = vars(layer).get("synchronized", False)
        return own or in_replica()

    def __set__(self, layer: keras.Layer, value: object) -> None:
        vars(layer)["synchronized"] = value


def normalize_over_replicas() -> Callable[[], None]:
    """Makes batch normalization use the rows of all replicas.

    Layers are saved as they were made. Returns what undoes it.
    """
    layer: Any = keras.layers.BatchNormalization
    layer.synchronized = _OverReplicas()

    def undo() -> None:
        del layer.synchronized

    return undo
