"""Who makes its group wait, by made-up waits; tests/runs has real ones."""

import logging

import numpy as np
import pytest
import tensorflow as tf

from tfdistill.training import steps
from tfdistill.training import stragglers

_STEP = 0.030


class _Strategy:
    """Of a cluster that has only workers."""

    def __init__(self, num_workers):
        self.cluster_resolver = self
        self._jobs = {"worker": [f"host:{i}" for i in range(num_workers)]}

    def cluster_spec(self):
        return self

    def as_dict(self):
        return self._jobs


def _named(delays):
    """The workers that are slow after each execution; who is late by how much.

    All wait for the last one, and 2 ms for the sum.
    """
    found = stragglers.WorkerWaits(_Strategy(len(delays[0])))
    named = []
    for delay in np.asarray(delays):
        waits = 0.002 + delay.max() - delay
        secs = _STEP + delay.max()
        found.add(list(waits), secs)
        named.append(list(found.slow))
    return named


def _delays(num_workers, num_steps=100, **by_worker):
    delays = np.zeros([num_steps, num_workers])
    for worker, values in by_worker.items():
        delays[:, int(worker[1:])] = values
    return delays


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_a_slow_worker_is_named_within_twenty_steps_and_then_cleared(
    num_workers, caplog
):
    delays = _delays(num_workers, 100, w1=0.018)
    delays[:30] = delays[60:] = 0.0
    with caplog.at_level(logging.WARNING):
        named = _named(delays)
    assert not any(named[:30])
    assert all(found == ["worker:1"] for found in named[50:60])
    assert not any(named[80:])
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("worker:1 makes its group wait: in the last 20")
    assert last == "worker:1 no longer makes its group wait."


def test_two_of_eight_are_both_named():
    named = _named(_delays(8, w0=0.02, w5=0.02))
    assert named[-1] == ["worker:0", "worker:5"]


@pytest.mark.parametrize("num_steps", [1, 10])
def test_twenty_executions_of_one_step_or_of_several(num_steps):
    last = steps.LastExecution()
    found = stragglers.WorkerWaits(_Strategy(2))
    now = iter(np.arange(100) * _STEP * num_steps)
    named = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stragglers.time, "perf_counter", lambda: next(now))
        for _ in range(22):
            waits = tf.constant([0.002, 0.010])
            last.taken_from({stragglers.WAITS: waits}, num_steps=num_steps)
            found.executed(last, num_steps)
            named.append(list(found.slow))
    # What an execution reports is read once the next one is under way.
    assert named == [[]] * 20 + [["worker:0"]] * 2


_NOISE = np.random.default_rng(0)
_EVEN = np.arange(2000) % 2
_FAIR = {
    "equal": _delays(4),
    "noise": _NOISE.exponential(0.02, [2000, 4]),
    "noise_of_two": _NOISE.exponential(0.02, [2000, 2]),
    "alternating": _delays(2, 2000, w0=0.1 * _EVEN, w1=0.1 * (1 - _EVEN)),
    "a_chief_that_exports": _delays(
        3, 2000, w0=np.where(np.arange(2000) % 10, 0.0, 2.0)
    ),
    "a_little_slower": _delays(2, w1=0.005),
}


@pytest.mark.parametrize("name", _FAIR)
def test_nobody_is_named(name):
    assert not any(_named(_FAIR[name]))
