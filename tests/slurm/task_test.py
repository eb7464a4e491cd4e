"""Tests of how a task of Slurm finds out who it is, and how it runs."""

import json
import signal
import stat
import subprocess
import sys

import pytest

from tfdistill.cluster import identity
from tfdistill.slurm import job
from tfdistill.slurm import task as slurm_task


def _environ(**changes):
    """What Slurm sets for the second task on the first of two nodes."""
    return {
        "SLURM_ARRAY_TASK_ID": "1",
        "SLURM_JOB_ID": "40",
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2,1",
        "SLURMD_NODENAME": "node01",
    } | changes


def _place(nodes=("node01", "node02"), **changes):
    return slurm_task.Place.from_env(_environ(**changes), nodes=nodes)


def _topology(tmp_path, **fields):
    fields = {"workdir": str(tmp_path)} | fields
    return job.Step(num_groups=2, ports="20000-29999", **fields)


def _of_rank(rank, counts, nodes):
    """What Slurm sets for one of the tasks that are laid out node by node."""
    placed = [
        (n, i) for n, c in zip(nodes, counts, strict=True) for i in range(c)
    ]
    node, _ = placed[rank]
    return {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": node}


@pytest.mark.parametrize(
    ("text", "counts"),
    [("2,1", [2, 1]), ("1(x3)", [1, 1, 1]), ("2(x2),1,4(x2)", [2, 2, 1, 4, 4])],
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
        found.add(tuple(place.addresses((20000, 30000))))
    assert len(found) == 1, "the tasks disagree on their addresses"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_ARRAY_TASK_ID": ""}, "SLURM_ARRAY_TASK_ID must be set"),
        # As with --distribution=cyclic, or fewer nodes than the job has.
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
    env = task.environ(inherited)
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


@pytest.fixture
def kept_signals():
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
    env = task.environ({"PATH": "/usr/bin:/bin"})
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
        failure = {"task": name, "exit_code": code}
        assert slurm_task.record_failure(failure_file, **failure) == first
    record = {"task": "a", "exit_code": 65, "told": False}
    assert json.loads(failure_file.read_text()) == record
    assert stat.S_IMODE(failure_file.stat().st_mode) == 0o644

    # A wrong environment is no reason to try again either.
    failure_file.unlink()
    told = {"step": {"workdir": "run"}, "nodes": ["n"]}
    told["failure_file"] = str(failure_file)
    done = subprocess.run(
        [
            *[sys.executable, "-m", "tfdistill.slurm.task"],
            *[json.dumps(told), "sh", "-c", "true"],
        ],
        env={"PATH": "/usr/bin:/bin", "SLURM_PROCID": "3"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "SLURM_STEP_TASKS_PER_NODE must be set" in done.stderr
    record = {"task": "rank 3", "exit_code": 2, "told": False}
    assert json.loads(failure_file.read_text()) == record
