"""Groups of real workers, through the real launcher.

Here stand the invariants of the design that need processes: workers of a
group use one version (3), groups fail alone (8). That every process ends (11)
is in tests/launcher.
"""

import json
import os
import pathlib
import signal

import numpy as np
import pytest

from tests.cases import tasks
from tests.programs import codistill as codistill_program
from tests.programs import commands
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = pytest.mark.multiprocess
_STEPS, _KILL_AT = 240, 50


def _reached(directory, group, step):
    path = pathlib.Path(directory) / f"group_{group}" / "metrics.jsonl"
    if not path.exists():
        return False
    # The last line may be half written.
    lines = path.read_text().split("\n")[:-1]
    return any(json.loads(line)["step"] >= step for line in lines)


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    """A run whose group 1 was killed: the result, and what group 0 noted."""
    directory = tmp_path_factory.mktemp("codistilled")
    topology = local_cluster.LocalCluster(
        command=commands.of(codistill_program, _STEPS, 0.03),
        workdir=str(directory),
        num_groups=2,
        workers_per_group=2,
        on_group_failure="continue",
    )
    with local_run.LocalRun(topology) as run:
        tasks.poll_until(run, lambda: _reached(directory, 1, _KILL_AT))
        os.kill(run.pids["group_1_worker_0"], signal.SIGKILL)
        result = tasks.end(run)
    return result, [
        json.loads((directory / f"notes_0_{worker}.json").read_text())
        for worker in range(2)
    ]


@pytest.mark.slow("two groups of two, one of which is killed")
def test_03_workers_of_a_group_use_one_version_at_a_step(survived):
    _, (first, second) = survived
    assert first["versions"] == second["versions"]
    in_use = [versions[0] for versions in first["versions"]]
    # Several refreshes really happened, forwards only.
    assert len(set(in_use) - {-1}) >= 2
    assert in_use == sorted(in_use)
    for one, other in zip(first["student"], second["student"], strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_weight_is_in_force_after_burn_in_and_first_teacher(survived):
    _, (found, _) = survived
    # The version seen after step i is the one that step i + 1 obeys, unless
    # it is of the burn-in. Later the peer is gone, and fades.
    versions = [[-1], *found["versions"]][:_KILL_AT]
    expected = [
        float(step >= 10 and version[0] >= 10)
        for step, version in enumerate(versions)
    ]
    assert found["weights_in_force"][:_KILL_AT] == expected


def test_08_groups_fail_alone(survived):
    result, (survivor, _) = survived
    assert result.exit_code != 0
    assert [group.state for group in result.groups] == ["done", "failed"]
    assert survivor["steps"] == _STEPS
    # It kept the last teacher, which fades.
    assert survivor["versions"][-1] == survivor["versions"][-10]
    assert survivor["versions"][-1][0] >= 0
    weights = survivor["weights_in_force"]
    assert max(weights) == 1.0 and weights[-1] < 1.0
