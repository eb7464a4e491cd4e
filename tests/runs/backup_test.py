"""Tasks that are killed without notice, and groups that go on after that."""

import json

import numpy as np
import pytest

from tests.cases import backup as backup_cases
from tests.programs import backup as backup_program
from tests.programs import commands

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


@pytest.mark.slow("a group that is killed, and one that is not")
def test_a_killed_training_ends_as_if_it_had_never_been(tmp_path):
    """In one process, tests/backup/callback_test.py has it to the bit."""
    result = commands.launched(
        tmp_path / "run",
        backup_program,
        tmp_path,
        num_groups=2,
        workers_per_group=2,
        max_restarts=1,
    ).result()
    assert [group.group_restarts for group in result.groups] == [0, 1]
    seen = np.zeros(backup_cases.NUM_EXAMPLES)
    for worker in range(2):
        expected, found = (
            dict(np.load(tmp_path / f"{what}_{worker}.npz"))
            for what in ("whole", "killed")
        )
        assert int(expected.pop("resumed_step")) == 0
        assert int(found.pop("resumed_step")) >= 6
        backup_cases.assert_same(found, expected, rtol=1e-5, atol=1e-6)
        (counts,) = (v for v in found.values() if v.shape == seen.shape)
        seen += counts
    assert set(seen) == {backup_program.CASE.epochs}
    # Then it was trained further: all workers count the teacher alike.
    retrained, other = (
        json.loads((tmp_path / f"retrained_{worker}.json").read_text())
        for worker in range(2)
    )
    assert retrained == other
    churn, weight, batches = retrained
    assert float(batches[0]["churn"]) < churn < 0.2
    assert float(batches[0]["distillation_weight"]) != weight
