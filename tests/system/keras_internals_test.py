"""Fails on the day a private Keras name that we rely on changes."""

import re

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from tfdistill.doctor import checks
from tfdistill.system import keras_internals


def test_this_keras_has_what_we_need():
    keras_internals.check_keras()


def test_an_older_keras_is_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.11.3")
    with pytest.raises(RuntimeError, match=r"3.12 to 3.16.*; received 3.11.3"):
        keras_internals.check_keras()


@pytest.mark.parametrize("version", ["3.17.0.dev2026", "4.0.0"])
def test_a_newer_keras_is_warned_of(monkeypatch, version):
    monkeypatch.setattr(keras, "__version__", version)
    said = rf"3.12 to 3.16.*; received {version}, .*pip install 'keras<3.17'"
    with pytest.warns(UserWarning, match=said):
        keras_internals.check_keras()
    first, *others = checks.of_tensorflow()
    assert first.status == checks.WARNING and re.search(said, first.seen)
    assert [result.status for result in others] == [checks.OK]


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="received the backend 'jax'"):
        keras_internals.check_keras()


def test_determinism_can_be_asked_for():
    assert not keras_internals.is_deterministic()
    tf.config.experimental.enable_op_determinism()
    try:
        assert keras_internals.is_deterministic()
    finally:  # There is no public way back.
        tf_config.disable_op_determinism()


def _batches(context):
    """Batches of a shuffled data set, the last of which is smaller."""
    numbers = tf.data.Dataset.range(23)
    return numbers.shuffle(23, 4, reshuffle_each_iteration=False).batch(2)


def test_batches_that_are_left_out_change_none_after_them(two_replicas):
    """Of a function, whose iterators know the batches of each worker."""

    def read(iterator):
        return [
            [part.numpy().tolist() for part in locals_of(batch)]
            for batch in iterator
        ]

    locals_of = two_replicas.experimental_local_results
    source = two_replicas.distribute_datasets_from_function(_batches)
    expected = read(iter(source))
    for num_batches in (1, 6):
        after = keras_internals._iterator_after(source, num_batches)
        assert read(after) == expected[num_batches:]
    # The next iterator is whole.
    assert read(iter(source)) == expected


def test_frozen_are_the_weights_that_could_be_trained():
    """Not moving averages and seeds, which a step changes."""
    frozen = keras.layers.Dense(4, trainable=False)
    adapted, norm = keras.layers.Dense(4), keras.layers.BatchNormalization()
    last = keras.layers.BatchNormalization(trainable=False)
    inner = keras.Sequential([frozen, norm, keras.layers.Dropout(0.5)])
    model = keras.Sequential([keras.Input((4,)), inner, adapted, last])
    adapted.enable_lora(2)
    found = {id(v) for v in keras_internals.frozen_weights(model)}
    expected = [*frozen.weights, adapted._kernel, last.gamma, last.beta]
    assert found == {id(v) for v in expected}
