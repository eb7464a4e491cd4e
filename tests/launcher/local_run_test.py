"""Tests of whole runs through the launcher, with tasks that are no trainers."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cases import tasks
from tests.cases import waits
from tfdistill.commands import run as cli
from tfdistill.launcher import local_run
from tfdistill.status import observed_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
# Of programs that import no TensorFlow, and never meet.
NO_TRAINER = ("--start=spawn", "--start-timeout-secs=0")
HANG = "time.sleep(600)\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def _family_pids(tmp_path, num_tasks):
    """The pids that tasks running `family()` have written to their logs."""

    def find():
        logs = (tmp_path / "run" / "logs").glob("group_*.log")
        lines = [line for log in logs for line in log.read_text().splitlines()]
        found = [line.split()[1:] for line in lines if line.startswith("pids")]
        return found if len(found) == num_tasks else None

    return [int(pid) for pids in waits.until(find) for pid in pids]


def test_all_tasks_share_a_key_that_is_written_nowhere_else(
    tmp_path, monkeypatch
):
    code = (
        "from tfdistill.exchange import signing\n"
        "signer = signing.signer_for('environment')\n"
        "print(len(signer._key), sorted(signing.VARIABLES & set(os.environ)))"
    )
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    topology = tasks.topology(tmp_path, code, num_groups=2)
    for _ in range(2):  # A second run in the directory keeps the key.
        assert tasks.run(topology).exit_code == 0
        key = (tmp_path / "run" / "exchange.key").read_text().strip()
    assert len(key) == 64
    log = (tmp_path / "run" / "logs" / "group_1_worker_0.log").read_text()
    assert "64 ['TFDISTILL_EXCHANGE_KEY_FILE']" in log
    holders = [
        path.name
        for path in (tmp_path / "run").rglob("*")
        if path.is_file() and key.encode() in path.read_bytes()
    ]
    assert holders == ["exchange.key"]


def test_the_users_own_key_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDISTILL_EXCHANGE_KEY", "0123456789abcdef")
    topology = tasks.topology(
        tmp_path,
        "print([n for n in sorted(os.environ) if 'EXCHANGE_KEY' in n])",
    )
    assert tasks.run(topology).exit_code == 0
    log = (tmp_path / "run" / "logs" / "group_0_worker_0.log").read_text()
    assert log.strip() == "['TFDISTILL_EXCHANGE_KEY']"
    assert not (tmp_path / "run" / "exchange.key").exists()
    record = (tmp_path / "run" / "launch.json").read_text()
    assert "0123456789abcdef" not in record
    monkeypatch.setenv("TFDISTILL_EXCHANGE_KEY", "short")
    for _ in range(2):  # The directory is not left locked.
        with pytest.raises(ValueError, match="16 to 4096 bytes; received 5"):
            local_run.LocalRun(topology)


def test_failure_stops_its_group_and_the_others(tmp_path):
    # The peer of the failed task fails when told to stop: it is not to blame.
    task = f"""
if (GROUP, INDEX) == (0, 1):
    print("\\n".join(f"line {{i}}" for i in range(50)), flush=True)
    raise SystemExit(65)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
{HANG}"""
    topology = tasks.topology(tmp_path, task, num_groups=2, workers_per_group=2)
    result = tasks.run(topology)
    failed, other = result.groups
    assert result.exit_code == 65
    assert (failed.state, failed.failed_task) == ("failed", "group_0_worker_1")
    assert failed.reason == "group_0_worker_1 ended with exit code 65"
    assert failed.last_lines == tuple(f"line {i}" for i in range(30, 50))
    assert failed.exit_codes["group_0_worker_0"] != 0
    assert (other.state, other.failed_task) == ("stopped", None)
    assert other.reason.startswith("group 0 failed; use --on-group-failure=c")
    assert other.last_lines == ()


def test_task_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path):
    task = f"""{DEAF}
if INDEX == 1:
    wait_for("deaf")
    sys.exit(4)
(WORKDIR / "deaf").touch()
{HANG}"""
    result = tasks.run(
        tasks.topology(tmp_path, task, workers_per_group=2, grace_secs=0.5)
    )
    assert result.exit_code == 4
    assert result.groups[0].exit_codes == {
        "group_0_worker_0": -signal.SIGKILL,
        "group_0_worker_1": 4,
    }


def test_a_dead_worker_of_a_chief_is_started_again(tmp_path, capsys):
    # Worker 1 dies twice, by exit and by signal; the chief ends at its third
    # start, which is the last one it has.
    task = f"""
connect()
if TYPE == "worker" and INDEX == 1:
    num_starts = len(list(WORKDIR.glob("start_*")))
    port = int(CONFIG["cluster"]["worker"][1].rpartition(":")[2])
    import socket
    with socket.create_server(("127.0.0.1", port)) as server:
        (WORKDIR / f"start_{{num_starts}}").touch()
        print(f"start {{num_starts}} at {{port}}", flush=True)
        if num_starts == 0:
            sys.exit(0)
        if num_starts == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        {HANG}
if TYPE == "chief":
    wait_for("start_2")
    sys.exit(0)
{HANG}"""
    topology = tasks.topology(
        tmp_path, task, workers_per_group=2, ps_per_group=1, worker_restarts=2
    )
    with tasks.shown(topology) as run:
        result = tasks.end(run)
    (group,) = result.groups
    assert (result.exit_code, group.state, group.reason) == (0, "done", "")
    assert group.restarts == {"group_0_worker_0": 0, "group_0_worker_1": 2}
    # The servers never end: they are ended when their chief is done.
    assert group.exit_codes["group_0_chief_0"] == 0
    assert all(
        code for name, code in group.exit_codes.items() if "chief" not in name
    )
    lines = (topology.logs_dir / "group_0_worker_1.log").read_text().split("\n")
    port = lines[0].rpartition(" ")[2]
    assert lines[:3] == [f"start {n} at {port}" for n in range(3)]
    out = capsys.readouterr().out
    name = "group 0: group_0_worker_1"
    assert f"{name} ended with exit code 0; restart 1 of 2 in 1 s" in out
    assert f"{name} was ended by signal 9 (SIGKILL); restart 2 of 2 in 2" in out


def test_wrong_environment_is_refused_before_any_start(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDISTILL_GRUOP", "1")
    with pytest.raises(ValueError, match="TFDISTILL_GRUOP is not"):
        local_run.LocalRun(tasks.topology(tmp_path, "pass"))
    assert not (tmp_path / "run").exists()


@pytest.fixture
def launcher(tmp_path):
    started = []

    def start(code, *options):
        command = [sys.executable, "-m", "launch.local", *options]
        command += [f"--workdir={tmp_path / 'run'}", "--start=spawn"]
        command += ["--", *tasks.command(code)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:  # Closes its pipe, and waits.
            process.kill()


def test_interrupted_launcher_stops_everything(tmp_path, launcher):
    process = launcher("family()\n" + HANG, "--num_groups=2")
    pids = _family_pids(tmp_path, 2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 143
    assert not any(tasks.alive(pid) for pid in pids)
    assert "group 1 stopped: the launcher received SIGTERM" in out


def test_second_interrupt_kills_at_once(tmp_path, launcher):
    process = launcher(DEAF + "family()\n" + HANG, "--grace_secs=600")
    pids = _family_pids(tmp_path, 1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None and tasks.alive(pids[0])
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert not any(tasks.alive(pid) for pid in pids)


def test_runs_are_numbered_and_the_last_one_can_be_resumed(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("import sys; print(sys.argv[1:])\n")
    for arguments in (["--num-groups=2"], ["--resume"], []):
        caplog.clear()
        given = [*arguments, *NO_TRAINER, "a.py", "--x", "b.py"]
        assert cli.main(given) == 0
        is_told = "last_run has no backup in group_*/backup" in caplog.text
        assert is_told == (arguments == ["--resume"])
    log = tmp_path / "runs" / "1" / "logs" / "group_0_worker_0.log"
    assert log.read_text() == "['--x', 'b.py']\n"
    for group in range(2):
        assert len([*log.parent.glob(f"group_{group}_worker_0*log")]) == 2
    assert (tmp_path / "last_run").resolve().name == "2"
    # TensorBoard, which follows links, finds each run once there.
    assert sorted(os.listdir("runs")) == ["1", "2"]
    (tmp_path / "last_run").unlink()
    (tmp_path / "last_run").write_text("A user's own.")
    assert cli.main([*NO_TRAINER, "a.py"]) == 0
    assert (tmp_path / "last_run").read_text() == "A user's own."


# A training that a backup resumes at its last step.
RESUMED = f"""
import json, os, pathlib, sys, time
sys.path.insert(0, {os.getcwd()!r})
from tfdistill.status import goodput
place = pathlib.Path(os.environ["TFDISTILL_WORKDIR"], "group_0")
for name in ("backup", "tensorboard"):
    (place / name).mkdir(parents=True, exist_ok=True)
marks, metrics = goodput.Marks(place), place / "metrics.jsonl"
first = 50 if metrics.exists() else 0
marks.resume(first, None)
for step in range(first, 50):
    marks.see(step + 1)
    time.sleep(0.01)
marks.end(50)
line = dict(step=50, time=time.time(), val_auc=0.75, loss=9.0, published=40)
metrics.write_text(json.dumps(line) + chr(10))
if sys.argv[2:]:
    raise ValueError("odd")
"""


def test_a_run_ends_with_a_result_and_a_finished_one_says_so(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text(RESUMED)
    assert cli.main([*NO_TRAINER, "a.py", "--x"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "groups: 1 done after 0:0" in out
    assert "group state step val_auc goodput time" in out
    assert " 0 done 50 0.7500 " in out
    assert "results runs/1/results.json logs runs/1/logs" in out
    assert "students runs/1/exchange/group_0/40" in out
    assert "TensorBoard tensorboard --logdir runs/1" in out
    assert cli.main(["--resume", *NO_TRAINER, "a.py", "--x"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "finished at step 50 on 20" in out
    command = f"tfdistill run {' '.join(NO_TRAINER)}"
    again = f"to start a new run: {command} a.py --x"
    assert f"nothing was trained; {again}" in out
    arguments = ["--workdir", "runs/1", *NO_TRAINER, "a.py", "--x", "fails"]
    assert cli.main(arguments) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "failed group 0: group_0_worker_0: ValueError: odd" in out
    resume = f"{command} --resume --workdir=runs/1"
    assert f"next resume the run: {resume} a.py --x fails" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--num-groups=0 -- true", "must be >= 1; received 0"),
        ("--num_groups=2 my_train.py", "there is no script my_train.py"),
        ("--num-groups=2", "expected a script such as my_train.py"),
        ("--resume -- true", "there is no run to resume in last_run"),
        ("--workdir=W --workers=2 -- true", "unknown arguments: --workers=2"),
        ("--workdir=W python my.py", "Pass a script without `python`"),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, refused, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(cli.main, *arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_never_met_is_told_of(tmp_path, capsys):
    code = """
if GROUP == 0:
    connect()
"""
    topology = tasks.topology(tmp_path, code, num_groups=2, workers_per_group=2)
    assert tasks.run(topology).exit_code == 0
    out = capsys.readouterr().out
    assert "group 0: no task has called" not in out
    unused = "no task called tfdistill.make_strategy"
    assert f"group 1: {unused}" in out
    # And whoever looks at the run from elsewhere, or later.
    seen = observed_run.ObservedRun(topology.workdir).look()
    assert [len(status.warnings) for status in seen.groups] == [0, 1]
    assert seen.groups[1].warnings[0].startswith(unused)
