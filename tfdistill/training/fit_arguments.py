"""The arguments of `fit`, by name, and checked before anything is trained.

Keras continues with a warning, or without one, if data hold nothing or end too
early, and leaves out arguments that do not fit the others.
"""

import difflib
import inspect
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdistill import data
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.system import keras_internals


def bind(
    method: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Returns all arguments of Keras' own method by name."""
    check_names(method, kwargs)
    bound = inspect.signature(method).bind(*args, **kwargs).arguments
    extra = bound.pop("kwargs", {})
    return {**bound, **extra}


def check_names(
    method: Callable[..., Any], given: Iterable[str], *further: str
) -> None:
    """Refuses arguments that neither Keras' own method nor ours takes."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [*parameters, *further]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise ValueError(
                f"`{method.__name__}` takes no argument `{name}`.{hint}"
            )


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


def check(arguments: Mapping[str, Any], *, starts_over: bool = False) -> None:
    """Checks what `fit` was given, as far as it can be known before.

    Arguments that are absent have Keras' defaults. If it `starts_over`, each
    epoch reads the data from their start, though `steps_per_epoch` is given.
    """
    _check_options(arguments)
    check_data("x", arguments.get("x"))
    _check_steps(arguments, starts_over)
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


def split(arguments: dict[str, Any]) -> None:
    """Makes `validation_data` of a `validation_split`, in place, as Keras."""
    share = arguments.pop("validation_split", None)
    if not share:
        return
    names = "x", "y", "sample_weight"
    parts = tuple(arguments.get(name) for name in names)
    own, held = keras_internals.train_validation_split(parts, share)
    arguments.update(zip(names, own, strict=True))
    arguments["validation_data"] = keras.utils.pack_x_y_sample_weight(*held)


def weigh(arguments: dict[str, Any]) -> None:
    """Makes sample weights of a `class_weight`, in place, as Keras."""
    weights = arguments.pop("class_weight", None)
    if not weights:
        return
    if arguments.get("sample_weight") is not None:
        raise ValueError(
            "At most one of `class_weight` and `sample_weight` may be given; "
            "received both. Multiply them, and pass `sample_weight`."
        )
    x = arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        arguments["x"] = x.map(keras_internals.class_weight_map(weights))
    elif arguments.get("y") is not None:
        found = keras_internals.class_weights_of(arguments["y"], weights)
        arguments["sample_weight"] = found
    else:
        raise ValueError(
            "With parameter servers, `class_weight` needs labels that can be "
            "read at once; received data of the type "
            f"{type(x).__name__}. Pass arrays `x` and `y`, or a "
            "tf.data.Dataset of (x, y)."
        )


def check_strategy(strategy: tf.distribute.Strategy) -> None:
    """Checks that a model was made in the scope of its group's strategy."""
    if replicas.num_workers(strategy) > 1 or replicas.on_servers(strategy):
        return
    cluster = strategy_lib.cluster_of(strategy)
    if cluster.num_workers > 1 or cluster.uses_parameter_servers:
        raise ValueError(
            "The model must be created in the scope of its group's strategy, "
            "because the group has several tasks; this model was created "
            "outside it, and every task would train it separately. Call "
            "tfdistill.make_strategy first; then create the model and its "
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
            raise data.DataError(
                f"`{name}` must have the same size on all workers; received "
                f"{', '.join(map(str, shares))} batches or examples, by "
                f"worker (-1: endless). Repeat all shares (`repeat()`) and "
                f"pass `{steps}`; or pass the same `tf.data.Dataset` on all "
                "workers, and `fit` gives each worker its rows. If a share is "
                "empty, use more data or fewer workers."
            )


def _amount(data: object) -> int:
    """Batches of a data set, or examples of arrays.

    Negative, as a `cardinality`, if that is endless or unknown.
    """
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality())
    if isinstance(data, tf.distribute.DistributedDataset):
        return int(data.cardinality)
    leaves = keras.tree.flatten(data)
    arrays = (x for x in leaves if isinstance(x, keras_internals.Array))
    shapes: Any = (array.shape or () for array in arrays)
    unknown = tf.data.UNKNOWN_CARDINALITY
    return next((shape[0] for shape in shapes if len(shape)), unknown)


def check_data(name: str, given: object) -> None:
    """Checks that data hold something, if that is known.

    A worker's own share may be empty: see `check_alike`.
    """
    is_share = isinstance(given, tf.distribute.DistributedDataset)
    if not is_share and _amount(given) == 0:
        raise data.DataError(
            f"`{name}` must hold at least one example; received 0 batches or "
            "examples. Check how much data the files, filters, shards and "
            "`take` before it leave."
        )


def no_batch(epoch: int) -> data.DataError:
    """Returns the error over data that ended before the first batch of it."""
    return data.DataError(
        "`x` must hold at least one batch; it ended before the first of epoch "
        f"{epoch + 1}. Check how much data its files, filters and generators "
        "leave, and repeat data that can be read only once."
    )


def _check_options(arguments: Mapping[str, Any]) -> None:
    """Refuses what Keras would leave out."""
    if isinstance(arguments.get("x"), tf.data.Dataset):
        # Keras itself refuses `y`, weights and a split.
        if size := arguments.get("batch_size"):
            raise ValueError(
                "`batch_size` doesn't apply to a data set, which is already "
                f"batched; received {size}. Leave it out."
            )
    has_data = arguments.get("validation_data") is not None
    has_split = bool(arguments.get("validation_split"))
    if has_data and has_split:
        raise ValueError(
            "At most one of `validation_split` and `validation_data` may be "
            "given; received both. Leave one of them out."
        )
    for name in ("validation_steps", "validation_batch_size"):
        if arguments.get(name) and not (has_data or has_split):
            raise ValueError(
                f"`{name}` needs validation data; received {arguments[name]} "
                "without validation data. Pass `validation_data`, or leave it "
                "out."
            )
    first, last = arguments.get("initial_epoch", 0), arguments.get("epochs", 1)
    if last and first > last:
        raise ValueError(
            "`initial_epoch` must not be beyond `epochs`, the index to stop "
            f"before; received {first} and {last}. To train {last} more, pass "
            f"epochs={first + last}."
        )


def _check_steps(arguments: Mapping[str, Any], starts_over: bool) -> None:
    steps, x = arguments.get("steps_per_epoch"), arguments.get("x")
    if steps is None or not isinstance(x, tf.data.Dataset):
        return
    num_batches = _amount(x)
    epochs = arguments.get("epochs", 1) - arguments.get("initial_epoch", 0)
    wanted = steps if starts_over else steps * epochs
    # Keras starts over where the data end together with an epoch. Endless or
    # unknown: a callback may end an epoch that never ends.
    if 0 <= num_batches < wanted and (starts_over or num_batches % steps):
        what = f"{steps} steps an epoch"
        if not starts_over:
            what += f" for {epochs} epoch(s)"
        raise data.DataError(
            f"`x` must hold enough batches for {what}; received "
            f"{num_batches}, so the data would end after step {num_batches}. "
            "Repeat them (`dataset.repeat()`), or leave `steps_per_epoch` out "
            "for one pass an epoch."
        )
