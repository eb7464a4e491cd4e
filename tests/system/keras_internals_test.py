"""Fails on the day a private Keras name that we rely on changes."""

import inspect
import re

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as tf_config

from tests.cases import tiers
from tfdistill import data
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


def test_fit_still_builds_through_the_method_that_we_replace():
    for method in ("fit", "evaluate"):
        source = inspect.getsource(getattr(keras.Model, method))
        assert "self._maybe_symbolic_build(iterator=epoch_iterator)" in source


def test_the_sum_is_left_to_us_in_the_inner_optimizer_too():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    keras_internals.leave_reduction_to_caller(outer)
    pairs = [("gradient", "variable")]
    assert inner._all_reduce_sum_gradients(pairs) == pairs
    assert outer._all_reduce_sum_gradients(pairs) == pairs


def test_iterators_of_strategies_are_made_without_autotuning(two_replicas):
    keras_internals.prepare()
    made = keras_internals.multi_device_iterator_ops._create_device_dataset
    keras_internals.prepare()  # Twice does no harm.
    source = data.without_autotune(tf.data.Dataset.range(8).batch(2))
    assert source.options().autotune.enabled is False
    # The iterator itself says nothing of its options; what makes it is ours.
    assert (
        made is keras_internals.multi_device_iterator_ops._create_device_dataset
    )
    assert made.__module__ == keras_internals.__name__
    batches = two_replicas.experimental_distribute_dataset(source)
    found = [
        int(value)
        for batch in batches
        for part in two_replicas.experimental_local_results(batch)
        for value in part
    ]
    assert sorted(found) == list(range(8))


def _batches(context=None):
    """Batches of a shuffled data set, the last of which is smaller."""
    numbers = tf.data.Dataset.range(23).shuffle(23, seed=4)
    return numbers.batch(2 if context else 4)


_SOURCES = {
    "plain": lambda strategy: _batches(),
    "distributed": lambda strategy: strategy.experimental_distribute_dataset(
        _batches()
    ),
    "function": lambda strategy: strategy.distribute_datasets_from_function(
        _batches
    ),
}


@pytest.mark.parametrize(
    "make",
    [
        _SOURCES["plain"],
        tiers.deep(_SOURCES["distributed"]),
        _SOURCES["function"],
    ],
    ids=_SOURCES,
)
def test_batches_that_are_left_out_change_none_after_them(two_replicas, make):
    def read(iterator):
        return [
            [part.numpy().tolist() for part in locals_of(batch)]
            for batch in iterator
        ]

    locals_of = two_replicas.experimental_local_results
    expected = read(iter(make(two_replicas)))
    assert len(expected) == 6
    assert [len(part) for part in expected[-1]] != [
        len(part) for part in expected[0]
    ]
    for num_batches in (0, 1, 5, 6):
        # Reads `_cloned_datasets`, `_datasets` and `_input_workers` of
        # tensorflow/python/distribute/input_lib.py: nothing public begins an
        # iterator of a strategy after some batches.
        source = make(two_replicas)
        found = read(keras_internals._iterator_after(source, num_batches))
        assert found == expected[num_batches:]


def test_an_epoch_is_whole_after_one_that_was_resumed(two_replicas):
    """What was left out of one iterator is in the next."""
    source = two_replicas.distribute_datasets_from_function(_batches)
    next(keras_internals._iterator_after(source, 4))
    parts = [
        part
        for batch in source
        for part in two_replicas.experimental_local_results(batch)
    ]
    numbers = [int(number) for part in parts for number in part]
    assert sorted(numbers) == [*range(23)]


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
