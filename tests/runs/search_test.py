"""The search of docs/tuning.md, by Optuna itself."""

import os
import pathlib
import subprocess
import sys

import pytest

from tests.cases import docs_blocks

pytest.importorskip("optuna")
pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("no_process_left"),
]
# A script of a user, whose weight is searched for.
_TRAIN = """
import sys

import keras
import numpy as np

import tfdistill

strategy = tfdistill.make_strategy()
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
with strategy.scope():
    student = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model = tfdistill.CodistillModel(
        student, teachers=tfdistill.teachers.Peers()
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.ForwardKL(),
        distillation_weight=float(sys.argv[1]),
    )
model.fit(
    x,
    y,
    batch_size=8,
    epochs=2,
    validation_data=(x, y),
    callbacks=tfdistill.callbacks.defaults(every_steps=4),
    verbose=0,
)
"""


def test_optuna_tries_two_weights(tmp_path):
    (text,) = (
        block.text
        for page in docs_blocks.pages()
        for block in docs_blocks.blocks(page)
        if block.file_name == "search_optuna.py"
    )
    text = text.replace("n_trials=20", "n_trials=2")
    text = text.replace("/tmp/search", str(tmp_path / "search"))
    (tmp_path / "search_optuna.py").write_text(text)
    (tmp_path / "my_train.py").write_text(_TRAIN)
    root = pathlib.Path(__file__).parents[2]
    here = pathlib.Path(sys.executable).parent
    programs = f"{here}{os.pathsep}{os.environ['PATH']}"
    path = f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "search_optuna.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "PATH": programs},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Trial 1 finished with value" in done.stderr
    assert "{'weight':" in done.stdout
