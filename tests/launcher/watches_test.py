"""Tests of what finds late, frozen and stuck tasks; times are invented."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tests.cases import free_ports
from tfdistill.cluster import signs
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster
from tfdistill.launcher import watches
from tfdistill.system import processes


def test_time_asleep_counts_one_second_at_most(tmp_path):
    group = _Group(tmp_path, start_timeout_secs=3)
    for _ in range(2):
        group.sleep(30)
        assert not group.go_on(0.25)
    assert group.go_on(1)


def test_the_late_are_named_once(tmp_path, monkeypatch):
    group = _Group(tmp_path, workers_per_group=2, start_timeout_secs=10)
    monkeypatch.setenv(signs.VARIABLE, str(group.ready["worker_0"]))
    signs.announce(signs.STARTING)
    assert not group.go_on(9)
    (late,) = group.go_on(20)
    assert late.event == "late" and late.task is None
    assert late.reason.startswith("worker_1 did not start within 10 s")

    group = _Group(tmp_path, start_timeout_secs=10)
    signs.announce(signs.STARTING)
    (late,) = group.go_on(11)
    assert "worker_0 started but did not connect" in late.reason
    group = _Group(tmp_path, start_timeout_secs=10)
    signs.announce(signs.READY)
    assert not group.go_on(9)
    files.forget_progress(group.ready["worker_0"])  # It is started again.
    assert not group.go_on(9)


def test_tasks_that_meet_by_themselves_are_neither_late_nor_apart(tmp_path):
    """As by a MultiWorkerMirroredStrategy that the script itself makes."""
    fields = {"workers_per_group": 2, "start_timeout_secs": 10}
    ports = free_ports.find(2)
    group = _Group(tmp_path, ports=ports, **fields)
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(processes.listener(port))
        assert not group.go_on(1)
    assert not group.go_on(20)
    assert group.watch.never_met() is None
    group = _Group(tmp_path, ports=ports, **fields)
    assert not group.go_on(1)
    assert "each task trained on its own" in group.watch.never_met()


class _Task:
    """A task under watch that takes given times."""

    def __init__(self, stuck_secs=8.0):
        self.watch = watches.ProgressLimit(stuck_secs=stuck_secs)
        self.now = 50.0
        self._count = 0

    def do(self, phase, secs, *, times=1):
        """Enters a phase and is silent in it for a while."""
        for _ in range(times):
            self._count += 1
            self.watch.note(signs.Line(phase, self._count), now=self.now)
            self.now += secs

    def limit(self, phase):
        self.do(phase, 0.0)
        return self.watch.limit_secs()


def test_the_limit_follows_slow_steps_both_ways():
    task = _Task()
    task.do(signs.FIRST_STEP, 1.0)
    task.do(signs.STEP, 2.0)
    assert task.limit(signs.STEP) == 20.0
    # Five times the load is not yet a hang, and counts from then on.
    task.do(signs.STEP, 10.0)
    assert not task.watch.is_stuck(now=task.now)
    assert task.limit(signs.STEP) == 100.0
    task.do(signs.STEP, 0.5, times=600)
    assert task.limit(signs.STEP) == 8.0


@pytest.mark.parametrize("phase", [signs.CALLBACKS, signs.EPOCH_END])
def test_callbacks_may_always_take_long(phase):
    task = _Task()
    task.do(signs.STEP, 0.1, times=3)
    task.do(phase, 0.01, times=100)
    assert task.limit(phase) == 600.0
    task.do(phase, 300.0)
    assert task.limit(phase) == 3000.0
    assert task.limit(signs.STEP) == 8.0


def test_an_excused_silence_neither_counts_nor_lengthens_the_limit():
    task = _Task()
    task.do(signs.STEP, 0.1, times=3)
    task.do(signs.STEP, 500.0)
    task.watch.excuse(now=task.now)
    assert not task.watch.is_stuck(now=task.now + 7.0)
    assert task.watch.is_stuck(now=task.now + 9.0)
    task.do(signs.STEP, 0.1)
    assert task.limit(signs.STEP) == 8.0


class _Group:
    """A group of invented tasks and an invented clock."""

    def __init__(self, tmp_path, *, ports=None, **fields):
        topology = local_cluster.LocalCluster(
            command=(sys.executable, "-c", "pass"),
            workdir=str(tmp_path),
            **fields,
        )
        ports = ports or range(1, topology.ports_per_group + 1)
        tasks = topology.group_tasks(0, ports)
        self._now = 0.0
        self.watch = watches.TaskWatch(
            {_short(task.name): task for task in tasks},
            topology=topology,
            clock=lambda: self._now,
        )
        self.running = {}
        topology.logs_dir.joinpath("ready").mkdir(parents=True, exist_ok=True)
        self.ready = {_short(task.name): task.ready_path for task in tasks}
        self.reporters = {}
        for name in self.ready:
            self.start(name)

    def start(self, name):
        files.forget_progress(self.ready[name])
        self.running[name] = None
        self.reporters[name] = signs.Reporter(
            {signs.VARIABLE: str(self.ready[name])}
        )

    def sleep(self, secs):
        self._now += secs

    def go_on(self, secs, **phases):
        """Lets time pass while some tasks report; returns what was found."""
        found = []
        for _ in range(round(secs * 4)):
            for name, phase in phases.items():
                self.reporters[name].say(phase)
            self._now += 0.25
            found += self.watch.look(self.running)
        self.doomed = {one.task: one.reason for one in found}
        return found


def _short(name):
    return name.removeprefix("group_0_")


def _workers(tmp_path, **fields):
    fields = {"start_timeout_secs": 0} | fields
    group = _Group(tmp_path, workers_per_group=2, **fields)
    first, step = signs.FIRST_STEP, signs.STEP
    assert not group.go_on(1, worker_0=first, worker_1=first)
    assert not group.go_on(5, worker_0=step, worker_1=step)
    return group


def test_a_group_whose_steps_stop_is_stuck_as_a_whole(tmp_path):
    group = _workers(tmp_path)
    assert not group.go_on(7.5)
    found = group.go_on(1)[0]
    assert (found.event, found.task) == ("stuck", None)
    assert found.details["phase"] == signs.STEP
    assert 8.0 < found.details["silent_secs"] < 9.0
    text = group.doomed[None]
    assert "worker_0 8." in text and "worker_1 8." in text


@pytest.mark.parametrize(
    "phase", [signs.CALLBACKS, signs.EPOCH_END, signs.IDLE]
)
def test_workers_may_wait_for_one_that_saves(tmp_path, phase):
    group = _workers(tmp_path)
    group.reporters["worker_0"].say(phase)
    assert not group.go_on(300)
    # Nor does this wait lengthen what is allowed later.
    assert not group.go_on(2, worker_0=signs.STEP, worker_1=signs.STEP)
    assert group.go_on(9)


def test_a_frozen_task_is_found_in_any_phase_but_not_a_short_stop(tmp_path):
    group = _workers(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as process:
        group.running["worker_1"] = process.pid
        try:
            for is_long in (False, True):
                process.send_signal(signal.SIGSTOP)
                # Until the kernel has done so.
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                found = group.go_on(
                    2.0 if is_long else 1.25, worker_0=signs.CALLBACKS
                )
                assert [(one.event, one.task) for one in found[:1]] == (
                    [("frozen", "worker_1")] if is_long else []
                )
                process.send_signal(signal.SIGCONT)
                os.waitid(os.P_PID, process.pid, os.WCONTINUED)
                group.go_on(0.5, worker_0=signs.CALLBACKS)
        finally:
            process.kill()


def _servers(tmp_path):
    group = _Group(
        tmp_path, workers_per_group=2, ps_per_group=1, start_timeout_secs=0
    )
    serving = dict.fromkeys(["worker_0", "worker_1", "ps_0"], signs.SERVING)
    assert not group.go_on(1, chief_0=signs.FIRST_STEP, **serving)
    assert not group.go_on(5, chief_0=signs.STEP, **serving)
    return group, serving


def test_a_stuck_server_is_found_before_its_chief_is_blamed(tmp_path):
    group, serving = _servers(tmp_path)
    del serving["worker_1"]
    assert not group.go_on(7.5, **serving)
    assert group.go_on(2, **serving)
    assert set(group.doomed) == {"worker_1"}
    # It is killed, and comes back after a while; its chief waits.
    del group.running["worker_1"]
    group.watch.note_end("worker_1")
    assert not group.go_on(20, **serving)
    group.start("worker_1")
    assert not group.go_on(20, **serving)
    serving["worker_1"] = signs.SERVING
    assert not group.go_on(7, **serving)
    assert group.go_on(2, **serving)
    assert set(group.doomed) == {None}


def test_a_chief_does_not_wait_for_a_lost_worker_for_ever(tmp_path):
    group, serving = _servers(tmp_path)
    del serving["worker_1"]
    del group.running["worker_1"]
    group.watch.note_end("worker_1")
    assert not group.go_on(59, **serving)
    assert group.go_on(12, **serving)
    assert set(group.doomed) == {None}
