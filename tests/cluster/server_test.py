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
    assert signs.found_port_taken(ready_path)


OPEN, REFUSED, SILENT = processes.Answer
AWAITED, THERE, LATE, GONE = server.Presence


def _verdicts(coordinator, *probes):
    return [coordinator.note(answer, now=now) for answer, now in probes]


def test_a_coordinator_that_was_there_is_gone_after_refusing_on_end():
    coordinator = server.CoordinatorPresence(limit_secs=10.0, now=0.0)
    assert _verdicts(
        coordinator, (REFUSED, 0), (SILENT, 5), (OPEN, 9), (REFUSED, 10)
    ) == [AWAITED, AWAITED, THERE, THERE]
    # One that is back in between is served on.
    assert (
        _verdicts(
            coordinator,
            (REFUSED, 12.9),
            (OPEN, 13),
            (REFUSED, 14),
            (REFUSED, 16.9),
        )
        == [THERE] * 4
    )
    assert coordinator.note(REFUSED, now=17.0) is GONE


def test_silence_is_borne_for_longer_than_refusal():
    coordinator = server.CoordinatorPresence(limit_secs=10.0, now=0.0)
    assert _verdicts(
        coordinator, (OPEN, 1), (SILENT, 2), (SILENT, 61.9), (SILENT, 62)
    ) == [THERE, THERE, THERE, GONE]


def test_a_coordinator_that_never_came_is_late():
    coordinator = server.CoordinatorPresence(limit_secs=10.0, now=100.0)
    assert _verdicts(
        coordinator, (REFUSED, 100), (REFUSED, 110), (SILENT, 110.1)
    ) == [AWAITED, AWAITED, LATE]
    coordinator = server.CoordinatorPresence(limit_secs=0.0, now=0.0)
    assert coordinator.note(REFUSED, now=1e9) is AWAITED


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(200)
@pytest.mark.usefixtures("no_process_left")
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
        code = process.wait(150)
    said = process.text()
    assert code == 75, said
    assert f"ps:0 waited 1 s for chief:0 at {chief}, which refuses" in said
    assert "returned" not in said
