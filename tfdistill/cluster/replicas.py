"""Who shares the work under a strategy: chief, workers, replicas, servers."""

import contextlib
import os
import pickle
import random
import threading
import weakref
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from concurrent import futures
from typing import Any
from typing import TypeVar

import numpy as np
import tensorflow as tf

from tfdistill.system import keras_internals

Made = TypeVar("Made")


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Whether this task writes its group's files.

    The chief does (worker 0 if the cluster names no chief), and a task that
    is the only one. `strategy` defaults to the current one.
    """
    strategy = strategy or tf.distribute.get_strategy()
    resolver = strategy.cluster_resolver
    if resolver is None or resolver.task_type in (None, "", "chief"):
        return True
    is_first = (resolver.task_type, resolver.task_id) == ("worker", 0)
    return is_first and "chief" not in resolver.cluster_spec().jobs


def num_workers(strategy: tf.distribute.Strategy) -> int:
    """Number of tasks that train together under `strategy`.

    1 if one process trains: the strategy spans no other, or the coordinator
    directs the workers of a parameter-server cluster.
    """
    jobs = keras_internals.jobs_of(strategy)
    if "ps" in jobs:
        return 1
    return max(1, sum(len(jobs.get(job, ())) for job in ("chief", "worker")))


def num_local(strategy: tf.distribute.Strategy) -> int:
    """How many replicas each worker holds, under a strategy of replicas."""
    return strategy.num_replicas_in_sync // num_workers(strategy)


def worker_index(strategy: tf.distribute.Strategy) -> int:
    """Returns this task's index among those that train together."""
    resolver: Any = strategy.cluster_resolver
    if num_workers(strategy) == 1 or resolver.task_type == "chief":
        return 0
    chiefs = keras_internals.jobs_of(strategy).get("chief", ())
    return resolver.task_id + len(chiefs)


def local_replicas(strategy: tf.distribute.Strategy) -> list[int]:
    """Returns the indices of this worker's replicas among all of the group."""
    count = num_local(strategy)
    first = worker_index(strategy) * count
    return list(range(first, first + count))


def told(
    strategy: tf.distribute.Strategy, value: tf.Tensor, *, name: str
) -> tf.Variable:
    """Makes a variable by which traced steps hear of what is settled outside.

    All workers assign the same to it, between steps; no step does.
    """
    with strategy.scope():
        return tf.Variable(
            value,
            trainable=False,
            name=name,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )


class WorkerValues:
    """Sums and gathers workers' numbers; all call it at the same point."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        """Traces nothing yet."""
        self._strategy = strategy
        self._num_workers = num_workers(strategy)
        self._index = worker_index(strategy)

    def summed(self, values: np.ndarray) -> np.ndarray:
        """Returns the sum of the workers' int64 vectors of one size."""
        if self._num_workers == 1:
            return values
        strategy = self._strategy
        if strategy not in _SUMS:
            _SUMS[strategy] = _sum_of(weakref.proxy(strategy))
        found = _SUMS[strategy](tf.constant(values, tf.int64))
        return strategy.experimental_local_results(found)[0].numpy()

    def gathered(self, value: int) -> list[int]:
        """Returns the int64 of each worker, in their order."""
        own = np.zeros(self._num_workers, np.int64)
        own[self._index] = value
        return self.summed(own).tolist()

    def floats(self, value: float) -> list[float]:
        """Returns the float64 of each worker, to the bit."""
        return from_bits(self.gathered(bits(value)))

    def chiefs(self, value: float) -> float:
        """Returns the chief's float64, to the bit."""
        return self.floats(value)[0]


def bits(value: float) -> int:
    """Returns the bits of a float64, which travel as a number."""
    return int(np.float64(value).view(np.int64))


def from_bits(values: Sequence[int]) -> list[float]:
    """Returns the float64 of which `bits` returned each number."""
    return np.array(values, np.int64).view(np.float64).tolist()


# By strategy: a trace costs a start of several workers a tenth of a second.
_SUMS: weakref.WeakKeyDictionary[tf.distribute.Strategy, Any] = (
    weakref.WeakKeyDictionary()
)


def _sum_of(strategy: tf.distribute.Strategy) -> Any:
    num_each = num_local(strategy)

    def in_replica(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        counts = context.replica_id_in_sync_group % num_each == 0
        own = tf.where(counts, values, tf.zeros_like(values))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    return tf.function(
        lambda values: strategy.run(in_replica, args=(values,)),
        input_signature=[tf.TensorSpec([None], tf.int64)],
        autograph=False,
    )


def agree_on_seeds(strategy: tf.distribute.Strategy) -> None:
    """Gives all workers the first one's random numbers, where they differ.

    Those of Python, NumPy and TensorFlow, which what reads data draws from if
    it is given no seed. Workers that draw different orders train on some
    examples twice and on others never. A collective.
    """
    workers = WorkerValues(strategy)
    seed = keras_internals.global_seed()
    own = int.from_bytes(os.urandom(4), "big") if seed is None else seed
    seeds = workers.gathered(own % 2**31)
    if seed is None or len(set(seeds)) > 1:
        tf.random.set_seed(seeds[0])
    for state, set_seed in (
        (random.getstate(), random.seed),
        (np.random.get_state(), np.random.seed),
    ):
        found = workers.gathered(zlib.crc32(pickle.dumps(state)))
        if len(set(found)) > 1:
            set_seed(found[0])


# What all workers of a group do together; the end of the program is the first.
_CALLS = (
    *("leave", "fit", "evaluate", "predict", "fit to its end", "save"),
    "get_metrics_result",
)
# Added to the codes of these, which no other number that is gathered equals.
_CALL = 2**40
# The strategies whose workers check that they are together.
_MEETING: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()


class NotTogetherError(ValueError):
    """The workers of a group do different things; the message says which."""


def prepare_to_meet(strategy: tf.distribute.Strategy) -> None:
    """Makes all workers meet in one collective, traced before any other.

    They agree on their seeds.
    """
    _MEETING.add(strategy)
    agree_on_seeds(strategy)


def meet(strategy: tf.distribute.Strategy, call: str) -> None:
    """Checks that all workers make the same call, of `_CALLS`.

    Otherwise each would wait for the others in collectives that are not
    theirs, which is an error that names no cause, or none at all.
    """
    if strategy not in _MEETING:
        return
    try:
        codes = WorkerValues(strategy).gathered(_CALL + _CALLS.index(call))
    except (tf.errors.InternalError, tf.errors.InvalidArgumentError) as error:
        raise _not_together(call, "were at another step") from error
    others = {code - _CALL for code in codes} - {_CALLS.index(call)}
    if others:
        said = {
            "leave": "ended their program",
            "fit to its end": "came to the end of `fit`",
        }
        found = sorted(
            said.get(name, f"called `{name}`")
            for name in (_CALLS[o] for o in others if o in range(len(_CALLS)))
        )
        raise _not_together(call, " or ".join(found) or "were at another step")


def _not_together(call: str, others: str) -> NotTogetherError:
    return NotTogetherError(
        f"`{call}` must be called by all workers of a group together; this "
        f"worker called it while others {others}. Call it on every worker; "
        "only files should be written by the chief alone."
    )


def summed(values: list[Any]) -> list[Any]:
    """Sums tensors over the replicas, packed into few collectives.

    Indexed slices are summed as such; None stays None.
    """
    present = [value for value in values if value is not None]
    if not present:
        return values
    context = tf.distribute.get_replica_context()
    begin = _now(present)
    found: dict[int, Any] = {}
    # TensorFlow packs values of one dtype only, and sums int32 elsewhere.
    for dtype in dict.fromkeys(value.dtype for value in present):
        same = [v for v in present if v.dtype == dtype]
        sums = context.all_reduce(tf.distribute.ReduceOp.SUM, same)
        found.update(zip(map(id, same), sums, strict=True))
    if _timed.secs is not None:
        _timed.secs.append(_now(list(found.values())) - begin)
    return [None if value is None else found[id(value)] for value in values]


class _Timed(threading.local):
    secs: list[tf.Tensor] | None = None


_timed = _Timed()


@contextlib.contextmanager
def timed() -> Iterator[list[tf.Tensor]]:
    """Yields how long each sum takes that this thread traces meanwhile."""
    _timed.secs = []
    try:
        yield _timed.secs
    finally:
        _timed.secs = None


def _now(after: list[Any]) -> Any:
    if _timed.secs is None:
        return None
    with tf.control_dependencies(after):
        return tf.timestamp()


def gatherable(value: tf.Tensor) -> tf.Tensor:
    """Casts to the next wider dtype that TensorFlow's collectives take."""
    if value.dtype in (tf.bfloat16, tf.float16):
        return tf.cast(value, tf.float32)
    if value.dtype.is_integer or value.dtype.is_bool:
        return tf.cast(value, tf.int64)
    return value


def outside_scopes(make: Callable[[], Made]) -> Made:
    """Makes something where no scope of a strategy is entered.

    `fit` may be called in one. A Keras optimizer that updates a callback's own
    variables would take them there for some that replicas share. Scopes are
    known to the thread that enters them, and there is no other way out.
    """
    if not tf.distribute.has_strategy():
        return make()
    with futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


# Whether this code runs for one of several replicas.
in_replica = keras_internals.in_replica


def on_servers(strategy: tf.distribute.Strategy) -> bool:
    """Whether variables live on parameter servers under this strategy."""
    return isinstance(strategy, tf.distribute.ParameterServerStrategy)


def exchange_values(strategy: tf.distribute.Strategy) -> bool:
    """Whether replicas, workers or servers exchange values in a step."""
    return strategy.num_replicas_in_sync > 1 or on_servers(strategy)
