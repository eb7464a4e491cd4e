"""Tests of the description of a local run: tasks, environments and ports."""

import json
import os
import sys

import pytest

from tfdistill.cluster import identity
from tfdistill.launcher import files
from tfdistill.launcher import local_cluster

COMMAND = (sys.executable, "-c", "pass")


def _topology(tmp_path, **fields):
    fields = {"command": COMMAND, "workdir": str(tmp_path)} | fields
    return local_cluster.LocalCluster(**fields)


def test_tasks_of_two_groups_of_two_workers(tmp_path):
    topology = _topology(tmp_path, num_groups=2, workers_per_group=2)
    assert topology.ports_per_group == 2
    ports = [[11, 12], [13, 14]]
    groups = [topology.group_tasks(g, ports[g]) for g in (0, 1)]
    assert [[task.name for task in tasks] for tasks in groups] == [
        ["group_0_worker_0", "group_0_worker_1"],
        ["group_1_worker_0", "group_1_worker_1"],
    ]
    task = groups[1][0]
    assert json.loads(task.env["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:13", "127.0.0.1:14"]},
        "task": {"type": "worker", "index": 0},
    }
    assert task.log_path == tmp_path / "logs" / "group_1_worker_0.log"
    assert task.ready_path == tmp_path / "logs" / "ready" / "1_worker_0"
    for tasks in groups:
        for task in tasks:
            environ = task.environ({"PATH": "/bin"})
            assert environ["PATH"] == "/bin"
            assert identity.Cluster.from_env(environ) == task.cluster
            assert environ["TFDISTILL_EXCHANGE"] == str(tmp_path / "exchange")
            assert environ["TFDISTILL_READY_FILE"] == str(task.ready_path)


def test_identity_of_the_launcher_itself_is_not_inherited(tmp_path):
    topology = _topology(tmp_path, env={"MINE": "1"})
    (task,) = topology.group_tasks(0, [])
    environ = task.environ(
        {"TF_CONFIG": "x", "TFDISTILL_GROUP": "7", "TFDISTILL_DATA": "/d"}
    )
    assert "TF_CONFIG" not in environ
    assert environ["TFDISTILL_GROUP"] == "0"
    assert environ["TFDISTILL_DATA"] == "/d"
    assert environ["MINE"] == "1"
    with pytest.raises(ValueError, match="TFDISTILL_DATUM.*TFDISTILL_DATA"):
        task.environ({"TFDISTILL_DATUM": "/d"})


def test_trackers_get_one_run_a_group_with_the_group_as_a_tag(tmp_path):
    topology = _topology(tmp_path, workers_per_group=2, env={"WANDB_TAGS": "a"})
    chief, worker = topology.group_tasks(0, [1, 2])
    environ = chief.environ({"WANDB_MODE": "offline"})
    assert environ["WANDB_MODE"] == "offline"
    assert environ["WANDB_RUN_GROUP"] == os.path.basename(topology.workdir)
    assert environ["WANDB_TAGS"] == "a"  # The user's.
    assert environ["COMET_START_EXPERIMENT_TAGS"] == "group_0"
    context = json.loads(environ["MLFLOW_RUN_CONTEXT"])
    assert context == {"tfdistill.group": "group_0"}
    environ = chief.environ({"MLFLOW_RUN_CONTEXT": "{}"})
    assert environ["MLFLOW_RUN_CONTEXT"] == "{}"
    environ = worker.environ({"WANDB_MODE": "offline"})
    assert environ["WANDB_MODE"] == "disabled"
    assert environ["COMET_AUTO_LOG_DISABLE"] == "true"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"num_groups": 0}, "`num_groups` must be >= 1; received 0"),
        ({"num_groups": "2"}, "`num_groups` must be a whole .*; rec.* '2'"),
        ({"start": "thread"}, "`start` must be one of .*; rec.* 'thread'"),
        ({"max_restarts": True}, "`max_restarts` must be a whole number"),
        ({"stuck_secs": "8"}, "`stuck_secs` must be a number; received '8'"),
        ({"exchange": 1}, "`exchange` must be a string or None; received 1"),
        ({"command": ["python", 3]}, "`command` must be a list"),
        ({"command": "python x.py"}, "`command` must be a list"),
        ({"env": {"A": None}}, "`env` must be .*; received {'A': None}"),
        ({"workdir": "gs://b/x"}, "URL may be given as `exchange`"),
    ],
)
def test_wrong_fields(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        _topology(tmp_path, **fields)


def test_files_of_an_earlier_run_are_kept(tmp_path):
    topology = _topology(tmp_path)
    logs = tmp_path / "logs"
    with files.lock(topology):
        assert files.make_room(topology) == []
        for run in ("first", "second"):
            (logs / "group_0_worker_0.log").write_text(run)
            (logs / "ready" / "0_worker_0").touch()
            files.write_record(topology)
            kept = files.make_room(topology)
            assert len(kept) == 2
            assert not (logs / "ready" / "0_worker_0").exists()
    assert (logs / "group_0_worker_0.1.log").read_text() == "first"
    assert (logs / "group_0_worker_0.2.log").read_text() == "second"
    record = json.loads((tmp_path / "launch.2.json").read_text())
    assert record["topology"]["command"] == list(COMMAND)


def test_two_launchers_do_not_share_a_workdir(tmp_path):
    topology = _topology(tmp_path)
    with files.lock(topology):
        with pytest.raises(ValueError, match="in use by another launcher"):
            files.lock(topology)
    files.lock(topology).close()


def test_the_end_of_a_log_is_quoted_without_the_noise_of_tensorflow(tmp_path):
    path = tmp_path / "group_0_worker_0.log"
    noise = (
        "WARNING: All log messages before absl::InitializeLog() is called are\n"
        "E0000 00:00:17.148151   20 cuda_platform.cc:52] failed call\n"
        "I0000 00:00:17.138020   29 grpc_server_lib.cc:467] Started server\n"
        "2026-11-25 07:40:58.1: I tensorflow/core/util/port.cc:153] oneDNN on\n"
        "To enable the following instructions: AVX2 FMA, rebuild TensorFlow\n"
    )
    own = "W1125 07:40:11.1  12 model.py:30] No teacher"
    path.write_text("x\n" * 9 + noise + f"{own}\n" + noise + "y\n" * 18)
    assert files.quote(path)[1:] == ["x", own, *"y" * 18, "---"]
    path.unlink()
    assert files.quote(path)[1:] == ["---"]
