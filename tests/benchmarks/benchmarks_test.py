"""A smoke test of each benchmark, and of what they share."""

import itertools
import json
import math
import sys

import pytest

from benchmarks import backup
from benchmarks import measure
from benchmarks import multiworker
from benchmarks import parameter_server
from benchmarks import same_numbers
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


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(400)
def test_parameter_server_measures_both_libraries(
    capsys, no_process_left
) -> None:
    pytest.importorskip(
        "tf_keras", reason="needs tf_keras: the extra 'benchmarks'"
    )
    record = _record(
        capsys,
        parameter_server.main,
        "--settings=tiny",
        "--tf_keras=tf_keras_legacy_min_size",
        "--steps_per_execution=10",
        "--keep=0",
        "--steps=10",
        "--epochs=1",
        "--rounds=1",
        "--turn_timeout_secs=120",
    )
    found = record["settings"]["tiny"]
    _check_judgement(found["against"]["tf_keras"], larger_is_better=True)
    assert record["met"] == found["against"]["tf_keras"]["met"]
    assert set(found["examples_per_second"]) == {
        "tfdistill_x10",
        "tfdistill_x1",
        "tf_keras_legacy_min_size_x10@tf_threads",
    }


def test_parameter_server_compares_with_the_best_of_a_rival() -> None:
    rates = {
        "tfdistill_x10": [90.0, 110.0, 100.0],
        "tf_keras_new_whole_x1": [10.0, 200.0, 20.0],
        "tf_keras_legacy_whole_x10": [50.0, 40.0, 45.0],
        "keras_x1": [20.0, 20.0, 20.0],
    }
    found = parameter_server.compare(rates, {"tf_keras": 2.0, "keras": 6.0})
    assert found["tf_keras"]["best"] == "tf_keras_legacy_whole_x10"
    assert found["tf_keras"]["ratio"] == pytest.approx(100 / 45, rel=1e-4)
    assert found["tf_keras"]["met"]
    # Not a way of tf_keras, though its name ends like one.
    assert found["keras"]["best"] == "keras_x1"
    assert found["keras"]["ratio"] == 5.0 and not found["keras"]["met"]


def test_parameter_server_keeps_the_best_trials() -> None:
    trials = {"a": 1.0, "b": 3.0, "c": 2.0}
    threads = parameter_server.TF_THREADS
    assert parameter_server.kept(trials, 2) == ["b", "c", "b" + threads]


def test_interleave_reverses_every_second_round() -> None:
    calls = []
    values = itertools.count()

    def side(name: str):
        def measured() -> float:
            calls.append(name)
            return float(next(values))

        return measured

    results = measure.interleave(
        {"a": side("a"), "b": side("b")}, rounds=2, warm_up_rounds=1
    )
    assert calls == ["b", "a", "a", "b", "b", "a"]
    assert results == {"a": [2.0, 5.0], "b": [3.0, 4.0]}


def test_ratio_of_picks_the_best_of_times_and_of_rates() -> None:
    ours, theirs = [2.0, 4.0, 9.0], [1.0, 2.0, 6.0, 100.0]
    times = measure.ratio_of(ours, theirs)
    assert times == {"of_medians": 1.0, "of_best": 2.0, "within_rounds": 2.0}
    assert measure.ratio_of(ours, theirs, best=max)["of_best"] == 0.09


@pytest.mark.parametrize(
    ("limits", "met"),
    [
        ({"at_most": 1.0}, False),
        ({"at_most": 1.2}, True),
        ({"at_least": 1.2}, True),
        ({"at_least": 1.3}, False),
    ],
)
def test_judge_knows_which_way_is_better(limits, met) -> None:
    found = measure.judge(1.2, **limits)
    (target,) = limits.values()
    assert found == {"ratio": 1.2, "target": target, "met": met}


def test_one_json_line_keeps_other_output_off_stdout(capsys) -> None:
    with measure.one_json_line() as record:
        print("progress of some library")
        record["ratio"] = 0.5
    captured = capsys.readouterr()
    assert captured.out == '{"ratio": 0.5}\n'
    assert captured.err == "progress of some library\n"


def test_one_json_line_prints_nothing_after_a_failure(capsys) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        with measure.one_json_line() as record:
            record["ratio"] = 0.5
            raise RuntimeError("broken")
    assert capsys.readouterr().out == ""
    assert sys.stdout is not sys.stderr


def test_same_numbers_names_what_differs(capsys, tmp_path, monkeypatch):
    path = tmp_path / "found.json"
    found = {"digits": {"weights": "ab", "loss": 0.25}}
    monkeypatch.setattr(same_numbers, "run", lambda wanted: (found, {}))
    assert same_numbers.main(["--case=digits", f"--output={path}"]) == 0
    assert same_numbers.main(["--case=digits", f"--against={path}"]) == 0
    found["digits"]["loss"] = math.nextafter(0.25, 1.0)
    assert same_numbers.main(["--case=digits", f"--against={path}"]) == 1
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    (line,) = record["different"]
    assert line.startswith("digits: loss is 0.2500000")
    # A case that is gone is a difference, unless it was not asked for.
    del found["digits"]
    assert same_numbers.main(["--case=digits", f"--against={path}"]) == 1
    assert same_numbers.main(["--case=golden", f"--against={path}"]) == 0
