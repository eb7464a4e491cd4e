"""Finds the worker that makes its group wait, by how long each one waits.

Workers meet where they sum: early workers wait there for the last. So the
slow worker waits least of all, whatever holds it up: its processor, its data or
its callbacks. How long each has waited travels in the sum of the metrics, one
number a worker, so all of them know.
"""

import collections
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals
from tfdistill.training import steps

_log = logging.getLogger(__name__)
_NAME = "waits"
# Among the logs of a step: how many seconds each worker has waited.
WAITS = f"{steps.HIDDEN}{_NAME}"
# A worker is slow if the others waited for it, in 19 of 20 executions, for more
# than this share of the median step. Fair runs under heavy load came to 0.12: a
# backup in the background makes the chief later than that, but not so often.
_SLOW_SHARE = 0.2
_NUM_EXECUTIONS, _NUM_OTHERWISE = 20, 1


def measured(
    step: Callable[[Any], steps.Logs], strategy: tf.distribute.Strategy
) -> Callable[[Any], steps.Logs]:
    """A training step that logs `WAITS`, if it can and has several workers."""
    num_workers = replicas.num_workers(strategy)
    # No clock is read where all operations must be deterministic.
    if num_workers == 1 or keras_internals.is_deterministic():
        return step
    num_local = replicas.num_local(strategy)

    def run(data: object) -> steps.Logs:
        with replicas.timed() as waits:
            logs = step(data)
        # Not their sum: two of them may be under way at once.
        secs = tf.cast(tf.reduce_max([0.0, *waits]), tf.float32)
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        own = tf.one_hot(replica // num_local, num_workers)
        # A mean over the replicas of each worker, once they are summed.
        return {**logs, WAITS: own * secs / num_local}

    return run


class WorkerWaits:
    """Which workers made the group wait, in the last 20 executions.

    Attributes:
        slow: A sentence for each of these workers, by its task's name.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        jobs = keras_internals.jobs_of(strategy)
        self._names = [
            f"{job}:{index}"
            for job in ("chief", "worker")
            for index, _ in enumerate(jobs.get(job, ()))
        ]
        self._begin = time.perf_counter()
        # What the last execution reports; it may not have ended.
        self._pending: Any = None
        # Seconds of a step, and those that others waited for each worker.
        self._steps: collections.deque[tuple[float, list[float]]] = (
            collections.deque(maxlen=_NUM_EXECUTIONS)
        )
        self.slow: dict[str, str] = {}

    def executed(self, last: steps.LastExecution, num_steps: int) -> None:
        """Takes in what the last execution but one reports."""
        found, self._pending = self._pending, last.detail(_NAME)
        before, self._begin = self._begin, time.perf_counter()
        if found:
            secs = (self._begin - before) / num_steps
            self.add(found[0].numpy().tolist(), secs)

    def add(self, waits: list[float], secs: float) -> None:
        """Takes in the waits of the last step of an execution, of `secs`."""
        typical = statistics.median_high(waits)
        self._steps.append((secs, [typical - wait for wait in waits]))
        if len(self._steps) == _NUM_EXECUTIONS:
            all_secs, late = zip(*self._steps, strict=True)
            by_worker = zip(self._names, zip(*late, strict=True), strict=True)
            step_secs = statistics.median_high(all_secs)
            for name, times in by_worker:
                self._judge(name, sorted(times), step_secs)

    def _judge(self, name: str, late: list[float], secs: float) -> None:
        median = statistics.median_high(late)
        was_slow = self.slow.pop(name, None)
        # Nearly all name a worker, and half of them clear it.
        least = median if was_slow else late[_NUM_OTHERWISE]
        if least > _SLOW_SHARE * secs:
            text = self.slow[name] = (
                f"{name} makes its group wait: in the last {len(late)} "
                f"executions, the others waited for it {1e3 * median:.0f} ms "
                f"of each {1e3 * secs:.0f} ms step"
            )
            if not was_slow:
                _log.warning("%s.", text)
        elif was_slow:
            _log.warning("%s no longer makes its group wait.", name)
