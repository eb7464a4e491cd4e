"""Labels from a server reach a group of several processes."""

import json

import pytest

from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.programs import commands
from tests.programs import served_labels as program
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(300)]


def test_a_group_of_servers_learns_from_a_server_of_teachers(
    tmp_path, exchange, no_process_left
):
    cases.publish(exchange, cases.linear(5), step=10)
    with server_cases.serving(exchange) as server:
        cluster = local_cluster.LocalCluster(
            command=commands.of(program, tmp_path, server.address),
            workdir=str(tmp_path / "run"),
            ps_per_group=1,
        )
        with local_run.LocalRun(cluster) as run:
            result = run.wait(timeout_secs=240)
        assert result.exit_code == 0, result.groups
        counts = server.counts
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["strategy"] == "ParameterServerStrategyV2"
    assert found["history"]["distillation_weight"] == [1.0]
    assert found["status"]["absent_rows"] == 0
    assert found["status"]["servers"][0]["version"] == 10
    assert counts["requests"] >= program.NUM_STEPS and not counts["failed"]
    assert "pass a function" in found["refused"]
