"""Two groups of two workers, as real processes, are what one process is."""

import numpy as np
import pytest

from tests.cases import codistillation as cases
from tests.cases import fragments
from tests.cases import mutual_learning
from tests.programs import commands
from tests.programs import two_groups as program

pytestmark = pytest.mark.multiprocess


def _flat(weights):
    return np.concatenate([np.ravel(value) for value in weights])


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.slow("three trainings of two groups of two")
def test_groups_that_mix_are_one_and_those_that_swap_are_two_models(tmp_path):
    commands.launched(tmp_path, program, num_groups=2, workers_per_group=2)
    alone = cases.codistill(cases.deep(0))
    x, y = cases.data(32)
    epochs = program.NUM_EPOCHS
    cases.fit(alone, x, y, batch_size=8, epochs=epochs, callbacks=[])
    taught = mutual_learning.expected(2)
    in_parts = fragments.by_hand()
    for group in range(2):
        for worker in range(2):
            found = np.load(tmp_path / f"group_{group}_{worker}.npz")
            for name, weights in (
                ("mixed", alone.get_weights()),
                ("swapped", taught[group]),
            ):
                np.testing.assert_allclose(
                    found[name], _flat(weights), rtol=0, atol=1e-6
                )
            np.testing.assert_allclose(
                found["in_fragments"],
                _flat(in_parts[group].get_weights()),
                rtol=1e-4,
                atol=1e-5,
            )
            assert not found["left_out"]
            assert found["mixes"] == 4 * epochs and not found["skipped"]
            assert found["versions"].tolist() == [4 * epochs]
            assert not found["missed"]
            for dtype in program.DTYPES:
                assert found[f"begin_{dtype}"].tolist() == [3, 0]
            log = tmp_path / "logs" / f"group_{group}_worker_{worker}.log"
            said = log.read_text(errors="replace")
            assert "ended before this worker was done" not in said
