"""A worker that makes its group wait, found by two real ones."""

import json

import pytest

from tests.cases import runs
from tests.programs import commands
from tests.programs import slow_worker as program

pytestmark = [
    pytest.mark.deep,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]


def test_whatever_slows_a_worker_it_is_named_soon(tmp_path):
    commands.launched(tmp_path / "run", program, tmp_path, workers_per_group=2)
    for worker in range(2):
        path = tmp_path / f"worker_{worker}.json"
        slow = json.loads(path.read_text())
        assert slow["fair"] == [[]] * program.NUM_STEPS
        # It takes 20 slow steps. The first steps of a training may not be:
        # their batches are read while the first one is being compiled, on a
        # busy machine more than ten.
        assert slow["callback"][-5:] == [["worker:1"]] * 5
        assert slow["fair_again"][-5:] == [[]] * 5
        assert slow["data"][-5:] == [["worker:0"]] * 5
    (text,) = runs.records(tmp_path / "run" / "group_0")[-1]["slow_workers"]
    assert text.startswith("worker:0 makes its group wait")
    log = tmp_path / "run" / "logs" / "group_0_worker_1.log"
    assert "worker:1 no longer makes its group wait." in log.read_text()
