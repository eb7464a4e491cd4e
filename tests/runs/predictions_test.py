"""Groups of several workers that learn from each other's predictions."""

import numpy as np
import pytest

from tests.cases import mutual_learning
from tests.programs import commands
from tests.programs import predictions
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.timeout_secs(300),
    pytest.mark.usefixtures("no_process_left"),
]


def test_two_groups_of_two_workers_learn_as_two_models_in_one_process(
    tmp_path,
):
    topology = local_cluster.LocalCluster(
        command=commands.of(predictions),
        workdir=str(tmp_path),
        num_groups=2,
        workers_per_group=2,
    )
    with local_run.LocalRun(topology) as run:
        result = run.wait(timeout_secs=240)
    assert result.exit_code == 0, result.groups
    for group, weights in enumerate(mutual_learning.expected(2)):
        for worker in range(2):
            found = np.load(tmp_path / f"group_{group}_{worker}.npz")
            assert not found["num_missed"]
            for index, value in enumerate(weights):
                np.testing.assert_allclose(
                    found[f"arr_{index}"], value, rtol=0, atol=1e-6
                )
