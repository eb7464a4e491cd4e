""""""

import keras
import numpy as np
import pytest

from models.language_model import lstm

_FEATURES, _UNITS, _STEPS = 3, 4, 5


def _layer():
    """A layer whose every weight has a value of its own."""
    inputs = keras.Input((_STEPS, _FEATURES))
    layer = lstm.LayerNormLSTM(_UNITS)
    model = keras.Model(inputs, layer(inputs))
    rng = np.random.default_rng(0)
    for variable in model.variables:
        variable.assign(rng.normal(size=variable.shape))
    return model


def _sequences(number=2):
    shape = (number, _STEPS, _FEATURES)
    return np.random.default_rng(1).normal(size=shape).astype("float32")


def _normalized(x):
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)


def _sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def _expected(model, sequences):
    """Equations 20 to 22 in the supplement of Ba et al. 2016, by NumPy."""
    values = {v.path.split("/")[-1]: v.numpy() for v in model.variables}
    values["input_kernel"] = next(
        v.numpy() for v in model.variables if "input_kernel" in v.path
    )
    hidden = cell = np.zeros([len(sequences), _UNITS])
    outputs = []
    for step in range(sequences.shape[1]):
        projected = sequences[:, step] @ values["input_kernel"]
        recurrent = hidden @ values["recurrent_kernel"]
        gates = (
            _normalized(recurrent) * values["recurrent_gain"]
            + _normalized(projected) * values["input_gain"]
            + values["bias"]
        )
        forget, write, read, new = np.split(gates, 4, axis=-1)
        cell = _sigmoid(forget) * cell + _sigmoid(write) * np.tanh(new)
        scaled = _normalized(cell) * values["cell_gain"] + values["cell_bias"]
        hidden = _sigmoid(read) * np.tanh(scaled)
        outputs.append(hidden)
    return np.stack(outputs, axis=1)


def test_outputs_are_those_of_the_formulas():
    model, sequences = _layer(), _sequences()
    found = model.predict(sequences, verbose=0)
    expected = _expected(model, sequences.astype("float64"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_saved_layer_comes_back(tmp_path):
    model, sequences = _layer(), _sequences()
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(
        loaded.predict(sequences, verbose=0),
        model.predict(sequences, verbose=0),
    )
    assert loaded.layers[-1].units == _UNITS


@pytest.mark.deep
def test_bfloat16_computes_near_the_same():
    model, sequences = _layer(), _sequences()
    keras.config.set_dtype_policy("mixed_bfloat16")
    rough = _layer()
    found = keras.ops.cast(rough(sequences), "float32")
    assert rough.layers[-1].bias.dtype == "float32"
    np.testing.assert_allclose(found, model(sequences), atol=0.1)
