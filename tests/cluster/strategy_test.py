"""Strategies of one task, and what cannot be made into one."""

import pytest
import tensorflow as tf

import tfdistill
from tests.cases import free_ports
from tfdistill.cluster import identity
from tfdistill.cluster import rendezvous
from tfdistill.cluster import strategy


def test_one_task_on_one_device_uses_the_default_strategy(monkeypatch):
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda device: None
    )
    # TensorFlow's runtime does not begin for it: a script may configure that.
    monkeypatch.delattr(tf.config, "list_logical_devices")
    made = tfdistill.make_strategy(identity.Cluster())
    assert made is tf.distribute.get_strategy()


def test_a_strategy_knows_its_cluster_and_others_ask_the_environment(
    monkeypatch, two_replicas
):
    monkeypatch.setenv("TFDISTILL_GROUP", "1")
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "4")
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda device: None
    )
    cluster = identity.Cluster(group=2, num_groups=3, exchange="/hub")
    made = tfdistill.make_strategy(cluster)
    assert strategy.cluster_of(made) is cluster
    assert strategy.cluster_of(two_replicas).group == 1


def test_groups_that_nothing_connects_are_refused():
    """They would train alone, and end as if nothing were wrong."""
    with pytest.raises(ValueError, match="2 groups.*TFDISTILL_EXCHANGE or"):
        tfdistill.make_strategy(identity.Cluster(group=0, num_groups=2))


def test_a_missing_worker_is_named_and_the_exit_code_says_retry(
    capsys, monkeypatch
):
    monkeypatch.setenv("TFDISTILL_START_TIMEOUT_SECS", "1")
    cluster = identity.Cluster(spec={"worker": free_ports.addresses(2)})
    with pytest.raises(SystemExit) as ended:
        tfdistill.make_strategy(cluster)
    assert ended.value.code == 75
    assert "worker:0 waited 1 s for worker:1" in capsys.readouterr().err


def test_a_late_call_says_where_it_belongs(monkeypatch):
    tf.ones([])
    # Alone, but past the meeting: what is late is TensorFlow.
    monkeypatch.setattr(rendezvous, "meet", lambda *_, **__: None)
    cluster = identity.Cluster(spec={"worker": free_ports.addresses(2)})
    with pytest.raises(
        RuntimeError, match="must come before any other use of TensorFlow"
    ):
        tfdistill.make_strategy(cluster)
