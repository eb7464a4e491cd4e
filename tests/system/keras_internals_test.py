"""Fails on the day a private Keras name that we rely on changes."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.backend.tensorflow import trainer as tf_trainer
from keras.src.optimizers import base_optimizer

from tfdistill import data
from tfdistill.system import keras_internals


def test_this_keras_has_what_we_need():
    keras_internals.check_keras()


def test_another_keras_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(tf_optimizer.TFOptimizer, "_all_reduce_sum_gradients")
    with pytest.raises(RuntimeError, match="_all_reduce_sum_gradients"):
        keras_internals.check_keras()


def test_another_signature_is_refused(monkeypatch):
    monkeypatch.setattr(
        tf_trainer.TensorFlowTrainer, "_symbolic_build", lambda self, x: None
    )
    with pytest.raises(RuntimeError, match="data_batch"):
        keras_internals.check_keras()


def test_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError, match="received the backend 'jax'"):
        keras_internals.check_keras()


def test_fit_still_builds_through_the_method_that_we_replace():
    for method in ("fit", "evaluate"):
        source = inspect.getsource(
            getattr(tf_trainer.TensorFlowTrainer, method)
        )
        assert "self._maybe_symbolic_build(iterator=epoch_iterator)" in source


def test_the_optimizer_still_clips_before_it_sums():
    source = inspect.getsource(
        base_optimizer.BaseOptimizer._backend_apply_gradients
    )
    assert source.index("_clip_gradients") < source.index(
        "_backend_update_step"
    )
    source = inspect.getsource(tf_optimizer.TFOptimizer._backend_update_step)
    assert "self._all_reduce_sum_gradients(grads_and_vars)" in source


def test_the_sum_is_left_to_us_in_the_inner_optimizer_too():
    inner = keras.optimizers.SGD()
    outer = keras.optimizers.LossScaleOptimizer(inner)
    keras_internals.leave_reduction_to_caller(outer)
    pairs = [("gradient", "variable")]
    assert inner._all_reduce_sum_gradients(pairs) == pairs
    assert outer._all_reduce_sum_gradients(pairs) == pairs


def test_a_variable_is_found_by_itself_and_by_a_replica_s_copy(two_replicas):
    with two_replicas.scope():
        first, second = (keras.Variable(np.zeros(2)) for _ in range(2))
        optimizer = keras.optimizers.SGD()
        optimizer.build([first, second])
    copies = two_replicas.experimental_local_results(second.value)
    assert len(copies) == 2
    found = [
        keras_internals.variable_index(optimizer, variable)
        for variable in (first, second, *copies)
    ]
    assert found == [0, 1, 1, 1]


def test_the_optimizer_is_built_on_the_chosen_variables_alone():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(), "mse")
    scope = tf.distribute.get_strategy().scope
    spec = (tf.TensorSpec([None, 2]), tf.TensorSpec([None, 3]))
    keras_internals.build_from_spec(
        model, spec, scope=scope, optimized=lambda m: m.trainable_variables[1:]
    )
    assert model.optimizer.built
    shapes = [v.shape.as_list() for v in model.optimizer.variables]
    assert shapes == [[], [], [3], [3]]


def test_layers_inside_layers_are_found():
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = keras.layers.Dense(1)

    outer = Outer()
    model = keras.Sequential([outer])
    assert keras_internals.all_layers(model) == [model, outer, outer.inner]


def test_a_stateless_scope_is_noticed():
    assert not keras_internals.in_stateless_scope()
    with keras.StatelessScope():
        assert keras_internals.in_stateless_scope()


def test_the_seed_is_read_without_drawing_from_it():
    tf.random.set_seed(17)
    expected = tf.random.uniform([3]).numpy()
    tf.random.set_seed(17)
    assert keras_internals.global_seed() == 17
    assert (tf.random.uniform([3]).numpy() == expected).all()


def test_iterators_of_strategies_are_made_without_autotuning(two_replicas):
    keras_internals.pass_batches_on_without_autotune()
    keras_internals.pass_batches_on_without_autotune()  # Twice does no harm.
    source = data.without_autotune(tf.data.Dataset.range(8).batch(2))
    assert source.options().autotune.enabled is False
    # The iterator itself says nothing of its options; what it is made of does.
    made = keras_internals.multi_device_iterator_ops._create_device_dataset
    assert made.has_no_autotune
    batches = two_replicas.experimental_distribute_dataset(source)
    found = [
        int(value)
        for batch in batches
        for part in two_replicas.experimental_local_results(batch)
        for value in part
    ]
    assert sorted(found) == list(range(8))
