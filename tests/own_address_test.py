"""Tests of how a task says that its address is in use."""

import errno

import pytest
import tensorflow as tf

from tfdistill import cluster as cluster_lib
from tfdistill import own_address
from tfdistill import startup

CLUSTER = cluster_lib.Cluster(
    task_index=1, spec={"worker": ("a:1", "127.0.0.1:2")}
)


@pytest.fixture
def ready_path(tmp_path, monkeypatch):
    path = tmp_path / "ready"
    monkeypatch.setenv(startup.VARIABLE, str(path))
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
        with own_address.in_use_is_told(CLUSTER):
            raise error
    assert startup.found_port_taken(ready_path)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "Permission denied"),
        tf.errors.UnknownError(None, None, "something else"),
    ],
)
def test_other_errors_are_left_alone(ready_path, error):
    with pytest.raises(type(error)) as raised:
        with own_address.in_use_is_told(CLUSTER):
            raise error
    assert raised.value is error
    assert not startup.found_port_taken(ready_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
