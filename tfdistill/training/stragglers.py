"""Finds the worker that makes its group wait, by how long each one waits.

Workers meet where they sum: who comes early waits there for the last. So the
slow worker waits least of all, whatever holds it up: its processor, its data or
its callbacks. How long each has waited travels in the sum of the metrics, one
number a worker, so all of them know.
"""

import collections
import contextlib
import logging
import statistics
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.training import steps

_log = logging.getLogger(__name__)
_NAME = "waits"
# Among the logs of a step: how many seconds each worker has waited.
WAITS = steps.hidden_key(_NAME)
# A worker is late in an execution if the others wait for it for more than this
# share of the time; it is slow if it is late in nearly all of the last ones. On
# a machine with ten times more work than cores, a backup in the background made
# a chief late by a fifth in 17 of 20 steps, but not by this much in 19.
_LATE_SHARE = 0.3
_SLOW_SHARE, _FINE_SHARE = 0.95, 0.5
_NUM_STEPS, _LEAST_EXECUTIONS = 20, 10


class _Active(threading.local):
    """When each sum of the step that this thread traces or runs took place."""

    sums: list[tuple[tf.Tensor, tf.Tensor]] | None = None


_active = _Active()


def summed(values: Sequence[Any]) -> list[Any]:
    """Sums as `replicas.summed` does; in a training step, it is timed."""
    sums = _active.sums
    if sums is None:
        return replicas.summed(list(values))
    # What overlaps counts once: from when the sum before it has ended.
    before = [end for _, end in sums[-1:]]
    with tf.control_dependencies([*before, *_present(values)]):
        begin = tf.timestamp()
    found = replicas.summed(list(values))
    with tf.control_dependencies(_present(found)):
        sums.append((begin, tf.timestamp()))
    return found


def _present(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


@contextlib.contextmanager
def _timed() -> Iterator[list[tuple[tf.Tensor, tf.Tensor]]]:
    _active.sums = []
    try:
        yield _active.sums
    finally:
        _active.sums = None


def measured(
    step: Callable[[Any], steps.Logs], strategy: tf.distribute.Strategy
) -> Callable[[Any], steps.Logs]:
    """A training step that logs `WAITS`, if there are several workers."""
    num_workers = replicas.num_workers(strategy)
    if num_workers == 1:
        return step
    num_local = strategy.num_replicas_in_sync // num_workers

    def run(data: Any) -> steps.Logs:
        with _timed() as sums:
            logs = step(data)
        secs = tf.add_n([end - begin for begin, end in sums] or [0.0])
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.one_hot(replica // num_local, num_workers)
        # Added up over the replicas of each worker.
        return {**logs, WAITS: own * tf.cast(secs, tf.float32) / num_local}

    return run


def added(logs: steps.Logs, before: steps.Logs) -> steps.Logs:
    """Returns the logs of a step with the waits of those before it."""
    if WAITS not in logs:
        return logs
    return {**logs, WAITS: logs[WAITS] + before[WAITS]}


def shared(logs: steps.Logs, num_replicas: int) -> steps.Logs:
    """Returns logs whose waits, once more summed, are what they were."""
    if WAITS not in logs:
        return logs
    return {**logs, WAITS: logs[WAITS] / num_replicas}


class WorkerWaits:
    """Who makes the workers of a group wait, according to the last 20 steps.

    Attributes:
        secs: How long each worker waits in a step, by its task's name; empty
            while nothing is known.
        slow: A sentence for each worker that makes the others wait.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Knows nothing yet."""
        self._names = replicas.worker_names(strategy)
        self._clock, self._mark = clock, clock()
        # Of the last execution, which may not have ended.
        self._pending: Any = None
        # Seconds of a step, and those that each worker waited in it.
        self._steps: collections.deque[tuple[float, list[float]]] = (
            collections.deque()
        )
        self._is_slow = dict.fromkeys(self._names, False)
        self.secs: dict[str, float] = {}
        self.slow: list[str] = []

    def executed(self, last: steps.LastExecution, num_steps: int) -> None:
        """Takes in what the last execution but one reports."""
        found, self._pending = self._pending, last.detail(_NAME)
        before, self._mark = self._mark, self._clock()
        if found:
            waits = found[0].numpy().tolist()
            self.add(waits, self._mark - before, num_steps)

    def add(
        self, waits: Sequence[float], secs: float, num_steps: int = 1
    ) -> None:
        """Takes in the waits of an execution, which took `secs`."""
        self._steps.append((secs / num_steps, [w / num_steps for w in waits]))
        limit = max(_LEAST_EXECUTIONS, -(-_NUM_STEPS // num_steps))
        if len(self._steps) > limit:
            self._steps.popleft()
        step_secs = statistics.median(secs for secs, _ in self._steps)
        by_worker = zip(*(waits for _, waits in self._steps), strict=True)
        self.secs = dict(
            zip(self._names, map(statistics.median, by_worker), strict=True)
        )
        if len(self._steps) == limit:
            self._judge(step_secs, limit * num_steps)

    def _judge(self, step_secs: float, num_steps: int) -> None:
        late = [_late(waits, secs) for secs, waits in self._steps]
        self.slow = []
        typical = _typical(list(self.secs.values()))
        for name, times in zip(
            self._names, zip(*late, strict=True), strict=True
        ):
            was_slow = self._is_slow[name]
            share = sum(times) / len(times)
            is_slow = share >= (_FINE_SHARE if was_slow else _SLOW_SHARE)
            self._is_slow[name] = is_slow
            text = (
                f"{name} makes its group wait: of the last {num_steps} steps, "
                f"of {1e3 * step_secs:.0f} ms each, the others waited "
                f"{1e3 * (typical - self.secs[name]):.0f} ms for it"
            )
            if is_slow:
                self.slow.append(text)
            if is_slow and not was_slow:
                _log.warning("%s.", text)
            elif was_slow and not is_slow:
                _log.warning("%s makes its group wait no longer.", name)


def _late(waits: Sequence[float], secs: float) -> list[bool]:
    typical = _typical(waits)
    return [typical - wait > _LATE_SHARE * secs for wait in waits]


def _typical(waits: Sequence[float]) -> float:
    """What most workers wait at least; of two, the one that waits longer."""
    return sorted(waits)[len(waits) // 2]
