"""What a script must show of the method that its environment named."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from tfdistill.commands import compare
from tfdistill.commands import run
from tfdistill.comparison import experiment
from tfdistill.comparison import scripts
from tfdistill.comparison import trials
from tfdistill.held_out import predictions
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes


@pytest.fixture
def script(tmp_path):
    """A script, as the third trial of codistillation."""
    (tmp_path / "my_train.py").write_text("")
    path = str(tmp_path / "my_train.py")
    made = scripts.Script.of(path, held_out="day", command=["--epochs=3"])
    return made.changed({"seed": 2}).by_method("codistill")


def _write(directory, fit=".", kept=None, **changes):
    """Writes what HeldOutPredictions would, in two groups."""
    kept = kept or predictions.Distributions(
        probabilities=np.full([4, 2], 0.5), labels=np.array([0, 1, 0, 1])
    )
    for group in (0, 1):
        place = outputs.group_dir(directory, group) / "held_out" / fit
        predictions.save(place / "day.npz", kept)
        found = {
            "obeyed": {"method": "codistill", "seed": 2, "share": "disjoint"},
            "first_loss": 0.7,
            "exports": {"every_steps": 25},
            "teachers": [{"name": f"group_{1 - group}"}],
        }
        (place / "day.json").write_text(json.dumps(found | changes))


def test_an_ordinary_script_is_run_as_it_stands(tmp_path):
    path = tmp_path / "my_train.py"
    path.write_text("import keras")
    options = compare.PROGRAM.parse(
        [str(path), "--teachers=own-past", "--", "--epochs=3"]
    )
    made = compare._compared(options).changed({"seed": 2})
    made = made.by_method("codistill_shared")
    runner = ["-m", "tfdistill", "--teachers=own-past"]
    assert made.program(path) == [*runner, str(path), "--epochs=3"]
    assert made.environ["TFDISTILL_HELD_OUT"] == "validation"
    assert made.environ["TFDISTILL_SEED"] == "2"
    setup = trials.Setup(recipe=made, weight_decay=0.3)
    (run,) = trials.Variant(method="weight_decay").trial(setup, 0).runs
    assert run.recipe.environ["TFDISTILL_METHOD"] == "weight_decay"
    assert run.recipe.environ["TFDISTILL_WEIGHT_DECAY"] == "0.3"


def _own_methods(tmp_path, *methods, text="import keras"):
    path = tmp_path / "my_train.py"
    path.write_text(text)
    options = compare.PROGRAM.parse(
        [str(path), "--distillation-weight=1", "--methods=independent"]
        + [f"--method={each}" for each in methods]
    )
    recipe = compare._compared(options)
    return trials.Setup(recipe=recipe), compare._variants(options, recipe)


def test_the_same_command_resumes_after_other_comparisons(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate(("one", "other"), 1):
        pathlib.Path(f"{name}.py").write_text("import keras")
        directory = run.new_directory(
            tmp_path / "comparisons", "last_comparison"
        )
        experiment.Experiment(
            directory,
            setup=trials.Setup(
                recipe=scripts.Script.of(
                    f"{name}.py", held_out=None, command=[]
                )
            ),
            variants=trials.parse_methods("independent"),
            num_trials=4,
        )._write_record()
        (directory / "runs" / "done").mkdir(parents=True)
        (directory / "runs" / "done" / "results.json").write_text("{}")
        assert directory.name == str(number)
    assert compare.main(["one.py", "--report-only"]) == 1  # No whole trial.
    first = tmp_path / "comparisons" / "1"
    assert f"comparison in {first}\n" in capsys.readouterr().out
    assert pathlib.Path("last_comparison").resolve() == first
    assert len(list(first.parent.iterdir())) == 2


def test_a_method_of_ones_own_is_options_on_top_of_another(tmp_path):
    setup, variants = _own_methods(
        tmp_path,
        "heavy:distillation_weight=2,every-steps=10",
        "past:of=own_past,distillation_loss=values",
    )
    assert [each.name for each in variants] == ["independent", "heavy", "past"]
    assert variants[1].describe == (
        "codistill_shared with distillation_weight=2,every_steps=10"
    )
    script = str(tmp_path / "my_train.py")
    for variant, method, options, every in (
        (variants[1], "codistill_shared", ["--distillation-weight=2"], "10"),
        (
            variants[2],
            "own_past",
            ["--distillation-weight=1.0", "--distillation-loss=values"],
            "",
        ),
    ):
        (run,) = variant.trial(setup, 0).runs
        assert run.recipe.program(script) == [
            "-m",
            "tfdistill",
            *options,
            script,
        ]
        assert run.recipe.environ["TFDISTILL_METHOD"] == method
        assert run.recipe.environ["TFDISTILL_EVERY_STEPS"] == every
        # As a comparison that is resumed finds it.
        kept = json.loads(json.dumps(dataclasses.asdict(variant)))
        assert trials.Variant(**kept) == variant


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("heavy", "NAME:OPTION=VALUE"),
        ("codistill:every_steps=10", "my_codistill:of=codistill"),
        ("heavy:distilation_weight=2", "Did you mean distillation_weight?"),
        ("heavy:of=independent,every_steps=9", "received of=independent"),
        ("heavy:every_steps=often", "often"),
    ],
)
def test_what_no_method_of_ones_own_is(text, reason, tmp_path, capsys):
    with pytest.raises((ValueError, SystemExit)) as found:
        _own_methods(tmp_path, text)
    assert reason in str(found.value) + capsys.readouterr().err


def test_a_recipe_has_no_method_of_ones_own():
    (variant,) = map(compare._own_method, ["heavy:every_steps=10"])
    setup = trials.Setup(recipe=recipes.get("digits"))
    with pytest.raises(ValueError, match="--sweep=METHOD:FIELD"):
        variant.trial(setup, 0)


def test_a_script_that_obeyed_has_results(script, tmp_path):
    _write(tmp_path / "run")
    assert script.finish(tmp_path / "run", 2) == ""
    written = outputs.read_results(tmp_path / "run")
    assert written["mean"]["log_loss"] == pytest.approx(np.log(2))
    assert predictions.read(tmp_path / "run" / "group_1").labels.size == 4
    _write(tmp_path / "run", "fit_2", steps=7)
    assert script.finish(tmp_path / "run", 2) == ""
    assert outputs.read_results(tmp_path / "run")["groups"][0]["steps"] == 7


def test_a_regression_has_results_without_labels(script, tmp_path):
    labels = np.array([1.0, 2.0, 3.0])
    _write(
        tmp_path / "run",
        kept=predictions.Values(values=labels + 1, labels=labels),
    )
    assert script.finish(tmp_path / "run", 2) == ""
    written = outputs.read_results(tmp_path / "run")
    assert written["mean"]["unexplained_variance"] == pytest.approx(1.5)
    assert written["agreement"] == {"mean_distance": 0.0}


@pytest.mark.parametrize(
    "obeyed",
    [
        {},
        {"method": "codistill", "seed": 1},
        {"method": "own_past", "seed": 2},
    ],
)
def test_a_script_that_did_not_obey_has_none(script, tmp_path, obeyed):
    _write(tmp_path / "run", obeyed=obeyed)
    why = script.finish(tmp_path / "run", 2)
    assert re.search("asked for .*'codistill', 'seed': 2.*make_strategy", why)
    assert not (tmp_path / "run" / "results.json").exists()


def test_predictions_of_another_name_are_told(script, tmp_path):
    assert "HeldOutPredictions('day', (x, y))" in script.finish(tmp_path, 2)


def test_a_script_that_sets_its_own_seed_is_found(script, tmp_path):
    _write(tmp_path / "one")
    other = {"method": "codistill", "seed": 1}
    _write(tmp_path / "two", obeyed=other, first_loss=0.7000001)
    assert "another seed gave the same loss" in script.finish(
        tmp_path / "one", 2
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--methods=label_smoothing"], "Methods of scripts: independent"),
        (["--override=learning_rate=1"], "only seed and every_steps"),
        (["--budget=total"], "sets its own number of steps"),
        (["--recipe=digits"], "received my_train.py and digits"),
    ],
)
def test_what_a_script_cannot_do_is_told_at_once(
    tmp_path, monkeypatch, refused, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_train.py").write_text("")
    given = ["my_train.py", "--held-out=day", *options]
    assert message in refused(compare.main, *given)
    assert not (tmp_path / "comparisons").exists()
