"""Students whose layers hold vocabularies."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import lookup_tables
from tfdistill import savedmodel
from tfdistill import student_graph

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


def test_the_tables_in_use_are_found_at_any_depth_and_once():
    inner = _text_model()
    outer = keras.Sequential([keras.Input((), dtype="string"), inner])
    assert len(_graph(outer).tables) == 1
    assert len(_graph(inner).tables) == 1
    assert lookup_tables.used(outer, []) == []


def test_a_text_student_is_exported_with_its_vocabulary(tmp_path):
    model = _text_model()
    writer = savedmodel.SavedModelWriter(_graph(model))
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


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
