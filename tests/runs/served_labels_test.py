"""Labels from a server reach a group of several processes."""

import json

import pytest

from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.programs import commands
from tests.programs import served_labels as program

pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]


def test_a_group_of_servers_learns_from_a_server_of_teachers(
    tmp_path, exchange, no_process_left
):
    cases.publish(exchange, cases.linear(5), step=10)
    with server_cases.serving(exchange) as server:
        commands.launched(
            *(tmp_path / "run", program, tmp_path, server.address),
            ps_per_group=1,
        )
        counts = server.counts
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["strategy"] == "ParameterServerStrategyV2"
    assert found["history"]["distillation_weight"] == [1.0]
    assert found["status"]["absent_rows"] == 0
    assert found["status"]["servers"][0]["version"] == 10
    assert counts["requests"] >= program.NUM_STEPS and not counts["failed"]
    assert "pass a function" in found["refused"]
