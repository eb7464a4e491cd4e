"""Tests of how a task of Slurm finds out who it is, and how it runs."""

import contextlib
import json
import os
import re
import signal
import stat
import subprocess
import sys
import uuid

import psutil
import pytest

from tests.cases import tasks
from tfdistill.cluster import identity
from tfdistill.slurm import job
from tfdistill.slurm import place
from tfdistill.slurm import task as slurm_task


def _environ(**changes):
    """What Slurm sets for the second task on the first of two nodes."""
    return {
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "40",
        "SLURM_LOCALID": "1",
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURMD_NODENAME": "node01",
    } | changes


def _place(nodes=("node01", "node02"), **changes):
    return place.Place.from_env(_environ(**changes), nodes=nodes)


def _topology(tmp_path, **fields):
    fields = {"workdir": str(tmp_path)} | fields
    return job.Step(num_groups=2, ports="20000-29999", **fields)


def _of_rank(rank, counts, nodes):
    """What Slurm sets for one of the tasks that are laid out node by node."""
    placed = [
        (n, i) for n, c in zip(nodes, counts, strict=True) for i in range(c)
    ]
    node, local_rank = placed[rank]
    return {
        "SLURM_LOCALID": str(local_rank),
        "SLURM_PROCID": str(rank),
        "SLURMD_NODENAME": node,
    }


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2,1", [2, 1]),
        ("1(x3)", [1, 1, 1]),
        ("2(x2),1,4(x2)", [2, 2, 1, 4, 4]),
    ],
)
def test_every_task_finds_its_place_and_all_find_the_same(text, counts):
    nodes = [f"node{n:02}" for n in range(1, len(counts) + 1)]
    hosts = [n for n, c in zip(nodes, counts, strict=True) for _ in range(c)]
    found = set()
    for rank in range(sum(counts)):
        layout = {"SLURM_STEP_TASKS_PER_NODE": text}
        place = _place(nodes, **layout, **_of_rank(rank, counts, nodes))
        assert place.rank == rank
        assert place.hosts == tuple(hosts)
        found.add(tuple(place.addresses()))
    assert len(found) == 1, "the tasks disagree on their addresses"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_ARRAY_TASK_ID": ""}, "SLURM_ARRAY_TASK_ID must be set"),
        # As with --distribution=cyclic.
        ({"SLURMD_NODENAME": "node02"}, "leave --distribution=block"),
    ],
)
def test_what_contradicts_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        _place(**changes)


def test_groups_and_starts_on_one_node_have_ports_of_their_own():
    taken = {}
    for job_id in range(100, 140):
        for step_id in range(4):
            ids = {"SLURM_JOB_ID": str(job_id), "SLURM_STEP_ID": str(step_id)}
            ports = [
                int(address.partition(":")[2])
                for address in _place(**ids).addresses((20000, 30000))
            ]
            assert ports == sorted(set(ports))
            assert 20000 <= min(ports) <= max(ports) < 30000
            taken[job_id, step_id] = set(ports)
    for step_id in range(4):
        at_once = [taken[job_id, step_id] for job_id in range(100, 140)]
        assert sum(map(len, at_once)) == len(set().union(*at_once))
        assert not taken[100, 0] & taken[100, step_id] or step_id == 0
    # A federation's number of a job.
    assert _place(SLURM_JOB_ID="4227858434").addresses((1024, 1027)) == [
        "node01:1024",
        "node01:1025",
        "node02:1026",
    ]
    with pytest.raises(ValueError, match="at least 3 ports"):
        _place().addresses((1024, 1026))


def test_a_task_is_told_who_it_is(tmp_path):
    topology = _topology(tmp_path, workers_per_group=3)
    place = _place()
    task = slurm_task.find_task(topology, place)
    inherited = {"PATH": "/bin", "TFDISTILL_GROUP": "0", "TF_CONFIG": "{}"}
    env = slurm_task.environment(task, place, inherited)
    assert json.loads(env["TF_CONFIG"]) == {
        "cluster": {"worker": place.addresses((20000, 30000))},
        "task": {"type": "worker", "index": 1},
    }
    assert env["TFDISTILL_GROUP"] == "1"
    assert env["TFDISTILL_NUM_GROUPS"] == "2"
    assert env["TFDISTILL_EXCHANGE"] == str(tmp_path / "exchange")
    assert env["TFDISTILL_WORKDIR"] == str(tmp_path)
    assert env["TFDISTILL_EXCHANGE_KEY_FILE"] == str(tmp_path / "exchange.key")
    assert env["PATH"] == "/bin"
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert identity.Cluster.from_env(env) == task.cluster
    assert task.log_path == tmp_path / "logs" / "group_1_worker_1.log"


def test_another_number_of_tasks_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Leave --ntasks to the script.$"):
        slurm_task.find_task(_topology(tmp_path, workers_per_group=2), _place())


def test_parameter_servers_come_last_and_nobody_evaluates(tmp_path):
    topology = _topology(tmp_path, workers_per_group=2, ps_per_group=2)
    counts, nodes = [3, 2], ["node01", "node02"]
    names = []
    for rank in range(5):
        layout = {"SLURM_STEP_TASKS_PER_NODE": "3,2"}
        place = _place(nodes, **layout, **_of_rank(rank, counts, nodes))
        task = slurm_task.find_task(topology, place)
        names.append(task.cluster.task_name)
        assert task.cluster.address == place.addresses((20000, 30000))[rank]
        assert set(task.cluster.spec) == {"chief", "worker", "ps"}
    assert names == ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1"]


@pytest.mark.parametrize(
    ("shown", "local_rank", "num_gpus", "own"),
    [
        ("0,1,2,3", 3, 1, "3"),
        ("4,5,6,7", 1, 2, "6,7"),
        # Slurm has bound the task to its own already.
        ("0", 3, 1, "0"),
    ],
)
def test_each_worker_sees_its_own_gpus(shown, local_rank, num_gpus, own):
    found = place.visible_gpus(
        {"CUDA_VISIBLE_DEVICES": shown},
        local_rank=local_rank,
        num_gpus=num_gpus,
    )
    assert found == own


@pytest.fixture
def kept_signals():
    """Undoes that `run` leaves signals to its command."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    earlier = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in earlier.items():
        signal.signal(number, handler)


@pytest.mark.multiprocess
@pytest.mark.usefixtures("kept_signals", "no_process_left")
def test_the_end_of_a_command_is_passed_on(tmp_path):
    topology = _topology(tmp_path, workers_per_group=3)
    place = _place(["localhost", "node02"], SLURMD_NODENAME="localhost")
    task = slurm_task.find_task(topology, place)
    env = slurm_task.environment(task, place, {"PATH": "/usr/bin:/bin"})
    for script, code in (
        ("echo first", 0),
        ("exit 65", 65),
        ("kill -KILL $$", 128 + 9),
        # The command takes signals as ever.
        ("kill -TERM $$", 128 + 15),
    ):
        assert slurm_task.run(["sh", "-c", script], task, place, env) == code
    log = task.log_path.read_text()
    assert log.count("job 40, step 0 on localhost =====") == 4
    assert "\nfirst\n" in log


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
def test_the_first_failure_of_a_step_counts(tmp_path):
    failure_file = tmp_path / "failed"
    for name, code, first in (("a", 65, True), ("b", 75, False)):
        assert slurm_task.record_failure(failure_file, name, code) == first
    record = {"task": "a", "exit_code": 65, "told": False}
    assert json.loads(failure_file.read_text()) == record
    assert stat.S_IMODE(failure_file.stat().st_mode) == 0o644

    # A wrong environment is no reason to try again either.
    failure_file.unlink()
    done = subprocess.run(
        [
            *[sys.executable, "-m", "tfdistill.slurm.task"],
            *["--workdir=run", "--nodes=n", f"--failure_file={failure_file}"],
            *["--", "sh", "-c", "true"],
        ],
        env={"PATH": "/usr/bin:/bin", "SLURM_PROCID": "3"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "SLURM_STEP_TASKS_PER_NODE must be set" in done.stderr
    record = {"task": "rank 3", "exit_code": 2, "told": False}
    assert json.loads(failure_file.read_text()) == record


# Notes signals, and ends with the code that a test writes into a file.
TASK = """
import os, pathlib, signal, time
def say(*words):
    os.write(1, f"{' '.join(map(str, words))}\\n".encode())
def note(number, frame):
    say("got", signal.Signals(number).name)
for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), note)
group, rank = os.environ["TFDISTILL_GROUP"], os.environ["SLURM_PROCID"]
say("pid", os.getpid(), *os.sched_getaffinity(0))
end = pathlib.Path(os.environ["TFDISTILL_WORKDIR"], f"end_{rank}")
while not end.exists():
    time.sleep(0.02)
raise SystemExit(int(end.read_text()))
"""


class Step:
    """The two tasks of a step on the first of two nodes."""

    def __init__(self, workdir):
        self.workdir = workdir
        self.preload = "json"
        # Its name is that of the step: one more run may be under way.
        self.failure_file = workdir / f"{uuid.uuid4().hex}.failed"
        self.processes = {}

    def start(self, rank, cores=()):
        ids = {"SLURM_LOCALID": str(rank), "SLURM_PROCID": str(rank)}
        with self.errors(rank).open("wb") as errors:
            self.processes[rank] = psutil.Popen(
                [
                    *[sys.executable, "-m", "tfdistill.slurm.task"],
                    *["--nodes=node01,node02", "--num_groups=2"],
                    *["--workers_per_group=3", f"--preload={self.preload}"],
                    f"--workdir={self.workdir}",
                    f"--failure_file={self.failure_file}",
                    *["--", sys.executable, "-c", TASK],
                ],
                env=os.environ | _environ(**ids),
                stderr=errors,
            )
        self.processes[rank].cpu_affinity(cores)

    def errors(self, rank):
        return self.workdir / f"stderr_{rank}"

    def log(self, rank):
        path = self.workdir / "logs" / f"group_1_worker_{rank}.log"
        return path.read_text() if path.exists() else ""

    def task(self, rank):
        """Waits for the command of a rank: its process, and its cores."""
        line = re.compile(r"^pid (.*)\n", re.MULTILINE)
        found = tasks.until(lambda: line.search(self.log(rank)))
        pid, *cores = found[1].split()
        return psutil.Process(int(pid)), {int(core) for core in cores}

    def wait(self, rank, code=None):
        if code is not None:
            draft = self.workdir / f"draft_{rank}"
            draft.write_text(str(code))
            draft.rename(self.workdir / f"end_{rank}")  # Never seen empty.
        return self.processes[rank].wait(tasks.LIMIT_SECS)

    def signal(self, number):
        """Signals every process of the step, as Slurm does."""
        for process in self.processes.values():
            for found in [process, *process.children(recursive=True)]:
                found.send_signal(number)

    def got(self, rank):
        lines = self.log(rank).splitlines()
        return [line for line in lines if line.startswith("got ")]


@pytest.fixture
def step(tmp_path, monkeypatch, no_process_left):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    made = Step(tmp_path)
    yield made
    for process in made.processes.values():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        process.wait()


@pytest.mark.multiprocess
def test_the_tasks_of_a_node_are_forks_of_one_parent(step):
    cores = sorted(os.sched_getaffinity(0))[-1:]
    step.start(1, cores)
    step.start(0)
    found = [step.task(rank) for rank in (0, 1)]
    parent, other = (task.parent().parent() for task, _ in found)
    assert parent == other
    assert parent.parent() == step.processes[0]
    assert found[0][1] == os.sched_getaffinity(0)
    assert found[1][1] == set(cores)
    said = "which has imported json"
    tasks.until(lambda: said in step.errors(0).read_text())

    # The commands get them once, and nobody else minds.
    step.signal(signal.SIGUSR1)
    tasks.until(lambda: step.got(0) and step.got(1))
    step.signal(signal.SIGTERM)
    tasks.until(lambda: step.got(0)[1:] and step.got(1)[1:])
    for rank in (0, 1):
        assert step.got(rank) == ["got SIGUSR1", "got SIGTERM"]
    assert parent.is_running()

    parent.kill()
    assert step.wait(0, 0) == 0
    assert step.wait(1, 65) == 65
    assert json.loads(step.failure_file.read_text())["exit_code"] == 65


@pytest.mark.multiprocess
def test_a_task_does_not_notice_the_end_of_the_others(step):
    for rank in (0, 1):
        step.start(rank)
    (first, _), (second, _) = step.task(0), step.task(1)
    parent = first.parent().parent()
    step.processes[0].kill()
    psutil.wait_procs([first, parent], timeout=tasks.LIMIT_SECS)
    assert not first.is_running() and not parent.is_running()
    second.kill()
    assert step.wait(1) == 128 + 9


@pytest.mark.multiprocess
def test_without_a_parent_commands_are_started_as_ever(step):
    (step.workdir / "own.py").write_text("import os; os.kill(os.getpid(), 9)")
    step.preload = "own"
    for rank in (0, 1):
        step.start(rank)
    for rank in (0, 1):
        assert step.task(rank)[0].parent() == step.processes[rank]
        assert step.wait(rank, 0) == 0
    assert "with -9" in step.errors(0).read_text()
