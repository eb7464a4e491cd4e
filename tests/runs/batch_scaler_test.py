"""A group of two workers that changes its batch size, as real processes."""

import json

import numpy as np
import pytest

from tests.programs import batch_sizes as program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(200)]


def _by_hand(sizes):
    """Descent on batches of these sizes, with rates in proportion."""
    weight = bias = 0.0
    first = 0
    for size in sizes:
        x = np.arange(first, first + size, dtype="float64")
        rate = program.RATE * size / program.FIRST
        error = weight * x + bias - x / 100
        weight -= rate * 2 * np.mean(error * x)
        bias -= rate * 2 * np.mean(error)
        first += size
    return weight, bias


@pytest.mark.usefixtures("no_process_left")
def test_both_workers_change_the_size_at_the_same_step(tmp_path):
    topology = local_cluster.LocalCluster(
        command=commands.of(program, tmp_path),
        workdir=str(tmp_path / "run"),
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=150)
    assert result.exit_code == 0, result.groups
    # Decided after five steps, for those after ten.
    sizes = [program.FIRST] * 10 + [program.SECOND] * 10
    for worker in range(2):
        notes = json.loads((tmp_path / f"notes_{worker}.json").read_text())
        assert notes["sizes"] == sizes
        np.testing.assert_allclose(notes["weights"], _by_hand(sizes), rtol=1e-4)
