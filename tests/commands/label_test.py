"""Labels of a recipe's examples, by the command and in a training."""

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from launch import recipes
from tests.cases import runs
from tfdistill import data
from tfdistill import labels
from tfdistill.commands import label
from tfdistill.recipes import task

_STEPS = 12
_OVERRIDES = [
    f"num_steps={_STEPS}",
    "evaluate_every_steps=6",
    "burn_in_steps=0",
    "every_steps=6",
    "start_together_secs=0",
]


def _recipe():
    return recipes.override(recipes.get("digits"), _OVERRIDES)


pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A student of the recipe, exported untrained."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    student = _recipe().workload().model()
    tfdistill.CodistillModel(student).export(path, verbose=False)
    return path


def _label(teacher, output, *options):
    return label.main(
        [
            f"--teacher={teacher}",
            "--recipe=digits",
            f"--output={output}",
            *(f"--override={override}" for override in _OVERRIDES),
            *options,
        ]
    )


def _train(tmp_path, recipe, group=0):
    cluster = tfdistill.Cluster(
        group=group,
        num_groups=1 + group,
        workdir=str(tmp_path),
        exchange=str(tmp_path / "exchange"),
    )
    result = task.run(recipe, cluster)
    rows = runs.records(tmp_path / f"group_{group}")
    weights = [r["distillation_weight"] for r in rows if "loss" in r]
    return result, weights


@pytest.mark.deep
def test_a_recipe_learns_from_its_labels_as_from_the_model(
    teacher, tmp_path, capsys
):
    assert _label(teacher, tmp_path / "labels") == 0
    num_rows = labels.read(tmp_path / "labels").num_rows
    assert f"labels of {num_rows:,} examples" in capsys.readouterr().out
    written = {"directory": f"{tmp_path}/labels"}
    found, weights = _train(
        tmp_path / "a", _recipe().by_method("labels", **written)
    )
    offline = {"saved_model": str(teacher)}
    expected, _ = _train(
        tmp_path / "b", _recipe().by_method("offline_distillation", **offline)
    )
    assert weights and set(weights) == {1.0}
    loss = found["metrics"]["log_loss"]
    assert loss == pytest.approx(expected["metrics"]["log_loss"], rel=1e-4)


def test_the_labels_of_other_steps_or_of_another_group_are_refused(
    teacher, tmp_path
):
    output = tmp_path / "labels_0"
    assert _label(teacher, output, "--num_steps=3", "--top_k=4") == 0
    directory = str(tmp_path / "labels_{group}")
    given = _recipe().by_method("labels", directory=directory)
    with pytest.raises(tf.errors.InvalidArgumentError, match="other data"):
        _train(tmp_path / "a", given)
    with pytest.raises(data.DataError, match="complete labels in .*_1"):
        _train(tmp_path / "b", given, group=1)


def test_a_teacher_that_is_none_is_named(tmp_path, caplog):
    np.savez(tmp_path / "a.npz", a=1)
    assert _label(tmp_path, tmp_path / "labels") == 1
    assert "saved_model.pb" in caplog.text
