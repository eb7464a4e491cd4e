"""Students whose layers hold vocabularies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph

WORDS = ["a b c d e", "f g h a"]


def _text_model(words=WORDS):
    vectorize = keras.layers.TextVectorization(
        max_tokens=30, output_sequence_length=4
    )
    vectorize.adapt(words)
    inputs = keras.Input((), dtype="string")
    hidden = keras.layers.Embedding(30, 5)(vectorize(inputs))
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def _graph(model):
    return student_graph.StudentGraph(model, tf.TensorSpec([None], tf.string))


def test_a_text_student_is_exported_with_its_vocabulary(tmp_path):
    model = _text_model()
    writer = saved_model.SavedModelWriter(_graph(model))
    text = tf.constant(["a b", "h z", ""])
    for step in range(2):
        directory = tmp_path / str(step)
        directory.mkdir()
        writer.write(str(directory), writer.snapshot())
        loaded = tf.saved_model.load(str(directory))
        np.testing.assert_allclose(loaded.serve(text), model(text), rtol=1e-6)
        model.set_weights([w + 1 for w in model.get_weights()])


def test_another_vocabulary_is_another_graph():
    same, again = _graph(_text_model()), _graph(_text_model())
    other = _graph(_text_model(["h g f e", "d c b a"]))
    assert same.fingerprint == again.fingerprint
    assert same.fingerprint != other.fingerprint


_SPEC = tf.TensorSpec([None, 2], tf.float32)


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        (_SPEC, ["x"]),
        ([_SPEC, _SPEC], ["x_0", "x_1"]),
        ({"a": [_SPEC, _SPEC], "b": {"c": _SPEC}}, ["a_0", "a_1", "b_c"]),
        ({"C1-x/y": _SPEC, "2nd": _SPEC}, ["x_2nd", "C1_x_y"]),
    ],
)
def test_names_are_legal_and_in_the_order_of_the_leaves(structure, expected):
    assert student_graph.leaf_names(structure, "x") == expected


def _fingerprint(model):
    return student_graph.StudentGraph(model, cases.input_spec()).fingerprint


def test_fingerprints_agree_across_strategies(two_replicas):
    with two_replicas.scope():
        mirrored = _fingerprint(cases.deep(1))
    assert mirrored == _fingerprint(cases.deep(1))


def test_fingerprints_ignore_names_and_values():
    inputs = keras.Input((4,), name="other")
    hidden = keras.layers.Dense(5, activation="tanh", name="mine")(inputs)
    named = keras.Model(inputs, keras.layers.Dense(3)(hidden), name="zzz")
    assert _fingerprint(named) == _fingerprint(cases.deep(2))


def _scaled(factor):
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Rescaling(factor)(inputs))


def _wired(swap):
    inputs = keras.Input((4,))
    first, last = inputs[:, :2], inputs[:, 2:]
    return keras.Model(inputs, last - first if swap else first - last)


def _with_policy(policy):
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, dtype=policy)(inputs))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (cases.deep, lambda: cases.deep(activation="relu")),
        (cases.linear, lambda: cases.linear(classes=4)),
        (cases.linear, cases.deep),
        (lambda: _scaled(0.5), lambda: _scaled(0.25)),
        (lambda: _wired(False), lambda: _wired(True)),
        (cases.linear, lambda: _with_policy("bfloat16")),
        (cases.linear, lambda: _with_policy("mixed_bfloat16")),
    ],
    ids="activation classes depth constant wiring dtype mixed".split(),
)
def test_fingerprints_tell_computations_apart(one, other):
    assert _fingerprint(one()) != _fingerprint(other())


def _with_function(factor):
    @tf.function
    def scale(x):
        return x * factor

    class Scale(keras.layers.Layer):
        def call(self, x):
            return tf.cond(tf.shape(x)[0] > 1, lambda: scale(x), lambda: x)

    return keras.Sequential([keras.Input((4,)), Scale()])


def test_fingerprints_see_inside_called_functions():
    alone = _fingerprint(_with_function(2.0))
    assert alone == _fingerprint(_with_function(2.0))
    assert alone != _fingerprint(_with_function(3.0))


def test_fingerprints_ignore_the_configuration_of_a_process():
    # A coordinator of servers has another one than a worker.
    alone = _fingerprint(_with_function(2.0))
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        configured = _fingerprint(_with_function(2.0))
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": True})
    assert configured == alone


def test_a_variable_that_keras_does_not_know_is_refused():
    class Raw(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(1.0, name="my_scale")

        def call(self, x):
            return x * self.scale

    model = keras.Sequential([keras.Input((4,)), Raw()])
    with pytest.raises(ValueError, match="my_scale.*add_weight"):
        student_graph.StudentGraph(model, cases.input_spec())
