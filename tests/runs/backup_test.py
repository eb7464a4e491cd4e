"""Tasks that are killed without notice, and groups that go on after that."""

import numpy as np
import pytest

from tests.cases import backup as backup_cases
from tests.programs import backup as backup_program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(500),
    pytest.mark.usefixtures("no_process_left"),
]


def _launch(what, directory, num_workers):
    topology = local_cluster.LocalCluster(
        command=commands.of(backup_program, what, directory),
        workdir=str(directory / f"run_{what}"),
        workers_per_group=num_workers,
    )
    with local_run.LocalRun(topology) as run:
        return run.wait(timeout_secs=200).exit_code


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_killed_training_ends_as_if_it_had_never_been(num_workers, tmp_path):
    assert _launch("whole", tmp_path, num_workers) == 0
    assert _launch("kill", tmp_path, num_workers) != 0
    assert not list(tmp_path.glob("kill_*.npz"))
    assert _launch("resume", tmp_path, num_workers) == 0
    seen = np.zeros(backup_cases.NUM_EXAMPLES)
    for worker in range(num_workers):
        expected, found = (
            dict(np.load(tmp_path / f"{what}_{worker}.npz"))
            for what in ("whole", "resume")
        )
        assert int(expected.pop("resumed_step")) == 0
        assert int(found.pop("resumed_step")) >= 6
        tolerances = {"rtol": 1e-5, "atol": 1e-6} if num_workers > 1 else {}
        backup_cases.assert_same(found, expected, **tolerances)
        (counts,) = (v for v in found.values() if v.shape == seen.shape)
        seen += counts
    assert set(seen) == {backup_program.CASE.epochs}
