"""Strategies of one task, and what cannot be made into one."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf

import tfdistill
from tests.cases import free_ports
from tfdistill.cluster import identity
from tfdistill.cluster import server
from tfdistill.cluster import strategy


def test_one_task_on_one_device_uses_the_default_strategy(monkeypatch):
    one = [tf.config.list_logical_devices("CPU")[0]]
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind: one if kind == "CPU" else [],
    )
    made = tfdistill.make_strategy(identity.Cluster())
    assert made is tf.distribute.get_strategy()


def test_a_strategy_knows_its_cluster_and_others_ask_the_environment(
    monkeypatch, two_replicas
):
    monkeypatch.setenv("TFDISTILL_GROUP", "1")
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "4")
    one = [tf.config.list_logical_devices("CPU")[0]]
    monkeypatch.setattr(
        tf.config,
        "list_logical_devices",
        lambda kind: one if kind == "CPU" else [],
    )
    cluster = identity.Cluster(group=2, num_groups=3)
    made = tfdistill.make_strategy(cluster)
    assert strategy.cluster_of(made) is cluster
    assert strategy.cluster_of(two_replicas).group == 1


@pytest.mark.parametrize("task_type", ["worker", "ps"])
def test_workers_and_ps_of_a_coordinator_serve(monkeypatch, task_type):
    class EndError(Exception):
        pass

    def serve(cluster, *, limit_secs):
        raise EndError(cluster.task_name, limit_secs)

    monkeypatch.setattr(server, "serve", serve)
    cluster = identity.Cluster(
        task_type=task_type,
        spec={"chief": ("a:1",), "worker": ("b:1",), "ps": ("c:1",)},
    )
    with pytest.raises(EndError) as caught:
        tfdistill.make_strategy(cluster, start_timeout_secs=7)
    assert caught.value.args == (f"{task_type}:0", 7)


def _run(code, env):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _two_workers():
    config = {
        "cluster": {"worker": free_ports.addresses(2)},
        "task": {"type": "worker", "index": 0},
    }
    return {"TF_CONFIG": json.dumps(config)}


@pytest.mark.multiprocess
def test_a_missing_worker_is_named_and_the_exit_code_says_retry():
    env = _two_workers()
    result = _run(
        "import tfdistill; tfdistill.make_strategy()",
        {**env, "TFDISTILL_START_TIMEOUT_SECS": "4"},
    )
    assert result.returncode == 75, result.stderr
    assert "worker:0 waited 4 s for worker:1" in result.stderr


@pytest.mark.multiprocess
def test_a_late_call_says_where_it_belongs():
    env = _two_workers()
    # Alone, but past the meeting: what is late is TensorFlow.
    result = _run(
        "import tensorflow as tf; tf.ones([])\n"
        "import tfdistill; from tfdistill import rendezvous\n"
        "rendezvous.meet = lambda **_: None\n"
        "tfdistill.make_strategy()",
        env,
    )
    assert result.returncode == 1
    assert "must come before any other use of TensorFlow" in result.stderr


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
