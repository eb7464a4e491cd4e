""""""

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import tfdistill
from benchmarks.punish import __main__
from benchmarks.punish import faults
from benchmarks.punish import round
from benchmarks.punish import run_view
from benchmarks.punish import watch as watch_lib
from tests.cases import tasks
from tfdistill.exchange import versions
from tfdistill.predictions import mailbox

_ROOT = pathlib.Path(__file__).resolve().parents[2]


# By how groups teach; each kind of fault once. None of those of predictions
# ends a group: catching up takes as long as the restart did.
_OF_PREDICTIONS = ("pause", *faults.MESSAGE_FAULTS)
_FAULTS = {
    "versions": tuple(n for n in faults.FAULTS if n not in _OF_PREDICTIONS),
    "predictions": _OF_PREDICTIONS,
}


@pytest.fixture
def launched(tmp_path, by):
    """Two groups that train longer than any round here."""
    workdir = tmp_path / "run"
    command = [
        *[sys.executable, "-m", "launch.local", f"--workdir={workdir}"],
        *["--num_groups=2", "--max_restarts=100"],
        *["--on_group_failure=continue", "--plain", "--"],
        *[sys.executable, "-m", "benchmarks.soak_task"],
        *["--num_steps=1000000", "--steps_per_second=10"],
        *["--backup_every_steps=20", f"--by={by}"],
    ]
    with (tmp_path / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            command, cwd=_ROOT, stdout=log, stderr=subprocess.STDOUT
        )
    yield launcher, workdir
    launcher.kill()  # Its tasks end with it.
    launcher.wait()


def _wait_for_record(launcher, workdir):
    deadline = time.monotonic() + 120
    while not (workdir / "launch.json").exists():
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(800)
@pytest.mark.parametrize("by", _FAULTS)
def test_a_run_holds_out_against_one_fault_of_each_kind(launched, by):
    launcher, workdir = launched
    _wait_for_record(launcher, workdir)
    names = _FAULTS[by]
    round_ = subprocess.run(
        [
            *[
                sys.executable,
                "-m",
                "benchmarks.punish",
                f"--workdir={workdir}",
            ],
            *["--seed=3", f"--minutes={len(names) * 3 / 60}"],
            *["--every_secs=3", "--calm_secs=2"],
            f"--faults={','.join(names)}",
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=700,
    )
    report = json.loads(round_.stdout)
    log = (workdir / "punish" / "log.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in log]
    told = f"{report}\n{round_.stderr}"
    assert not report["violations"], told
    assert round_.returncode == 0, told
    # All were injected, and had something to hit.
    assert report["by_fault"] == dict.fromkeys(sorted(names), 1), told
    assert all(entry["target"] for entry in entries), told
    assert report["versions_verified"] > 0, told
    ended = [entry for entry in entries if "recovery_secs" in entry]
    assert len(ended) == (5 if by == "versions" else 0), told
    # Backups every 20 steps; one may be left out while one is written.
    assert all(entry["redone_steps"] <= 60 for entry in ended), told
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 128 + signal.SIGTERM
    name, value = "TFDISTILL_WORKDIR", os.fspath(workdir)
    assert not list(run_view.with_variable(name, value))


def _sleeper(**env):
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; print(flush=True); time.sleep(600)",
        ],
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
    )
    # Popen returns before the kernel shows the new program's environment.
    child.stdout.readline()
    return child


@pytest.fixture
def run(tmp_path):
    """Two groups of one sleeping task each, as the launcher records them."""
    children = [_sleeper(PUNISHED=str(tmp_path)) for _ in range(2)]
    record = {
        "pids": {
            f"group_{g}_worker_0": child.pid for g, child in enumerate(children)
        },
        "topology": {
            "num_groups": 2,
            "ps_per_group": 0,
            "exchange": None,
            "env": {},
            "command": [sys.executable, "-c", "raise SystemExit(3)"],
        },
    }
    (tmp_path / "launch.json").write_text(json.dumps(record))
    (tmp_path / "punish").mkdir()
    yield run_view.RunView(str(tmp_path)), children
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


def _injection(fault="kill", group=0, draw=0.0):
    return faults.Injection(0, 0.0, fault, group, draw)


# ---- schedule ----


def _plan(seed=0, **kwargs):
    arguments = {"num_groups": 3, "duration_secs": 1800.0, "every_secs": 30.0}
    return faults.plan(tuple(faults.FAULTS), seed=seed, **arguments | kwargs)


def test_a_seed_draws_the_same_faults_again():
    assert _plan(seed=1) == _plan(seed=1)
    assert _plan(seed=1) != _plan(seed=2)


def test_a_round_has_every_fault_and_group_alike():
    plan = _plan()
    assert len(plan) == 60
    for key, count in (("fault", len(faults.FAULTS)), ("group", 3)):
        found = [getattr(injection, key) for injection in plan]
        counts = {found.count(value) for value in found}
        assert counts <= {60 // count, math.ceil(60 / count)}
    due = [injection.due_secs for injection in plan]
    assert due == sorted(due)
    assert 0.0 <= due[0] and due[-1] < 1800.0


def test_the_shortest_round_has_one_fault():
    assert len(_plan(duration_secs=1.0)) == 1


# ---- timeline ----


def test_steps_and_gaps_without_faults():
    line = round.Timeline()
    for second in range(11):
        line.see(10 * second, now=float(second))
    assert line.num_steps(0.0, 10.0) == 100
    assert line.num_steps(2.0, 4.0) == 20
    assert line.longest_gap(0.0, 10.0) == 1.0
    assert line.clear_secs(0.0, 10.0) == 10.0


def test_a_standstill_is_a_gap_to_its_end():
    line = round.Timeline()
    line.see(1, now=1.0)
    line.see(1, now=5.0)
    assert line.longest_gap(0.0, 9.0) == 8.0


def test_what_happens_under_a_fault_does_not_count():
    line = round.Timeline()
    for second in range(4):
        line.see(10 * second, now=float(second))
    span = line.begin_fault(now=3.5)
    line.see(20, now=8.0)  # It went back.
    span.end = 9.0
    line.see(40, now=10.0)
    line.see(50, now=11.0)
    assert line.clear_secs(0.0, 12.0) == 6.5
    # 0..30 before; between 20 and 40 lies the fault; 40..50 after.
    assert line.num_steps(0.0, 12.0) == 40
    assert line.longest_gap(0.0, 12.0) == 1.0


def test_an_open_fault_covers_the_rest():
    line = round.Timeline()
    line.see(1, now=0.0)
    line.begin_fault(now=1.0)
    assert line.clear_secs(0.0, 5.0) == 1.0
    assert line.longest_gap(0.0, 5.0) == 1.0


def test_faults_that_overlap_count_once():
    line = round.Timeline()
    line.begin_fault(now=1.0).end = 5.0
    line.begin_fault(now=2.0).end = 3.0
    assert line.clear_secs(0.0, 6.0) == 2.0


# ---- processes and the view ----


def test_a_process_is_told_from_its_successor(run):
    view, children = run
    found = run_view.find(children[0].pid)
    assert found.alive and not found.stopped
    other = dataclasses.replace(found, started=found.started + 1)
    assert not other.alive
    assert not other.send(signal.SIGKILL)
    assert found.send(signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while not found.stopped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found.stopped
    children[0].kill()
    children[0].wait()
    assert not found.alive
    assert run_view.find(children[0].pid) is None


def test_processes_are_found_by_a_variable(run):
    view, children = run
    found = {
        process.pid
        for process in run_view.with_variable("PUNISHED", str(view.workdir))
    }
    assert found == {child.pid for child in children}


def test_the_view_knows_tasks_chiefs_and_who_was_left_behind(run):
    view, children = run
    assert [task.name for task in view.tasks()] == [
        "group_0_worker_0",
        "group_1_worker_0",
    ]
    assert view.chief(1).process.pid == children[1].pid
    assert not view.left_behind(0.0)
    record = json.loads((view.workdir / "launch.json").read_text())
    del record["pids"]["group_0_worker_0"]
    (view.workdir / "launch.json").write_text(json.dumps(record))
    left = view.left_behind(0.1)
    assert left == {"group_0_worker_0": children[0].pid}


def test_a_view_needs_a_run_at_work(tmp_path, run):
    with pytest.raises(run_view.NoRunError, match="cannot be read"):
        run_view.RunView(str(tmp_path / "elsewhere"))
    view, children = run
    for child in children:
        child.kill()
        child.wait()
    with pytest.raises(run_view.NoRunError, match="is alive"):
        run_view.RunView(str(view.workdir))


# ---- faults ----


def _inject(view, fault, **kwargs):
    inject, _ = faults.FAULTS[fault]
    return inject(view, _injection(fault, **kwargs))


def test_kill_and_term_end_the_task(run):
    view, children = run
    killed = _inject(view, "kill")
    assert killed.target == "group_0_worker_0" and killed.ends_group
    assert children[0].wait(20) == -signal.SIGKILL
    ended = _inject(view, "term", group=1)
    assert ended.target == "group_1_worker_0" and not ended.violation
    assert children[1].wait(20) == -signal.SIGTERM
    assert not _inject(view, "kill").target  # Nobody is left.


def test_a_frozen_task_that_nobody_ends_is_a_violation(run, monkeypatch):
    monkeypatch.setattr(faults, "FROZEN_LIMIT_SECS", 0.2)
    view, children = run
    outcome = _inject(view, "stop")
    assert "frozen" in outcome.violation
    assert not run_view.find(children[0].pid).stopped  # It was woken up.


def test_a_full_disk_is_lifted_again(run, monkeypatch):
    import resource

    monkeypatch.setattr(faults, "_DISK_FULL_SECS", 0.0)
    view, children = run
    before = resource.prlimit(children[0].pid, resource.RLIMIT_FSIZE)
    assert _inject(view, "disk_full").target == "group_0_worker_0"
    assert before == resource.prlimit(children[0].pid, resource.RLIMIT_FSIZE)


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_a_launcher_restarts_a_group_while_its_disk_is_full(tmp_path):
    code = "connect(); time.sleep(600)"
    topology = tasks.topology(tmp_path, code, max_restarts=1)
    command = [sys.executable, "-m", "tfdistill.launcher.command"]
    command += [f"--workdir={topology.workdir}", "--max_restarts=1", "--"]
    launcher = subprocess.Popen([*command, *topology.command], cwd=_ROOT)
    try:
        _wait_for_record(launcher, pathlib.Path(topology.workdir))
        view = run_view.RunView(topology.workdir)
        (task,) = view.tasks()
        outcome = _inject(view, "launcher_disk")
        assert outcome.target == task.name and outcome.ends_group
        assert not outcome.violation
        assert not task.process.alive and launcher.poll() is None
        # The quota is gone: the launcher's record is up to date again.
        tasks.until(lambda: [t for t in view.tasks() if t != task])
    finally:
        launcher.terminate()
        launcher.wait(tasks.LIMIT_SECS)


def test_a_second_group_must_fail(run):
    view, _ = run
    assert not _inject(view, "duplicate").violation
    view.topology["command"] = [sys.executable, "-c", "pass"]
    assert "all were well" in _inject(view, "duplicate").violation


def _publish(view, group, step, text="values"):
    def write(directory):
        pathlib.Path(directory, "saved_model.pb").write_text("graph")
        pathlib.Path(directory, "values").write_text(text)

    exchange = tfdistill.Exchange(view.exchange, key=None)
    return exchange.publish(write, group=group, step=step)


@pytest.mark.parametrize("draw", [n / 15 + 0.01 for n in range(15)])
def test_a_damaged_version_is_damaged_and_known_as_such(run, draw):
    view, _ = run
    version = _publish(view, 0, 25)
    outcome = _inject(view, "corrupt", draw=draw)
    assert outcome.damaged == (0, 25)
    exchange = tfdistill.Exchange(view.exchange, key=None)
    broken = (versions.CorruptVersionError, versions.VersionNotFoundError)
    with pytest.raises(broken):
        exchange.verify(exchange.open(0, 25))
    assert version.step == 25


class _Mailbox:
    """A worker's mailbox, and the peer that it listens to."""

    def __init__(self, view):
        self.exchange = tfdistill.Exchange(view.exchange, key=view.key)
        self.own, self.peer = (
            mailbox.Mailbox(
                self.exchange,
                mailbox.Place(
                    group=group, worker=0, replicas=(0,), host="127.0.0.1"
                ),
                peers=[1 - group],
                wait_secs=0.0,
            )
            for group in range(2)
        )

    def __enter__(self):
        for box in (self.own, self.peer):
            box.start()
        known = self.own.peer(1)
        tasks.until(lambda: known.stream and self.peer.peer(0).stream)
        return known

    def __exit__(self, *error):
        self.own.stop()
        self.peer.stop()


@pytest.mark.parametrize("fault", faults.MESSAGE_FAULTS)
def test_bad_messages_reach_a_mailbox_and_are_refused(run, fault, monkeypatch):
    monkeypatch.setattr(faults, "_MESSAGES_SECS", 0.3)
    view, _ = run
    assert not _inject(view, fault).target  # It has no mailbox yet.
    _log(view, 0, {"step": 7})
    mailbox = _Mailbox(view)
    with mailbox as known:
        outcome = _inject(view, fault)
        assert outcome.target.startswith("group_0_worker_0")
        assert not outcome.violation
        found = [
            mailbox.own.answers(
                mailbox.own.send(
                    step=step,
                    replica=0,
                    batch=b"ourbatch",
                    classes=[10],
                    arrays=[np.zeros([64, 10], "float32")],
                )
            )
            for step in range(7, 47)
        ]
        refused = sum(known.num_refused.values()) + sum(
            mailbox.own.num_forged.values()
        )
        assert bool(refused) == outcome.refused
    assert found == [[None]] * 40


# ---- what must hold ----


def _watched(view):
    watch = watch_lib.Watch(view)
    watch.look_at_versions()
    return watch


def _log(view, group, *records):
    path = view.group_dir(group) / "metrics.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        for record in records:
            line = {"time": time.time(), **record}
            file.write(json.dumps(line) + "\n")


def test_good_versions_and_logs_are_no_violation(run):
    view, _ = run
    watch = _watched(view)
    for step in (25, 50):
        _publish(view, 1, step)
    watch.look_at_versions()
    teachers = [{"name": "group_1", "step": 50}]
    _log(
        view,
        0,
        {"step": 0, "event": "start"},
        {"step": 60, "loss": 0.5, "teachers": teachers},
        {"step": 40, "event": "start"},
        {"step": 70, "loss": 0.5},
    )
    assert len(list(watch.look_at_logs())) == 4
    watch.check_teachers()
    assert not watch.violations
    assert watch.num_versions == 2


def test_a_log_that_is_rewritten_is_not_read_twice(run):
    view, _ = run
    watch = _watched(view)
    _log(view, 0, {"step": 5}, {"step": 9})
    assert len(list(watch.look_at_logs())) == 2
    path = view.group_dir(0) / "metrics.jsonl"
    first, _ = path.read_text().splitlines()
    path.with_name("new").write_text(first + "\n")
    path.with_name("new").replace(path)
    _log(view, 0, {"step": 5, "event": "start"})
    assert [r for _, r in watch.look_at_logs()][0]["event"] == "start"
    assert not watch.violations


def _note_mixes(view, name, *mixes):
    path = view.group_dir(0) / "backup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": s, "versions": v}) for s, v in mixes]
    path.write_text("\n".join([*lines, '{"step": 99, "ver']))


@pytest.mark.parametrize(
    "chief, worker, told",
    [
        # The mix of step 20 was repeated; that of 30 is not noted by all yet.
        ([(10, 5), (20, 8), (20, 8), (30, 9)], [(10, 5), (20, 8)], None),
        ([(10, 5), (20, 5)], [(10, 5), (20, 5)], "version 5 of group 1 again"),
        ([(10, 5), (20, 8)], [(10, 5), (20, 7)], "mixed .* at step 20"),
        ([(10, 5), (20, 8)], [(20, 8)], "mixed .*None.* at step 10"),
        ([(40, 5), (50, 8)], [(50, 8)], None),
    ],
)
def test_mixes_by_one_worker_only_and_twice_are_told(run, chief, worker, told):
    view, _ = run
    watch = _watched(view)
    for name, mixes in (
        ("mixes.jsonl", chief),
        ("mixes_worker_1.jsonl", worker),
    ):
        _note_mixes(view, name, *((step, {"1": v}) for step, v in mixes))
    watch.check_mixes(0, [40])
    assert watch.num_mixes == len({step for step, _ in chief})
    if told is None:
        assert not watch.violations
    else:
        assert re.search(told, watch.violations[0])


def test_a_broken_version_that_nobody_damaged_is_told(run):
    view, _ = run
    watch = _watched(view)
    version = _publish(view, 0, 25)
    pathlib.Path(version.path, "values").write_text("torn")
    watch.look_at_versions()
    assert "a broken version is visible" in watch.violations[0]


def test_a_version_that_was_damaged_on_purpose_is_not_told(run):
    view, _ = run
    watch = _watched(view)
    version = _publish(view, 0, 25)
    pathlib.Path(version.path, "values").write_text("torn")
    watch.damaged(0, 25)
    watch.look_at_versions()
    assert not watch.violations


def test_versions_that_go_backwards_are_told(run):
    view, _ = run
    watch = _watched(view)
    _publish(view, 0, 50)
    watch.look_at_versions()
    pathlib.Path(view.exchange, "group_0", "25").mkdir()
    _publish(view, 0, 25)
    watch.look_at_versions()
    assert "appeared after 50" in watch.violations[0]


def test_two_publishers_of_one_group_are_told(run):
    view, _ = run
    watch = _watched(view)
    first = tfdistill.Exchange(view.exchange, key=None)
    second = tfdistill.Exchange(view.exchange, key=None)

    def write(directory):
        pathlib.Path(directory, "values").write_text("x")

    for step, exchange in ((1, first), (2, second), (3, first)):
        exchange.publish(write, group=0, step=step)
        watch.look_at_versions()
    assert "two publishers" in watch.violations[0]


_PEER = {
    "name": "group_1",
    "step": 8,
    "num_answers": 5,
    "num_quarantined": 2,
    "num_forged": 1,
}


def test_refusals_and_answers_of_peers_are_followed(run):
    view, _ = run
    watch = _watched(view)
    assert watch.num_refused(0) == 0 and watch.num_answers(0) is None
    _log(view, 0, {"step": 9, "teachers": [_PEER]}, {"step": 10})
    list(watch.look_at_logs())
    watch.check_teachers()
    assert watch.num_refused(0) == 3 and watch.num_answers(0) == [5]
    assert not watch.violations


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([{"step": 5, "loss": None}], "loss None"),
        ([{"step": 5}, {"step": 4}], "logged step 4 after 5"),
        ([{"loss": 1.0}], "logged no step"),
        (
            [{"step": 9, "teachers": [{"name": "group_1", "step": 7}]}],
            "nobody has seen",
        ),
        (
            [{"step": 9, "teachers": [{**_PEER, "step": 10}]}],
            "an answer of step 10 at step 9",
        ),
    ],
)
def test_wrong_logs_are_told(run, records, told):
    view, _ = run
    watch = _watched(view)
    _log(view, 0, *records)
    list(watch.look_at_logs())
    watch.check_teachers()
    assert told in watch.violations[0]


def test_learning_from_a_version_after_its_damage_is_told(run, monkeypatch):
    monkeypatch.setattr(watch_lib, "_DAMAGE_GRACE_SECS", -1.0)
    view, _ = run
    watch = _watched(view)
    _publish(view, 1, 25)
    watch.look_at_versions()
    watch.damaged(1, 25)
    teachers = [{"name": "group_1", "step": 25}]
    _log(view, 0, {"step": 30, "teachers": teachers})
    list(watch.look_at_logs())
    watch.check_teachers()
    assert "after it was damaged" in watch.violations[0]


# ---- the command ----


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--faults=kill,fire"], "received fire"),
        (["--minutes=0"], "--minutes must be > 0"),
        ([], "cannot be read"),
    ],
)
def test_wrong_options_are_told(tmp_path, capsys, options, told):
    with pytest.raises(SystemExit) as end:
        __main__.main([f"--workdir={tmp_path}", *options])
    assert end.value.code == 2
    assert told in capsys.readouterr().err
