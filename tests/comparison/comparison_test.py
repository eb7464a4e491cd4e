"""Plans, budgets, bootstrap and the report of a comparison, without runs."""

import dataclasses
import json
import math
import pathlib
import re
import types

import numpy as np
import pytest

from launch import recipes
from tfdistill import metrics
from tfdistill.commands import compare
from tfdistill.comparison import collect
from tfdistill.comparison import experiment
from tfdistill.comparison import markdown
from tfdistill.comparison import report
from tfdistill.comparison import runs
from tfdistill.comparison import trials
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs


def _setup(**changes):
    return trials.Setup(recipe=recipes.get("digits"), **changes)


def _trial(name, seed=0, **changes):
    return trials.Variant(method=name).trial(_setup(**changes), seed)


def test_seeds_differ_between_trials_and_members():
    found = [r.recipe.settings["seed"] for r in _trial("ensemble", 3).runs]
    assert found == [3, 1003]
    recipe = recipes.override(recipes.get("digits"), ["seed=100"])
    setup = trials.Setup(recipe=recipe)
    (run,) = trials.Variant(method="independent").trial(setup, 3).runs
    assert run.recipe.settings["seed"] == 103


def test_pages_say_how_many_methods_there_are():
    root = pathlib.Path(__file__).parents[2]
    number = len(trials.DESCRIPTIONS)
    assert f"up to {number} methods" in (root / "README.md").read_text()
    page = (root / "docs/tutorial_compare.md").read_text()
    assert f"| all {number}, also" in page


@pytest.mark.parametrize("name", trials.DESCRIPTIONS)
@pytest.mark.parametrize("num_groups", [2, 4])
def test_a_total_budget_is_the_same_for_all(name, num_groups):
    trial = _trial(name, budget="total", num_groups=num_groups, ensemble_size=5)
    shares = [
        run.num_groups
        * run.recipe.method_arguments.get("parts", 1)
        * run.recipe.arguments["num_steps"]
        for run in trial.runs
    ]
    assert sum(shares) == 1000
    each = _trial(name).runs
    assert {run.recipe.arguments["num_steps"] for run in each} == {1000}


@pytest.mark.parametrize(
    "options, message",
    [
        (["--trials=0"], "--trials: must be >= 1; received 0"),
        (["--sweep=burn=1"], "burn"),
        (["--target=last"], "--target must be .* received 'last'"),
        (
            ["--weight_decay=-1"],
            "`weight_decay` must be above 0 .* received -1",
        ),
        (["--tune_override=seed=1"], "--tune-override needs --tune"),
        (["--sweep=weight=1,1.0"], "would train identically"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(
    tmp_path, refused, options, message
):
    workdir = tmp_path / "compared"
    given = ["--recipe=digits", f"--workdir={workdir}", *options]
    assert re.search(message, refused(compare.main, *given))
    assert not workdir.exists()


def test_a_sweep_of_an_argument_that_a_workload_lacks_names_the_remedy(
    tmp_path, refused
):
    file = tmp_path / "my_workload.py"
    file.write_text('def workload(*, rate=0.1):\n    """Mine."""\n')
    given = [file, "--sweep=burn_in=1,2", f"--workdir={file}.d"]
    said = refused(compare.main, *given)
    assert "Add burn_in_steps=100 to its function" in said


def _curve(*values, every=100):
    steps = tuple(every * (1 + index) for index in range(len(values)))
    seconds = tuple(step / 10 for step in steps)
    return collect.Curve(steps=steps, values=values, seconds=seconds)


def test_a_target_is_reached_between_evaluations():
    curve = _curve(3.0, 2.0, 1.0, 1.5)
    assert curve.reaches(1.5) == (250.0, 25.0)
    assert curve.reaches(3.5) == (100.0, 10.0)
    assert curve.reaches(0.5) is None
    assert _curve(math.inf, 1.0).reaches(1.0) == (200.0, 20.0)


def test_the_final_loss_takes_independent_all_of_its_steps():
    independent = [_curve(3.0, 2.0, 1.0), _curve(3.0, 2.0, 1.2)]
    aim = collect.make("final", independent)
    assert aim.value == pytest.approx(1.1)
    faster = [_curve(2.0, 1.0, 0.5), _curve(2.2, 1.0, 0.5)]
    value, (low, high) = collect.compare_steps(aim, faster, independent)
    expected = np.mean([190.0, 100 * (1 + 1.1 / 1.2)]) / 300
    assert value == pytest.approx(expected) and low <= value <= high < 1
    slower = [_curve(3.0, 2.0, 1.15), _curve(3.0, 2.0, 1.0)]
    assert collect.compare_steps(aim, slower, independent) is None


def test_a_method_equal_to_independent_is_not_said_to_be_faster():
    # It overfits: the final loss is passed on the way down, by all alike.
    rng = np.random.default_rng(0)

    def trial():
        noise = 0.003 * rng.normal() + 0.002 * rng.normal(size=5)
        return _curve(*(np.array([0.9, 0.6, 0.5, 0.55, 0.6]) + noise).tolist())

    ours, independent = ([trial() for _ in range(6)] for _ in range(2))
    aim = collect.make("final", independent)
    value, (low, high) = collect.compare_steps(aim, ours, independent)
    assert low <= 1 <= high and value == pytest.approx(1, abs=0.1)


def _figures():
    return {
        "num_trials": 6,
        "reached": 6,
        "versus_independent": {
            "num_trials": 6,
            "examples": 2.0,
            "steps_to_target": {"ratio": 0.71, "interval": (0.66, 0.77)},
            "churn": {"ratio": 0.69, "interval": (0.65, 0.73)},
            "log_loss": {"difference": -0.02, "interval": (-0.03, 0.01)},
        },
    }


def _verdict(**changes):
    found = _figures() | {
        name: changes.pop(name) for name in ("num_trials",) if name in changes
    }
    found["versus_independent"] |= changes
    return report.verdict_on("codistill", found, target=4.05)


def test_a_verdict_claims_what_the_intervals_show_and_no_more():
    assert _verdict() == (
        "codistillation is better: churn -31% (-35% to -27%); final log loss "
        "not clearly different (-0.0200, -0.0300 to +0.0100); reached 4.05 "
        "nats in 0.71x the steps (0.66 to 0.77) (on 2x the training examples "
        "in all)"
    )
    unclear = _verdict(
        steps_to_target={"ratio": 0.9, "interval": (0.8, 1.05)},
        churn={"ratio": 0.8, "interval": (0.6, 1.1)},
        log_loss={"difference": 0.5, "interval": (0.4, 0.6)},
    )
    for said in (
        "is worse: churn not clearly different (-20%, -40% to +10%)",
        "steps to 4.05 nats not clearly different",
        "final log loss worse (+0.5000",
    ):
        assert said in unclear
    skewed = _verdict(churn={"ratio": 1.22, "interval": (1.004, 1.46)})
    assert ": churn +22% (+0" in skewed
    assert "is better in one figure and worse in another" in skewed
    assert "3 trial(s) are too few" in _verdict(num_trials=3)


def _classes(rng, shift):
    labels = np.arange(40) % 3
    logits = rng.normal(size=[40, 3]) + shift * np.eye(3)[labels]
    exact = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    return predictions.Distributions(probabilities=exact, labels=labels)


def _numbers(rng, shift):
    labels = np.arange(40.0)
    values = labels + rng.normal(scale=9 - 10 * shift, size=40)
    return predictions.Values(values=values, labels=labels)


def _write(directory, run, *, rng, shift, predicted=_classes, **answers):
    """Writes what a run would leave behind."""
    groups = []
    for group in range(run.num_groups):
        place = outputs.group_dir(directory, group)
        place.mkdir(parents=True)
        outputs.write_predictions(place, predicted(rng, shift))
        lines = [{"event": "start", "time": 100.0, "step": 0}]
        lines += [
            _epoch_end(number, 2.0 - shift - 0.3 * number)
            for number in (1, 2, 3)
        ]
        (place / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        result = {
            "group": group,
            "steps": 1000,
            "examples": 64_000,
            "examples_per_second": 50.0,
            "seconds": 9.0,
            "waited_seconds": 1.0,
            "process_seconds": 4.0,
            "parameter_bytes": 1000,
            "exports": {"published": 3, "bytes": 3600, "every_steps": 25},
            "teachers": [
                {
                    "swaps": 2,
                    "bytes": 2400,
                    "num_taught": 810,
                    "num_due": 900,
                    "num_quarantined": 1,
                    "quarantined": {"25": "its loss is 9."},
                    **answers,
                }
            ],
        }
        (place / "results.json").write_text(json.dumps(result))
        groups.append(result)
    (directory / "results.json").write_text(json.dumps({"groups": groups}))


def _epoch_end(number, loss):
    return {
        "event": "epoch_end",
        "time": 101.0 + number,
        "step": 100 * number,
        "val_log_loss": loss,
        "teacher_staleness": 10.0 * number,
    }


def _compared(workdir, **how):
    """Makes up the runs of a comparison, and its report of them."""
    rng = np.random.default_rng(0)
    chosen = trials.parse_methods("independent,ensemble,codistill")
    found = experiment.Experiment(
        workdir, setup=_setup(), variants=chosen, num_trials=4
    )
    runner = runs.Runner(workdir)
    for variant in chosen:
        for seed in range(4):
            for run in variant.trial(_setup(), seed).runs:
                if not runner.is_done(run):
                    shift = 0.5 * (variant.name == "codistill")
                    place = runner.directory(run)
                    _write(place, run, rng=rng, shift=shift, **how)
    found._write_record()
    return found.report("final", {"seed_9_x": "exit code 1"}, jobs=2)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A finished comparison of made-up runs, and what it has written."""
    workdir = tmp_path_factory.mktemp("compared")
    made = _compared(workdir)
    assert made == json.loads((workdir / "report.json").read_text())
    text = (workdir / "report.md").read_text()
    return types.SimpleNamespace(workdir=workdir, made=made, text=text)


def _copies(compared, trial):
    """What each copy of a trial has predicted."""
    paths = [
        path
        for run in trial["runs"]
        for path in (compared.workdir / run).glob("group_*/predictions.npz")
    ]
    return [dict(np.load(path)) for path in sorted(paths)]


def test_the_report_can_be_recomputed_from_the_predictions(compared):
    codistilled = compared.made["methods"]["codistill"]
    copies = [_copies(compared, trial) for trial in codistilled["trials"]]
    of_group = [
        [trial[group]["probabilities"] for trial in copies] for group in (0, 1)
    ]
    churns = [
        0.5 * np.abs(apart[i] - apart[j]).sum(-1).mean()
        for apart in of_group
        for i in range(4)
        for j in range(i)
    ]
    assert codistilled["churn"]["churn"]["mean"] == pytest.approx(
        np.mean(churns)
    )
    losses = [
        -np.log(c["probabilities"][np.arange(40), c["labels"]]).mean()
        for trial in copies
        for c in trial
    ]
    figures = codistilled["figures"]
    means = np.reshape(losses, [4, 2]).mean(axis=1).tolist()
    assert figures["log_loss"]["values"] == pytest.approx(means)
    expected = {
        "best_log_loss": 0.6,
        "total_examples": 2 * 64_000,
        "teacher_staleness": 20.0,
        "versions_read": 2.0,
        "versions_due": 35,  # At the steps 125 to 975, after the burn-in.
        "taught": 0.9,
        "groups_without_teacher": 0.0,
        "seconds": 8.0,
    }
    assert {name: figures[name]["mean"] for name in expected} == (
        pytest.approx(expected)
    )
    for name in ("prediction_difference", "relative_prediction_difference"):
        spread = codistilled["spread"][name]
        apart = [
            metrics.spread(values, copies[0][0]["labels"])[name]
            for values in of_group
        ]
        assert spread["mean"] == pytest.approx(np.mean(apart))
        assert spread["interval"][0] < spread["mean"] < spread["interval"][1]
        assert spread["standard_error"] > 0
    # From 1.2 at step 100 to .9 at 200, against 1.1 at 300.
    assert compared.made["target"]["value"] == pytest.approx(1.1)
    assert codistilled["steps_to_target"]["mean"] == pytest.approx(400 / 3)
    ratio = codistilled["versus_independent"]["steps_to_target"]["ratio"]
    assert ratio == pytest.approx(4 / 9)


def test_regressions_are_judged_by_their_unexplained_variance(tmp_path):
    made = _compared(tmp_path, predicted=_numbers)
    for method in made["methods"].values():
        values = method["figures"]["unexplained_variance"]["values"]
        assert len(values) == 4 and all(0 < value < 1 for value in values)
        assert "log_loss" not in method["figures"]
    codistilled = made["methods"]["codistill"]
    assert "final unexplained variance better" in codistilled["verdict"]
    assert "reached a loss of 1.1 in" in codistilled["verdict"]
    text = (tmp_path / "report.md").read_text()
    assert "log loss" not in text and "nats" not in text
    assert "share of the labels' variance" in text
    assert "share of the labels' variance" in markdown.first_screen(made)


def test_an_ensemble_averages_probabilities(compared):
    made = compared.made["methods"]["ensemble"]
    first = made["trials"][0]
    members = _copies(compared, first)
    assert len(members) == 2
    mean = np.mean([m["probabilities"] for m in members], axis=0)
    expected = -np.log(mean[np.arange(40), members[0]["labels"]]).mean()
    assert first["figures"]["log_loss"] == pytest.approx(expected)
    assert first["curve"] is None and "reached" not in made


def test_a_report_shows_what_was_compared(compared):
    (pair,) = compared.made["pairs"]
    assert (pair["one"], pair["other"]) == ("codistill", "ensemble")
    means = [
        compared.made["methods"][name]["figures"]["log_loss"]["mean"]
        for name in ("codistill", "ensemble")
    ]
    difference = pair["log_loss"]["difference"]
    assert difference == pytest.approx(means[0] - means[1])
    # An ensemble has no curve.
    assert "steps_to_target" not in pair
    assert not compared.made["beyond_own_past"]
    for shown in (
        f"| codistill - ensemble | {difference:+.4f} (",
        "relative PD",
        "To 1.1000 nats",
        "codistill 128,000",
        "seed_9_x: exit code 1",
        "![curves.png](curves.png)",
    ):
        assert shown in compared.text
    screen = markdown.first_screen(compared.made)
    verdict = "Clearly better than independent: ensemble, codistillation."
    assert screen.startswith(f"{verdict}\n")
    assert f"\n- {verdict}\n" in compared.text
    assert "in brackets: 95% intervals" in screen
    assert (compared.workdir / "churn.png").stat().st_size > 1000


def test_more_trials_and_methods_join_and_other_settings_do_not(compared):
    def again(**changes):
        return experiment.Experiment(
            compared.workdir,
            setup=_setup(**changes),
            variants=trials.parse_methods("large_group"),
            num_trials=2,
        )

    made = again().report("final", {}, jobs=1)
    assert list(made["methods"]) == ["independent", "ensemble", "codistill"]
    assert any("large_group: 0 of 4 trials" in note for note in made["notes"])
    with pytest.raises(ValueError, match="different settings: budget"):
        again(budget="total")


def test_methods_are_compared_with_one_s_own_past():
    def trials(loss, *values):
        one = _of_clicks([0.2, 0.3, 0.1], log_loss=loss)
        return [dataclasses.replace(one, curve=_curve(*values))] * 4

    alone, past = trials(0.9, 1.0, 0.9), trials(0.8, 0.9, 0.8)
    taught = trials(0.7, 0.9, 0.5)
    for trial in taught:
        trial.figures["between_groups_churn"] = 0.1
    made = _made(
        {"independent": alone, "codistill": taught, "own_past": past}, "0.8"
    )
    (line,) = made["beyond_own_past"]
    assert "own_past: final log loss better (-0.1000" in line
    assert "reached 0.8 nats in 0.62x the steps" in line


def _tuned(workdir, chosen="independent,large_group"):
    return experiment.Experiment(
        workdir,
        setup=_setup(workers_per_group=2),
        variants=trials.parse_methods(chosen),
        num_trials=1,
        tune=trials.Tuning.parse(
            "learning_rate=0.1,0.2,0.3",
            overrides=["mode=shared"],
            num_trials=2,
        ),
    )


def test_each_method_is_tuned_by_runs_apart_from_those_of_the_report(tmp_path):
    found, rng = _tuned(tmp_path), np.random.default_rng(0)
    runner = runs.Runner(tmp_path)
    best = {"independent": "0.2", "large_group": "0.3"}
    for name, by_value in found._tuning_trials.items():
        for value, tried in by_value.items():
            for trial in tried:
                (run,) = trial.runs
                assert run.recipe.settings["seed"] >= 500
                assert run.recipe.settings["mode"] == "shared"
                rate = run.recipe.arguments["learning_rate"]
                assert rate == float(value)
                directory = runner.directory(run)
                shift = 3.0 * (value == best[name])
                _write(directory, run, rng=rng, shift=shift)
    found._choose()
    for name, planned in found._trials.items():
        (run,) = planned[0].runs
        assert run.recipe.arguments["learning_rate"] == float(best[name])
        assert run.recipe.settings == {"seed": 0}
        _write(runner.directory(run), run, rng=rng, shift=0.0)
    # Another call, of more methods, finds all of it again.
    found._write_record()
    again = _tuned(tmp_path, "label_smoothing")
    made = again.report("final", {}, jobs=1)
    assert {n: f["value"] for n, f in made["tuned"].items()} == best
    assert len(made["tuned"]["independent"]["losses"]["0.1"]) == 2
    assert any("not tuned yet" in note for note in made["notes"])
    assert "independent: 0.2 (0.1: " in (tmp_path / "report.md").read_text()
    with pytest.raises(ValueError, match="different settings: tune"):
        experiment.Experiment(
            tmp_path,
            setup=_setup(workers_per_group=2),
            variants=[],
            num_trials=1,
        )


def test_predictions_of_other_examples_are_not_compared():
    one, other = (
        predictions.Distributions(
            probabilities=np.full(3, 0.5), labels=np.array(labels)
        )
        for labels in ([0, 1, 0], [0, 1, 1])
    )
    with pytest.raises(ValueError, match="different labels. Keep the split"):
        predictions.Distributions.mean([one, other])


def _of_clicks(probabilities, **figures):
    """A trial of three examples."""
    kept = predictions.Distributions(
        probabilities=np.array(probabilities), labels=np.array([0, 1, 0])
    )
    examples = {"total_examples": 10, "student_examples": 10}
    return collect.Finished(
        seed=0,
        directories=("runs/x",),
        predictions=(kept,),
        figures={
            **examples,
            "log_loss": 0.5,
            "teacher_seconds": 0.0,
            **figures,
        },
        copies=({"log_loss": 0.5},),
        curve=_curve(1.0, 0.5),
    )


def _made(finished, target="final"):
    descriptions = dict.fromkeys(finished, "")
    return report.make(
        finished, target=target, descriptions=descriptions, context={}
    )


def test_retrains_that_never_predict_a_click_can_be_reported():
    # Rare clicks: no probability is above one half, and label churn is zero.
    rng = np.random.default_rng(0)
    trials = [_of_clicks(rng.uniform(0.01, 0.1, 3)) for _ in range(4)]
    made = _made({"independent": trials, "codistill": trials[::-1]})
    assert made["conclusion"].startswith("No method is clearly better")
    assert not _made({"independent": trials[:3]})["conclusion"]
    text = json.dumps(made, allow_nan=False)
    versus = json.loads(text)["methods"]["codistill"]["versus_independent"]
    assert versus["label_churn"] == {"ratio": None, "interval": None}
    assert versus["churn"]["ratio"] == pytest.approx(1.0)


def _collected(tmp_path, name, **answers):
    trial, runner = _trial(name), runs.Runner(tmp_path)
    rng = np.random.default_rng(0)
    for run in trial.runs:
        _write(runner.directory(run), run, rng=rng, shift=0.0, **answers)
    return collect.collect(
        trial, seed=0, workdir=tmp_path, directory=runner.directory
    )


def test_seconds_of_a_student_count_its_teacher_s(tmp_path):
    found = _collected(tmp_path, "offline_distillation")
    assert found.figures["teacher_seconds"] == 8.0
    assert found.figures["seconds"] == 16.0
    made = _made({"independent": [found]})["methods"]["independent"]
    alone = found.curve.reaches(found.curve.values[-1])[1]
    assert made["seconds_to_target"]["mean"] == pytest.approx(8.0 + alone)


def test_a_trial_that_was_taught_in_few_steps_is_told(tmp_path):
    found = _collected(tmp_path, "codistill", num_taught=396)
    made = _made({"codistill": [found]})
    assert made["methods"]["codistill"]["figures"]["taught"]["mean"] == 0.44
    assert (
        "codistill: in 1 of 1 trials, a group had a teacher in less than 90% "
        "of the steps after its burn-in. In the one with the fewest, group 0 "
        "of trial 0, it was 44%: its teacher had 1 refused version(s), most "
        "recently version 25: its loss is 9."
    ) in made["notes"]


def test_a_teacher_without_versions_is_one(tmp_path):
    """A kind of teacher of one's own puts none in use."""
    found = _collected(tmp_path, "codistill", swaps=0)
    assert found.figures["groups_without_teacher"] == 0.0
    none = _collected(tmp_path / "none", "codistill", num_taught=0)
    assert none.figures["groups_without_teacher"] == 2.0


def test_predictions_that_are_sent_are_counted(tmp_path):
    answers = {"num_answers": 6, "num_missed": 2, "sent_bytes": 500}
    found = _collected(tmp_path, "predictions", **answers).figures
    # Exports that nobody reads do not count.
    assert found["bytes_written"] == 500
    assert found["bytes_read"] == 2400
    assert found["answered"] == 0.75
    assert found["groups_without_teacher"] == 0.0
    assert found["process_seconds"] == 2 * 4.0


def test_a_run_that_resumed_from_a_backup_has_each_step_once(tmp_path):
    (run,) = _trial("independent").runs
    _write(tmp_path / "r", run, rng=np.random.default_rng(0), shift=0.0)
    path = outputs.group_dir(tmp_path / "r", 0)
    group = collect.Group(path)
    assert not group.was_resumed
    before = collect.read([group])
    again = [{"event": "start", "time": 110.0, "step": 200}, _epoch_end(3, 0.1)]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n" + "\n".join(map(json.dumps, again)))
    group = collect.Group(path)
    after = collect.read([group])
    assert group.was_resumed and after.steps == before.steps
    assert after.values[-1] == 0.1
    # A second `fit` of a script is another training, which may be shorter.
    last = [{"event": "start", "time": 120.0, "step": 0}, _epoch_end(1, 0.7)]
    with (path / "metrics.jsonl").open("a") as file:
        for line in last:
            file.write(f"\n{json.dumps(line | {'fit': 2})}")
    group = collect.Group(path)
    assert not group.was_resumed
    assert collect.read([group]).values == (0.7,)
