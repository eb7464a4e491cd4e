"""Tests of how a task says that its address is in use."""

import errno
import json

import pytest
import tensorflow as tf

from tests.cases import free_ports
from tests.programs import commands
from tfdistill.cluster import identity
from tfdistill.cluster import server
from tfdistill.cluster import signs
from tfdistill.system import processes

CLUSTER = identity.Cluster(
    task_index=1, spec={"worker": ("a:1", "127.0.0.1:2")}
)


@pytest.fixture
def ready_path(tmp_path, monkeypatch):
    path = tmp_path / "ready"
    monkeypatch.setenv(signs.VARIABLE, str(path))
    return path


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EADDRINUSE, "Address already in use"),
        tf.errors.UnknownError(None, None, "Could not start gRPC server"),
    ],
)
def test_the_launcher_and_the_user_are_told(ready_path, error):
    with pytest.raises(RuntimeError, match=r"worker:1 cannot .*127\.0\.0\.1:2"):
        with server.port_in_use_explained(CLUSTER):
            raise error
    assert signs.found(ready_path, signs.PORT_TAKEN)


OPEN, REFUSED, SILENT, UNKNOWN = processes.Answer


def _over(limit_secs, *probes):
    """Whether it is over after each answer, at its time."""
    presence = server.Presence(limit_secs=limit_secs, now=0.0)
    return [presence.is_over(answer, now=now) for answer, now in probes]


def test_a_coordinator_that_was_there_is_gone_after_refusing_on_end():
    assert _over(
        10.0,
        *((REFUSED, 0), (SILENT, 5), (OPEN, 9), (REFUSED, 11.9)),
        # One that is back in between is served on.
        *((OPEN, 12), (REFUSED, 14.9), (REFUSED, 15)),
    ) == [False] * 6 + [True]


def test_silence_is_borne_for_longer_than_refusal():
    probes = (OPEN, 1), (SILENT, 2), (SILENT, 12.9), (SILENT, 13)
    assert _over(10.0, *probes) == [False, False, False, True]


def test_a_coordinator_that_never_came_is_late():
    assert _over(10.0, (REFUSED, 0), (UNKNOWN, 10)) == [False, True]
    assert _over(0.0, (REFUSED, 1e9)) == [False]


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.slow("TensorFlow takes so long to give up")
def test_a_server_without_a_coordinator_says_so_and_may_be_tried_again(
    tmp_path,
):
    chief, worker, ps = free_ports.addresses(3)
    config = {
        "cluster": {"chief": [chief], "worker": [worker], "ps": [ps]},
        "task": {"type": "ps", "index": 0},
    }
    with commands.starting(tmp_path) as start:
        process = start(
            "-c",
            "import tfdistill; tfdistill.make_strategy(); print('returned')",
            TF_CONFIG=json.dumps(config),
            TFDISTILL_START_TIMEOUT_SECS="1",
        )
        code = process.wait()
    said = process.text()
    assert code == 75, said
    assert f"ps:0 waits for chief:0 at {chief}, 1 s at most. It refuses" in said
    assert f"ps:0 waited 1 s for chief:0 at {chief}, which refuses" in said
    assert "returned" not in said
