"""Tests of the cross layers, and of the models that have them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import clicks
from models import criteo
from models import dlrm
from tests.cases import tiers

SIZE, RANK = 6, 2


def _inputs(seed=0):
    return np.random.default_rng(seed).normal(size=(2, 5, SIZE)).astype("f")


@pytest.fixture
def layer():
    """A cross layer none of whose weights is 0."""
    made = dlrm.LowRankCross(RANK)
    made(*_inputs())
    rng = np.random.default_rng(1)
    made.set_weights([rng.normal(size=w.shape) for w in made.weights])
    return made


def test_a_cross_is_that_of_the_equation(layer):
    x_0, x = _inputs()
    v, u, b = (np.asarray(w) for w in (layer.v, layer.u, layer.b))
    full = v @ u  # [d, d], of rank 2.
    expected = np.empty_like(x)
    for row in range(len(x)):
        expected[row] = x_0[row] * (full.T @ x[row] + b) + x[row]
    np.testing.assert_allclose(layer(x_0, x), expected, rtol=1e-5, atol=1e-5)
    # Without weights, a layer changes nothing.
    layer.set_weights([0 * w for w in layer.get_weights()])
    np.testing.assert_array_equal(layer(x_0, x), x)


def test_one_cross_learns_a_product():
    keras.utils.set_random_seed(0)
    x = np.array([[1, 1], [1, -1], [-1, 1], [-1, -1]], "float32")
    y = (x[:, :1] * x[:, 1:] > 0).astype("float32")
    bottom, rows = keras.Input((1,)), keras.Input((1, 1))
    crossed = dlrm.crossed(bottom, rows, num_crosses=1, rank=2)
    model = keras.Model([bottom, rows], dlrm.logit(crossed, ()))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss)
    inputs = [x[:, :1], x[:, 1:, np.newaxis]]
    for _ in range(150):
        model.train_on_batch(inputs, y)
    assert model.evaluate(inputs, y, verbose=0) < 0.01


@pytest.mark.parametrize(
    "build",
    [
        lambda: criteo.dcn(field_sizes=9, embedding_dim=4).model(),
        tiers.deep(
            lambda: clicks.build_dcn(embedding_dim=4, num_crosses=3, rank=2)
        ),
    ],
)
def test_a_model_is_saved_and_exported_and_built_of_other_layers(
    build, tmp_path
):
    model = build()
    crosses = [x for x in model.layers if isinstance(x, dlrm.LowRankCross)]
    assert len(crosses) == 3
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.integers(0, 9, (7, x.shape[1])).astype("int32")
        if x.dtype == "int32"
        else rng.normal(size=(7, x.shape[1])).astype("float32")
        for name, x in model.input.items()
    }
    expected = model(inputs).numpy()
    assert expected.shape == (7, 1) and len(set(expected[:, 0])) == 7

    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(inputs), expected)

    model.export(tmp_path / "1", verbose=False)
    served = tf.saved_model.load(tmp_path / "1")
    found = served.serve(inputs)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
