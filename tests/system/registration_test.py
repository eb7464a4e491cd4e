"""`import tfdistill` is enough to read a `.keras` file with our classes."""

import subprocess
import sys

import keras
import numpy as np
import pytest

import tfdistill

_LOAD = """
import sys, tfdistill, keras
assert not any(name.startswith("tfdistill.embedding") for name in sys.modules)
model = keras.saving.load_model(sys.argv[1])
print(type(model.layers[0]).__name__, type(model.optimizer).__name__)
print(*model(keras.ops.array([[1, 2]])).numpy()[0])
"""
# Every class that registers must have had a stub, and all are classes now.
_NAMES = """
import importlib, pkgutil
known = keras.saving.get_custom_objects()
before = {name for name in known if name.startswith("tfdistill>")}
for module in pkgutil.walk_packages(tfdistill.__path__, "tfdistill."):
    importlib.import_module(module.name)
after = {name for name in known if name.startswith("tfdistill>")}
print(*(after ^ before))
print(*[name for name in after if not isinstance(known[name], type)])
"""


def _run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = keras.Sequential(
        [
            keras.Input([2], dtype="int32"),
            tfdistill.layers.ShardedEmbedding([5, 7], 3),
            keras.layers.Flatten(),
            keras.layers.Dense(2),
        ]
    )
    model.compile(tfdistill.optimizers.LARS(0.1), "mse")
    path = tmp_path_factory.mktemp("file") / "model.keras"
    model.save(path)
    return path, model.predict(np.array([[1, 2]]), verbose=0)[0]


def test_importing_the_package_before_keras_is_enough(saved):
    """All other tests import Keras first."""
    path, expected = saved
    kinds, outputs, without_stub, without_class = _run(
        _LOAD + _NAMES, str(path)
    )[-4:]
    assert kinds == "ShardedEmbedding LARS"
    np.testing.assert_allclose(
        np.fromstring(outputs, sep=" "), expected, rtol=1e-5
    )
    assert without_stub == without_class == ""
