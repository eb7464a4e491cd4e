"""The files of docs/workload.md, on a few rows of such data."""

import csv

import keras
import numpy as np
import pytest

import tfdistill
from launch import recipes
from tests.cases import docs_blocks
from tests.cases import tiers


def _clicks(path):
    rng = np.random.default_rng(0)
    with open(path, "w", newline="") as file:
        for label in rng.integers(0, 2, 300):
            csv.writer(file).writerow([label, *rng.choice(["a", "b"], 3)])


def _images(path):
    for name in ("cat", "dog"):
        (path / name).mkdir(parents=True)
        for i in range(100):
            image = np.random.default_rng(i).random((8, 8, 3))
            keras.utils.save_img(path / name / f"{i}.png", image)


def _texts(path):
    path.write_text("good\ta fine day\nbad\tno day at all\n" * 100)


@pytest.mark.parametrize(
    "name, write",
    [("clicks", _clicks), ("images", _images), tiers.deep("text", _texts)],
)
def test_a_workload_of_ones_own_data_trains(name, write, tmp_path, monkeypatch):
    (block,) = (
        block
        for block in docs_blocks.blocks("docs/workload.md")
        if block.file_name == f"my_{name}.py"
    )
    (tmp_path / block.file_name).write_text(block.text)
    write(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    recipe = recipes.get(block.file_name).changed(
        {"path": "data", "num_steps": 2, "batch_size": 16}
    )
    workload = recipe.workload()
    train, held_out = workload.datasets(tfdistill.Cluster.from_env())
    model = tfdistill.CodistillModel(
        workload.model(),
        teachers=tfdistill.teachers.FixedTeacher(workload.model()),
    )
    model.compile(
        workload.optimizer(),
        workload.loss,
        metrics=workload.metrics(),
        distillation_loss=workload.distillation_loss
        or tfdistill.losses.SoftTargetCrossEntropy(from_logits=True),
    )
    model.fit(
        train,
        steps_per_epoch=2,
        validation_data=held_out,
        shuffle=False,
        verbose=0,
    )
    logs = model.history.history
    assert np.isfinite(logs["val_loss"]).all()
    assert logs["distillation_loss"][-1] > 0
