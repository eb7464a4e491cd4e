"""One ordinary Keras script: on two workers, and in two groups."""

import json
import math
import pathlib

import numpy as np
import pytest

from tests.programs import commands

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
# It is run, never imported: it trains at once.
_SCRIPT = pathlib.Path(__file__).parents[1] / "programs" / "ordinary.py"
_FILES = {"best.keras", "log.csv", "trained.weights.h5"}


def _found(directory):
    paths = directory.glob("found_*.json")
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the script finds in one process, by plain Keras."""
    directory = tmp_path_factory.mktemp("alone")
    command = commands.of(str(_SCRIPT), cwd=directory)
    assert commands.Process(command, directory / "log").wait() == 0
    return _found(directory)[0]


@pytest.fixture(scope="module")
def in_groups(tmp_path_factory):
    """Where two groups of one worker have trained the script."""
    directory = tmp_path_factory.mktemp("in_groups")
    commands.launched(
        *(directory / "run", "tfdistill", "--every-steps=4"),
        *("--distillation-weight=1", _SCRIPT),
        cwd=directory,
        num_groups=2,
    )
    return directory


@pytest.mark.usefixtures("no_process_left")
def test_two_workers_find_what_one_process_does(alone, tmp_path):
    commands.launched(
        *(tmp_path / "run", "tfdistill", _SCRIPT),
        cwd=tmp_path,
        workers_per_group=2,
    )
    workers = _found(tmp_path)
    assert len(workers) == 2
    chief, other = sorted(workers, key=lambda found: not found["asked"])
    assert other["asked"] == []
    other["asked"] = chief["asked"]
    for found in workers:
        assert found.keys() == alone.keys()
        assert found["history"].keys() == alone["history"].keys()
        for name in found["history"]:
            np.testing.assert_allclose(
                found["history"][name],
                alone["history"][name],
                rtol=1e-4,
                atol=1e-5,
            )
        for name in found.keys() - {"history"}:
            np.testing.assert_allclose(
                found[name], alone[name], rtol=1e-4, atol=1e-5
            )


def test_groups_differ_and_learn_from_each_other(in_groups):
    groups = _found(in_groups)
    assert len(groups) == 2
    first, second = (found["first"] for found in groups)
    assert not np.allclose(first[3], second[3])  # Of the first layer.
    for found in groups:
        staleness = found["history"]["teacher_staleness"]
        assert any(map(math.isfinite, staleness))
        assert found["logged"] == found["history"]["loss"]  # A file of its own.


def test_each_group_has_its_own_files(in_groups):
    own = in_groups / "run" / "group_1" / "files"
    assert {path.name for path in own.iterdir()} == _FILES
    for name in _FILES:
        ours, theirs = own / name, in_groups / name
        assert ours.read_bytes() != theirs.read_bytes()
