"""A smoke test of each benchmark, and of what they share."""

import json
import math

import pytest

from benchmarks import backup
from benchmarks import multiworker
from benchmarks import step_cost
from benchmarks import teacher_refresh


def _record(capsys, main, *arguments) -> dict:
    """Runs a benchmark, which must print one JSON object and no more."""
    capsys.readouterr()
    assert main(list(arguments)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert record["machine"]["cores"] >= 1
    return record


def _check_judgement(found: dict, *, larger_is_better: bool = False) -> None:
    ratio, target = found["ratio"], found["target"]
    assert ratio > 0 and target > 0
    better = ratio >= target if larger_is_better else ratio <= target
    # Rounded to five places, so a tie may have been either.
    assert found["met"] == better or math.isclose(ratio, target, abs_tol=2e-5)


def test_teacher_refresh_measures_both_sides(capsys) -> None:
    record = _record(
        capsys,
        teacher_refresh.main,
        "--model=tiny",
        "--image_size=8",
        "--batch_size=2",
        "--rounds=2",
    )
    export, refresh = record["export"], record["refresh"]
    assert record["benchmark"] == "teacher_refresh"
    assert record["met"] == (export["met"] and refresh["met"])
    for found in (export, refresh):
        _check_judgement(found)
        assert found["target"] == pytest.approx(1 / 30, abs=1e-5)
    # Every round published and swapped in; nothing was traced again.
    assert export["blocked_secs"]["count"] >= 2
    assert export["step_after_export_secs"]["count"] == 2
    assert export["step_after_snapshot_secs"]["count"] == 2
    assert export["background_write_secs"]["count"] >= 2
    assert export["model_export_secs"]["count"] == 2
    assert refresh["blocked_secs"]["count"] >= 2
    assert refresh["load_and_retrace_teacher_secs"]["count"] == 2
    assert refresh["retraces"] == 0
    assert export["bytes"] > record["bound"]["variable_bytes"] > 0


def test_backup_measures_both_sides(capsys) -> None:
    record = _record(capsys, backup.main, "--model=tiny", "--rounds=2")
    _check_judgement(record)
    assert record["target"] == 0.1
    for side in ("ours", "keras"):
        assert record["blocked_secs"][side]["count"] == 2
        assert record["blocked_secs"][side]["min"] > 0
        assert record["step_after_secs"][side]["min"] > 0
        assert record["bytes"][side] > 0


def test_step_cost_measures_all_sides(capsys) -> None:
    record = _record(
        capsys,
        step_cost.main,
        "--models",
        "tiny",
        "--mlp_batch_size=4",
        "--steps=1",
        "--rounds=2",
    )
    model = record["models"]["tiny"]
    judged = [
        model[f"codistilled_to_{side}"] for side in ("plain", "distiller")
    ]
    for found in judged:
        _check_judgement(found)
    assert record["met"] == all(found["met"] for found in judged)
    assert set(model["step_secs"]) == {
        "plain",
        "codistilled",
        "distiller",
        "forward",
        "forward_backward",
    }
    assert all(found["count"] == 2 for found in model["step_secs"].values())
    medians = {k: v["median"] for k, v in model["step_secs"].items()}
    target = 1.05 * (1 + medians["forward"] / medians["forward_backward"])
    assert record["target"] == pytest.approx(target, rel=1e-4)
    # Four examples through layers of 5 x 8 and 8 x 10 weights.
    products = 2 * 4 * (5 * 8 + 8 * 10)
    assert products <= model["bound"]["forward_flops"] <= 1.5 * products


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(240)
def test_multiworker_measures_both_libraries(
    capsys, no_process_left, tmp_path
) -> None:
    pytest.importorskip(
        "tf_keras", reason="needs tf_keras: the extra 'benchmarks'"
    )
    record = _record(
        capsys,
        multiworker.main,
        "--models",
        "tiny",
        "--batches",
        "dynamic",
        "--steps_per_execution",
        "2",
        "--steps=4",
        "--rounds=2",
        "--batch_size=8",
        "--timeout_secs=200",
    )
    (setting,) = record["settings"].values()
    _check_judgement(setting, larger_is_better=True)
    assert record["met"] == setting["met"]
    rates = setting["steps_per_second"]
    assert set(rates) == {"tfdistill", "codistill_model", "tf_keras"}
    assert all(found["count"] == 2 for found in rates.values())
    # The same weights, data and optimizer: what is timed is the same work.
    losses = setting["final_loss"]
    assert losses["tfdistill"] == pytest.approx(losses["tf_keras"], rel=1e-4)
    assert losses["codistill_model"] == pytest.approx(
        losses["tfdistill"], rel=1e-4
    )
    assert setting["bound"]["gradient_bytes_per_step"] == 4 * (
        5 * 4 + 4 + 4 * 10 + 10
    )
