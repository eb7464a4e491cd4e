"""The arguments of `fit`, by name, and its data, checked before it trains.

Keras goes on with a warning, or without one, if data hold nothing.
"""

import inspect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdistill import data_checks
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib


def bind(
    method: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns all arguments of Keras' own method by name."""
    bound = inspect.signature(method).bind(*args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    return {**bound, **extra}


def of_loop(
    method: Callable[..., Any],
    args: Iterable[Any],
    kwargs: dict[str, Any],
    strategy: tf.distribute.Strategy,
) -> dict[str, Any]:
    """Returns the arguments of `fit`, `evaluate` or `predict` by name.

    Data that are functions of a `tf.distribute.InputContext` are called: here
    they give the global batches. With parameter servers each worker does.
    """
    arguments = bind(method, args, kwargs)
    for name in ("x", "validation_data"):
        is_function = callable(arguments.get(name))
        if is_function and not replicas.on_servers(strategy):
            arguments[name] = arguments[name](tf.distribute.InputContext())
    return arguments


def check(arguments: Mapping[str, Any]) -> None:
    """Checks the data that `fit` was given, as far as they are known before."""
    check_data("x", arguments.get("x"))
    validation = arguments.get("validation_data")
    if validation is None:
        return
    check_data("validation_data", validation)
    steps = arguments.get("validation_steps")
    if _amount(validation) == tf.data.INFINITE_CARDINALITY and steps is None:
        raise ValueError(
            "`validation_steps` must be given if the validation data repeat "
            "forever; received None."
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Checks that a model was made in the scope of its group's strategy."""
    if replicas.num_workers(strategy) > 1 or replicas.on_servers(strategy):
        return
    cluster = strategy_lib.cluster_of(strategy)
    if cluster.num_workers > 1 or cluster.uses_parameter_servers:
        raise ValueError(
            "The model must be made in the scope of its group's strategy, as "
            "the group has several tasks; received one made outside of it, "
            "which every task would train for itself. Call "
            "tfdistill.make_strategy first; then make the model and its "
            "optimizer, and call `compile`, in `with strategy.scope():`."
        )


def check_alike(
    arguments: Mapping[str, Any], strategy: tf.distribute.Strategy
) -> None:
    """Checks that the data let all workers make the same steps; a collective.

    Keras counts on each worker by what its own data hold. One that ends an
    epoch before the others meets them in a collective that is not theirs. The
    error is raised on all workers.
    """
    names = {"x": "steps_per_epoch", "validation_data": "validation_steps"}
    workers = replicas.WorkerValues(strategy)
    for name, steps in names.items():
        shares = workers.gathered(_amount(arguments.get(name)))
        if len(set(shares)) > 1:
            raise data_checks.DataError(
                f"`{name}` must have the same size on all workers; received "
                f"{', '.join(map(str, shares))} batches or examples, by "
                f"replica (-1: endless). Repeat all shares (`repeat()`) and "
                f"pass `{steps}`; or pass the same `tf.data.Dataset` on all "
                "workers, and `fit` gives each worker its rows. If a share is "
                "empty, use more data or fewer workers."
            )


def _amount(data: Any) -> int:
    """Batches of a data set, or examples of arrays.

    Negative, as a `cardinality`, if that is endless or unknown.
    """
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality())
    if isinstance(data, tf.distribute.DistributedDataset):
        return int(data.cardinality)
    leaves = keras.tree.flatten(data)
    shapes: Any = (getattr(leaf, "shape", None) or () for leaf in leaves)
    unknown = tf.data.UNKNOWN_CARDINALITY
    return next((shape[0] for shape in shapes if len(shape)), unknown)


def check_data(name: str, data: Any) -> None:
    """Checks that data hold something, if that is known.

    A worker's own share may be empty: see `check_alike`.
    """
    is_share = isinstance(data, tf.distribute.DistributedDataset)
    if not is_share and _amount(data) == 0:
        raise data_checks.DataError(
            f"`{name}` must hold at least one example; received 0 batches or "
            "examples. Check how much data the files, filters, shards and "
            "`take` before it leave."
        )


def no_batch(epoch: int) -> data_checks.DataError:
    """Returns the error over data that ended before the first batch of it."""
    return data_checks.DataError(
        "`x` must hold at least one batch; it ended before the first of epoch "
        f"{epoch + 1}. Check how much data its files, filters and generators "
        "leave, and repeat data that can be read only once."
    )
