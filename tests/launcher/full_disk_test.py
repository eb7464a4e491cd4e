"""A launcher whose own disk is full: its run goes on."""

import contextlib
import os
import pathlib
import resource
import signal
import subprocess
import sys

import psutil
import pytest

from tests.cases import tasks
from tests.cases import tiers
from tests.cases import waits
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.status import run_events

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Until the test says so, which it does on another disk.
CODE = """
connect()
while not os.path.exists(os.environ["END"]):
    signs.own().say(signs.STEP)
    time.sleep(0.05)
"""


@contextlib.contextmanager
def _launched(
    workdir, *options, code=CODE, stdout=subprocess.PIPE, preexec_fn=None, **env
):
    command = [sys.executable, "-m", "launch.local", *options]
    command += [f"--workdir={workdir}", "--preload=json", "--"]
    command += tasks.command(code)
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        env=os.environ | env,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=preexec_fn,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _limited(launcher):
    """Lets the launcher, and what it starts, write a few bytes to a file."""
    limit = resource.RLIMIT_FSIZE
    before = resource.prlimit(launcher.pid, limit)
    resource.prlimit(launcher.pid, limit, (16, before[1]))
    yield
    resource.prlimit(launcher.pid, limit, before)


def _tasks(launcher, group):
    """The process ids of a group; its events may be out of date."""
    found = set()
    for keeper in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if keeper.environ().get("TFDISTILL_GROUP") == str(group):
                found |= {task.pid for task in keeper.children()}
    return found


def test_a_full_disk_stops_neither_the_launcher_nor_its_restarts(tmp_path):
    workdir, end = tmp_path / "run", tmp_path / "end"
    options = ["--num_groups=2", "--max_restarts=3", "--start=spawn"]
    with _launched(workdir, *options, END=str(end)) as launcher:
        waits.until((workdir / "launch.json").exists)
        with _limited(launcher):
            before = set()
            for _ in range(3):
                waits.until(lambda: _tasks(launcher, 0) - before)
                (pid,) = _tasks(launcher, 0)
                before.add(pid)
                if len(before) < 3:
                    os.kill(pid, signal.SIGKILL)
        end.touch()
        out, _ = launcher.communicate()
        assert launcher.returncode == 0, out
        assert "group 0: done, restarts 2" in out
        assert out.count("warning: the launcher cannot write to") == 1
        assert "Traceback" not in out
        # Once there was room again, what happened was written again.
        events = run_events.read(workdir / "logs" / run_events.NAME)
        assert events[-1]["event"] == "end"


# The log is full twice: once there is room again, and once to the end.
PRINTING = """
import resource, sys
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in 0, most, 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    print("room" if limit else "full", flush=True)
    print("an error", file=sys.stderr)
print("not flushed")
"""


_CALL = "import tfdistill; tfdistill.make_strategy()"


# A fork may print whenever it likes, and a new program after this call.
@pytest.mark.parametrize(
    ("start", "begin"), [("fork", ""), tiers.deep("spawn", _CALL)]
)
def test_what_a_task_prints_on_a_full_disk_is_lost_and_no_more(
    tmp_path, start, begin
):
    topology = local_cluster.LocalCluster(
        command=commands.of("-c", begin + PRINTING),
        workdir=str(tmp_path),
        start=start,
        preload="json",
    )
    assert tasks.run(topology).exit_code == 0
    log = (tmp_path / "logs" / "group_0_worker_0.log").read_text()
    assert log.count("room\n") == log.count("an error\n") == 1
    assert "full\n" not in log


def test_a_run_on_a_full_disk_is_refused(tmp_path):
    workdir = tmp_path / "run"
    with _launched(workdir, code="pass", preexec_fn=_no_room) as launcher:
        out, _ = launcher.communicate()
    assert launcher.returncode == 2, out
    assert "error: `workdir` must be a directory that can be written to" in out


def _no_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
