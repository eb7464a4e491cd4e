"""Tests of one task that runs a recipe: its files, options and exit codes."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from models import digits
from tests.cases import criteo as criteo_cases
from tests.cases import runs
from tfdistill.commands import run as local
from tfdistill.commands import train
from tfdistill.held_out import predictions
from tfdistill.launcher import group as supervised_group
from tfdistill.launcher import local_run
from tfdistill.recipes import outputs
from tfdistill.recipes import task

SHORT = ("num_steps=20", "evaluate_every_steps=10", "every_steps=10")


pytestmark = pytest.mark.usefixtures("one_device")


def _options(workdir, *changes, recipe="digits"):
    overrides = [f"--override={change}" for change in (*SHORT, *changes)]
    return [f"--recipe={recipe}", f"--workdir={workdir}", *overrides]


def _config(*changes):
    return recipes.override(recipes.get("digits"), changes)


def _as_group(monkeypatch, group, num_groups=2):
    monkeypatch.setenv("TFDISTILL_GROUP", str(group))
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", str(num_groups))


_BACKED_UP = (*SHORT, "checkpoints=best", "backup_every_steps=4")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a run of one group, and what it has printed."""
    workdir, printed = tmp_path_factory.mktemp("whole"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            tfdistill, "make_strategy", lambda *_: tf.distribute.get_strategy()
        )
        with contextlib.redirect_stdout(printed):
            assert train.main(_options(workdir, *_BACKED_UP)) == 0
    return workdir, printed.getvalue()


def test_one_group_on_one_machine_leaves_all_files(whole):
    workdir, printed = whole
    assert "group 0: 20 steps, accuracy 0." in printed

    recipe = recipes.read(workdir / "config.json")
    assert recipes.changed_names(recipe, _config(*_BACKED_UP)) == []
    results = json.loads((workdir / "results.json").read_text())
    (group,) = results["groups"]
    assert (group["group"], group["steps"], group["workers"]) == (0, 20, 1)
    assert group["examples"] == 20 * recipe.arguments["batch_size"]
    assert group["examples_per_second"] > 0
    assert results["mean"] == group["metrics"]
    assert results["agreement"] is None

    directory = workdir / "group_0"
    epochs = runs.records(directory, "epoch_end")
    assert [record["step"] for record in epochs] == [10, 20]
    # What was logged is what the predictions on file are worth.
    metrics = group["metrics"]
    assert metrics["accuracy"] == pytest.approx(epochs[-1]["val_accuracy"])
    assert metrics["log_loss"] == pytest.approx(
        epochs[-1]["val_loss"], rel=1e-4
    )
    assert list(directory.glob("tensorboard/*tfevents*"))
    assert not [p for p in workdir.rglob(".*") if p.is_file()], "drafts left"

    _, (images, labels) = digits.load()
    found = predictions.read(directory)
    np.testing.assert_array_equal(found.labels, labels)
    student = keras.models.load_model(directory / "student.keras")
    keras.models.load_model(directory / "best.keras")
    logits = student.predict(images, verbose=0)
    np.testing.assert_allclose(
        keras.ops.softmax(logits), found.probabilities, atol=1e-5
    )
    served = tf.saved_model.load(str(workdir / "exchange" / "group_0" / "20"))
    (answer,) = served.signatures["serving_default"](
        tf.constant(images)
    ).values()
    np.testing.assert_allclose(answer, logits, atol=1e-4)


def test_a_workdir_holds_one_run_of_one_configuration(tmp_path, refused):
    workdir = tmp_path / "run"
    outputs.write_config(_config(*SHORT), str(workdir))
    message = refused(train.main, *_options(workdir, "seed=1"))
    assert "config.json in seed. Choose another workdir" in message


def test_groups_learn_from_each_other_and_the_last_one_merges(
    tmp_path, monkeypatch
):
    changes = (
        "burn_in_steps=0",
        "refresh_every_steps=1",
        "dtype_policy=mixed_bfloat16",
        "checkpoints=all",
    )
    _as_group(monkeypatch, 0)
    assert train.main(_options(tmp_path, *changes)) == 0
    assert not (tmp_path / "results.json").exists()
    _as_group(monkeypatch, 1)
    assert train.main(_options(tmp_path, *changes)) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [group["group"] for group in results["groups"]] == [0, 1]
    # Group 1 began when the other had ended, so it could follow its teacher.
    (teacher,) = results["groups"][1]["teachers"]
    assert (teacher["name"], teacher["step"]) == ("group_0", 20)
    first, second = (
        predictions.read(tmp_path / f"group_{group}").probabilities
        for group in (0, 1)
    )
    assert results["agreement"] == {
        "disagreement": np.mean(first.argmax(1) != second.argmax(1)),
        "mean_distance": pytest.approx(
            np.abs(first - second).sum(1).mean() / 2
        ),
    }
    saved = sorted((tmp_path / "group_1" / "checkpoints").iterdir())
    assert [path.name for path in saved] == ["00001.keras", "00002.keras"]


def test_results_of_the_others_outlive_a_group_that_fails(tmp_path):
    def launch(options):
        """As if group 1 had failed after step 7 while the others went on."""
        for group in (0, 2):
            directory = _made(tmp_path / f"group_{group}")
            found = predictions.Distributions(
                probabilities=np.eye(2)[[0, group // 2]],
                labels=np.array([0, 1]),
            )
            outputs.write_predictions(directory, found)
            result = {"group": group, "recipe": "digits"}
            result["metrics"] = {"accuracy": group / 2}
            outputs.write_results(result, workdir=str(tmp_path), num_groups=3)
        log = _made(tmp_path / "group_1") / "metrics.jsonl"
        log.write_text('{"step": 5}\n{"step": 7, "loss": 2.0}\n{"step": 1')
        states = [("done", ""), ("failed", "it was killed"), ("done", "")]
        ended = [
            supervised_group.GroupResult(
                group=group,
                state=state,
                exit_codes={},
                failed_task=None,
                reason=reason,
                last_lines=(),
                restarts={},
                group_restarts=0,
            )
            for group, (state, reason) in enumerate(states)
        ]
        return local_run.RunResult(
            groups=tuple(ended), exit_code=137, workdir=tmp_path, exchange=""
        )

    arguments = ["--recipe=digits", f"--workdir={tmp_path}", "--num_groups=3"]
    arguments.append("--on_group_failure=continue")
    options = local.PROGRAM.parse(arguments)
    assert local.run(options, launch=launch) == 137
    results = outputs.read_results(tmp_path)
    first, failed, last = results["groups"]
    assert failed == {
        "group": 1,
        "state": "failed",
        "last_step": 7,
        "reason": "it was killed",
    }
    assert (first["state"], last["metrics"]) == ("done", {"accuracy": 1.0})
    assert results["mean"] == {"accuracy": 0.5}
    assert results["agreement"]["disagreement"] == 0.5


CLICKS = ("field_sizes=50", "embedding_dim=2", "batch_size=16")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        ("criteo_small", ["hidden_units=[4]"]),
        ("criteo_dcn", ["bottom_units=[4]", "rank=2", "top_units=[4]"]),
    ],
)
def test_a_click_recipe_is_judged_by_the_figures_of_clicks(
    recipe, layers, tmp_path, monkeypatch, capsys
):
    path = criteo_cases.write(tmp_path / "log.tsv", 300)
    cache = f"cache_dir={tmp_path / 'cache'}"
    changes = (*CLICKS, *layers, f"path={path}", cache)
    argv = _options(tmp_path / "run", *changes, recipe=recipe)
    assert train.main(argv) == 0
    assert "20 steps, auc 0." in capsys.readouterr().out
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (group,) = results["groups"]
    assert sorted(group["metrics"]) == [
        "auc",
        "calibration",
        "log_loss",
        "normalized_entropy",
    ]
    directory = tmp_path / "run" / "group_0"
    found = predictions.read(directory)
    assert found.probabilities.shape == found.labels.shape
    # The tables took over the sizes that the rows were hashed for.
    student = keras.models.load_model(directory / "student.keras")
    assert student.get_layer("embedding").input_dim == [50] * 26
    losses = [record.get("val_loss") for record in runs.records(directory)]
    last = [loss for loss in losses if loss is not None][-1]
    assert group["metrics"]["log_loss"] == pytest.approx(last, rel=1e-4)


@pytest.mark.deep
def test_a_recipe_of_two_tasks_is_judged_by_the_first(tmp_path, capsys):
    changes = ("rows_per_day=300", "embedding_dim=2", "hidden_units=[4]")
    argv = _options(
        tmp_path / "run", *changes, "batch_size=64", recipe="clicks_two_tasks"
    )
    assert train.main(argv) == 0
    (group,) = outputs.read_results(tmp_path / "run")["groups"]
    directory = tmp_path / "run" / "group_0"
    assert group["metrics"] == predictions.read(directory).figures()
    assert {"auc", "calibration"} < group["metrics"].keys()
    assert list(group["metrics_by_output"]) == ["sale"]
    assert group["metrics_by_output"]["sale"].keys() == group["metrics"].keys()
    (last,) = [r for r in runs.records(directory) if r.get("step") == 20][-1:]
    for name, found in (
        ("click", group["metrics"]),
        ("sale", group["metrics_by_output"]["sale"]),
    ):
        shown = last[f"val_{name}_log_loss"]
        assert found["log_loss"] == pytest.approx(shown, rel=1e-4)
        assert last[f"{name}_loss_weight"] > 0
    student = keras.models.load_model(directory / "student.keras")
    assert set(student.output) == {"click", "sale"}


def test_a_group_that_another_run_has_is_a_wrong_option(
    tmp_path, caplog, monkeypatch
):
    _as_group(monkeypatch, 0)
    hub = tfdistill.Exchange(tmp_path / "run" / "exchange")
    with hub.claim(0, run="/another"):
        argv = _options(tmp_path / "run", "exchange.every_steps=1")
        assert train.main(argv) == 2
    said = caplog.text
    assert f"process {os.getpid()} on host" in said


def _made(path):
    path.mkdir(parents=True)
    return path


def _killed_at(step, config, workdir):
    """Trains until an exception in the middle of an epoch."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == step:
                raise KeyboardInterrupt

    cluster = tfdistill.Cluster(
        workdir=str(workdir), exchange=str(workdir / "exchange")
    )
    with pytest.raises(KeyboardInterrupt):
        task.run(config, cluster, callbacks=[Stop()])


def test_the_same_command_goes_on_and_ends_alike(whole, tmp_path, capsys):
    _killed_at(15, _config(*_BACKED_UP), tmp_path)
    log = tmp_path / "group_0" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 15, "lo')
    assert train.main(_options(tmp_path, *_BACKED_UP)) == 0
    results = [
        outputs.read_results(workdir)["groups"][0]
        for workdir in (whole[0], tmp_path)
    ]
    assert [r["resumed_step"] for r in results] == [None, 12]
    assert results[0]["metrics"] == results[1]["metrics"]
    lines = runs.records(tmp_path / "group_0")
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    ends = [line["step"] for line in lines if line.get("event") == "epoch_end"]
    assert ends == sorted(set(ends))
    capsys.readouterr()
    assert train.main(_options(tmp_path, *_BACKED_UP)) == 0
    assert "complete, nothing to do" in capsys.readouterr().out


def test_diverged_training_is_an_error_and_leaves_no_predictions(tmp_path):
    with pytest.raises(RuntimeError, match="has diverged. Lower"):
        outputs.write_predictions(
            tmp_path,
            predictions.Distributions(
                probabilities=np.full([2, 2], np.nan), labels=np.array([0, 1])
            ),
        )
    assert not list(tmp_path.iterdir())


def test_missing_or_too_few_data_are_wrong_data(tmp_path, caplog):
    for recipe, change, words in (
        ("digits", "batch_size=100000", "`batch_size`"),
        ("cifar10_small", f"data_dir={tmp_path}", "CIFAR-10 must be at"),
    ):
        argv = _options(tmp_path / recipe, change, recipe=recipe)
        assert train.main(argv) == 65
        assert f"wrong data: {words}" in caplog.text


def test_errors_of_training_become_exit_codes(capsys, caplog):
    for kind, code, words in (
        (tf.errors.UnavailableError, 75, "lost another"),
        (tf.errors.InternalError, 1, "InternalError"),
    ):
        assert train.exit_code_of(kind(None, None, "odd")) == code
        assert words in capsys.readouterr().err + caplog.text


@pytest.mark.parametrize(
    "variables, options, words",
    [
        ({}, ["--recipe=digits"], "Pass --workdir=DIR"),
        ({"TF_CONFIG": "{"}, ["--recipe=digits", "--workdir=x"], "TF_CONFIG"),
        ({}, ["--recipe=digit", "--workdir=x"], "Did you mean 'digits'?"),
        ({}, ["--workdir=x"], "--recipe=NAME is missing"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path, monkeypatch, refused, variables, options, words
):
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert words in refused(train.main, *options)
    assert not list(tmp_path.iterdir())


def test_wrong_options_are_told_without_tensorflow(tmp_path):
    (tmp_path / "tensorflow.py").write_text("raise SystemExit('imported')")
    root = pathlib.Path(train.__file__).parent.parent
    found = subprocess.run(
        [
            *(sys.executable, "-m", "launch.train"),
            *_options(tmp_path / "run", "learning_rat=1"),
        ],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{root}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2, found.stderr
    assert "Did you mean learning_rate?" in found.stderr
    assert found.stdout == ""


def test_what_a_workload_refuses_is_a_wrong_option(tmp_path, caplog):
    for change, words in (
        ("dtype_policy=float8", "must be one of float32"),
        ("hidden_sizes=[-1]", "model doesn't accept these arguments"),
    ):
        assert train.main(_options(tmp_path / "run", change)) == 2
        assert words in caplog.text


def test_seeds_differ_by_group_and_by_run_unless_groups_mix():
    workload = _config().workload()
    runs = [dataclasses.replace(workload, seed=seed) for seed in range(5)]
    seeds = {task.initial_seed(r, group) for r in runs for group in range(5)}
    assert len(seeds) == 25
    mixed = _config().by_method("averaging").workload()
    assert task.initial_seed(mixed, 0) == task.initial_seed(mixed, 1)
