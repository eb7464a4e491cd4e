"""A smoke test of a benchmark, and of what all share: a release runs all."""

import json
import math

from benchmarks import backup


def test_backup_measures_both_sides(capsys) -> None:
    assert backup.main(["--model=tiny", "--rounds=2"]) == 0
    # One JSON object, and no more.
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["cores"] >= 1
    ratio, target = record["ratio"], record["target"]
    assert ratio > 0 and target == 0.1
    # Rounded to five places, so a tie may have been either.
    is_tie = math.isclose(ratio, target, abs_tol=2e-5)
    assert record["met"] == (ratio <= target) or is_tie
    for side in ("ours", "keras"):
        assert record["blocked_secs"][side]["count"] == 2
        assert record["step_after_secs"][side]["min"] > 0
        assert record["bytes"][side] > 0
