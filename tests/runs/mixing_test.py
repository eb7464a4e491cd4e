"""Groups of several workers that mix their weights, as real processes."""

import json

import numpy as np
import pytest

from tests.cases import codistillation as cases
from tests.programs import commands
from tests.programs import mixing as program
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(200)]


@pytest.mark.usefixtures("no_process_left")
def test_two_groups_of_two_workers_are_one_worker(tmp_path):
    topology = local_cluster.LocalCluster(
        command=commands.of(program, tmp_path),
        workdir=str(tmp_path / "run"),
        num_groups=2,
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=150)
    assert result.exit_code == 0, result.groups
    alone = cases.codistill(cases.deep(0))
    x, y = cases.data(32)
    cases.fit(
        alone,
        x,
        y,
        batch_size=8,
        epochs=program.NUM_EPOCHS,
        callbacks=[],
    )
    num_mixes = 4 * program.NUM_EPOCHS
    for path in sorted(tmp_path.glob("notes_*.json")):
        notes = json.loads(path.read_text())
        for found, expected in zip(
            notes["weights"], alone.get_weights(), strict=True
        ):
            np.testing.assert_allclose(found, expected, atol=1e-6)
        assert notes["totals"]["mixes"] == num_mixes
        assert notes["totals"]["skipped"] == 0
        assert list(notes["totals"]["versions"].values()) == [num_mixes]
    assert len(list(tmp_path.glob("notes_*.json"))) == 4
