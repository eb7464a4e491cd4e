"""Tests of who of a group is frozen or stuck; no process is started."""

import dataclasses
import sys

import pytest

from tfdistill import awake_clock
from tfdistill import local_cluster
from tfdistill import progress
from tfdistill import run_files
from tfdistill import startup
from tfdistill import task_watch


@dataclasses.dataclass
class _Process:
    """What a watch sees of a process."""

    exit_code: int | None = None
    is_stopped: bool = False


class _Group:
    """A group of invented tasks and an invented clock."""

    def __init__(self, tmp_path, **fields):
        topology = local_cluster.LocalCluster(
            command=(sys.executable, "-c", "pass"),
            workdir=str(tmp_path),
            **fields,
        )
        (tasks,) = topology.tasks(range(1, topology.num_ports + 1))
        self._now = 0.0
        self.watch = task_watch.TaskWatch(
            {_short(task.name): task for task in tasks},
            topology=topology,
            clock=awake_clock.AwakeClock(lambda: self._now),
        )
        self.processes = {}
        topology.logs_dir.joinpath("ready").mkdir(parents=True)
        self._ready = {_short(task.name): task.ready_path for task in tasks}
        self.reporters = {}
        for name in self._ready:
            self.start(name)

    def start(self, name):
        """Starts a task, or starts it again as the launcher does."""
        run_files.forget_progress(self._ready[name])
        self.processes[name] = _Process()
        self.reporters[name] = progress.Reporter(
            {startup.VARIABLE: str(self._ready[name])}
        )

    def go_on(self, secs, **phases):
        """Lets time pass while some tasks keep reporting; returns findings."""
        found = []
        for _ in range(round(secs * 4)):
            for name, phase in phases.items():
                self.reporters[name].say(phase)
            self._now += 0.25
            found += self.watch.look(self.processes)
        return found


def _short(name):
    return name.removeprefix("group_0_")


def _workers(tmp_path, **fields):
    group = _Group(tmp_path, workers_per_group=2, **fields)
    first, step = progress.FIRST_STEP, progress.STEP
    assert not group.go_on(1, worker_0=first, worker_1=first)
    assert not group.go_on(5, worker_0=step, worker_1=step)
    return group


def test_a_group_whose_steps_stop_is_stuck_as_a_whole(tmp_path):
    group = _workers(tmp_path)
    assert not group.go_on(7.5)
    (found,) = group.go_on(1)[:1]
    assert (found.event, found.task) == ("stuck", None)
    assert found.details["phase"] == progress.STEP
    assert 8.0 < found.details["silent_secs"] < 9.0
    assert "worker_0 8." in found.text and "worker_1 8." in found.text


@pytest.mark.parametrize(
    "phase", [progress.CALLBACKS, progress.EPOCH_END, progress.IDLE]
)
def test_workers_may_wait_for_one_that_saves(tmp_path, phase):
    group = _workers(tmp_path)
    group.reporters["worker_0"].say(phase)
    assert not group.go_on(300)
    # Nor does this wait lengthen what is allowed later.
    assert not group.go_on(2, worker_0=progress.STEP, worker_1=progress.STEP)
    assert group.go_on(9)


def test_workers_may_wait_for_one_that_has_not_come_so_far(tmp_path):
    group = _Group(tmp_path, workers_per_group=2)
    group.go_on(1, worker_0=progress.FIRST_STEP)
    assert not group.go_on(1000)


def test_a_frozen_task_is_found_and_a_short_stop_is_only_told(tmp_path):
    group = _workers(tmp_path)
    process = group.processes["worker_1"]
    process.is_stopped = True
    assert [f.event for f in group.go_on(2.75)] == ["stopped_by_signal"]
    process.is_stopped = False
    (told,) = group.go_on(1, worker_0=progress.STEP, worker_1=progress.STEP)
    assert (told.event, told.task, told.text) == ("continued", "worker_1", "")
    process.is_stopped = True
    found = group.go_on(3.5)
    assert [f.event for f in found[:2]] == ["stopped_by_signal", "frozen"]
    assert found[1].task == "worker_1"
    assert "was frozen" in found[1].text


def test_a_debugger_may_stop_a_task_for_long(tmp_path):
    group = _workers(tmp_path, frozen_secs=0.0)
    group.processes["worker_1"].is_stopped = True
    assert [f.event for f in group.go_on(300)] == ["stopped_by_signal"]


def _servers(tmp_path):
    group = _Group(tmp_path, workers_per_group=2, ps_per_group=1)
    serving = dict.fromkeys(["worker_0", "worker_1", "ps_0"], progress.SERVING)
    assert not group.go_on(1, chief_0=progress.FIRST_STEP, **serving)
    assert not group.go_on(5, chief_0=progress.STEP, **serving)
    return group, serving


def test_a_stuck_server_is_found_before_its_chief_is_blamed(tmp_path):
    group, serving = _servers(tmp_path)
    del serving["worker_1"]
    assert not group.go_on(7.5, **serving)
    found = group.go_on(2, **serving)
    assert {(f.event, f.task) for f in found} == {("stuck", "worker_1")}
    # It is killed, and comes back after a while; its chief waits.
    group.processes["worker_1"].exit_code = -9
    group.watch.note_end("worker_1")
    assert not group.go_on(20, **serving)
    group.start("worker_1")
    assert not group.go_on(20, **serving)
    serving["worker_1"] = progress.SERVING
    assert not group.go_on(7, **serving)
    found = group.go_on(2, **serving)
    assert {(f.event, f.task) for f in found} == {("stuck", None)}


def test_a_chief_does_not_wait_for_a_lost_worker_for_ever(tmp_path):
    group, serving = _servers(tmp_path)
    del serving["worker_1"]
    group.processes["worker_1"].exit_code = -9
    group.watch.note_end("worker_1")
    assert not group.go_on(59, **serving)
    found = group.go_on(12, **serving)
    assert {(f.event, f.task) for f in found} == {("stuck", None)}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
