"""A smoke test of a benchmark, and of what all share: a release runs all."""

import json
import math

import pytest

from benchmarks import backup
from benchmarks import step_cost


def _record(capsys, main, *arguments) -> dict:
    """Runs a benchmark, which must print one JSON object and no more."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert record["machine"]["cores"] >= 1
    return record


def _check_judgement(found: dict) -> None:
    ratio, target = found["ratio"], found["target"]
    assert ratio > 0 and target > 0
    # Rounded to five places, so a tie may have been either.
    is_tie = math.isclose(ratio, target, abs_tol=2e-5)
    assert found["met"] == (ratio <= target) or is_tie


def test_backup_measures_both_sides(capsys) -> None:
    record = _record(capsys, backup.main, "--model=tiny", "--rounds=2")
    _check_judgement(record)
    assert record["target"] == 0.1
    for side in ("ours", "keras"):
        assert record["blocked_secs"][side]["count"] == 2
        assert record["step_after_secs"][side]["min"] > 0
        assert record["bytes"][side] > 0


@pytest.mark.deep
def test_step_cost_measures_all_sides(capsys) -> None:
    options = "--models tiny --mlp_batch_size=4 --steps=1 --rounds=2"
    record = _record(capsys, step_cost.main, *options.split())
    model = record["models"]["tiny"]
    judged = [found for name, found in model.items() if "_to_" in name]
    assert len(judged) == 3
    for found in judged:
        _check_judgement(found)
    assert record["met"] == all(found["met"] for found in judged)
    assert all(found["count"] == 2 for found in model["step_secs"].values())
    medians = {k: v["median"] for k, v in model["step_secs"].items()}
    target = 1.05 * (1 + medians["forward"] / medians["forward_backward"])
    assert record["target"] == pytest.approx(target, rel=1e-4)
    # Four examples through layers of 5 x 8 and 8 x 10 weights.
    products = 2 * 4 * (5 * 8 + 8 * 10)
    assert products <= model["bound"]["forward_flops"] <= 1.5 * products
