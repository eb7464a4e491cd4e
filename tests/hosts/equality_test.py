"""What one process finds, tasks on hosts of their own do, by slow links."""

import json
import pathlib

import numpy as np
import pytest

from tests.hosts import tasks
from tests.programs import commands

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
_SCRIPT = pathlib.Path(__file__).parents[1] / "programs" / "ordinary.py"
# A line between two cities: 5 ms there and back.
_FAR = {"delay_secs": 0.0025}


def _shorter(directory):
    """Writes the script, which trains for fewer epochs, into a directory."""
    text = _SCRIPT.read_text()
    assert "epochs=30" in text
    path = directory / "train.py"
    path.write_text(text.replace("epochs=30", "epochs=6"))
    return path


def _found(directory):
    paths = directory.glob("found_*.json")
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script finds in one process, by plain Keras."""
    directory = tmp_path_factory.mktemp("alone")
    command = commands.of(str(_shorter(directory)), cwd=directory)
    assert commands.Process(command, directory / "log").wait() == 0
    return _found(directory)[0]


def _check(found, alone):
    assert found.keys() == alone.keys()
    for name in found.keys() - {"asked"}:
        for one, other in zip(
            *map(_leaves, (found[name], alone[name])), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def _leaves(value):
    return list(value.values()) if isinstance(value, dict) else [value]


@pytest.mark.parametrize(
    ("address", "link"),
    [
        pytest.param(lambda host: host.name, _FAR, id="names"),
        pytest.param(
            lambda host: f"[{host.ipv6}]",
            _FAR | {"loss": 0.01},
            id="ipv6_with_loss",
        ),
    ],
)
def test_two_workers_find_what_one_process_does(
    hosts, alone, tmp_path, address, link
):
    hosts.link(**link)
    group = [(host, address(host)) for host in hosts.hosts[:2]]
    started = tasks.start(
        _shorter(tmp_path), {"worker": group}, tmp_path / "run"
    )
    for task in started:
        task.check()
    found = _found(tmp_path)
    assert len(found) == 2
    for one in found:
        _check(one, alone)
    assert hosts.num_bytes()[0, 1] > 100_000  # They had the network between.
