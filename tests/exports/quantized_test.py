"""Versions of 8 or 4 bits a weight, against NumPy: codes, outputs, memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.exports import graph_check
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph

_ROWS, _DIM = 500, 15
_DTYPES = pytest.mark.parametrize("dtype", quantized.DTYPES)
_ID = np.random.default_rng(0).integers(0, _ROWS, (32, 2)).astype("int32")
_Y = np.random.default_rng(1).integers(0, 3, 32)


def _student(seed=0):
    """A table of ours, one of Keras', kernels of two and three axes."""
    inputs = keras.Input((2,), dtype="int32")
    ours = tfdistill.layers.ShardedEmbedding(_ROWS, _DIM, name="ours")(inputs)
    theirs = keras.layers.Embedding(_ROWS + 1, _DIM, name="theirs")(inputs)
    hidden = keras.layers.Concatenate()([ours, theirs])
    hidden = keras.layers.Conv1D(5, 2, padding="same")(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    outputs = keras.layers.Dense(3)(keras.layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    cases.randomize(model, seed)
    for layer in (model.get_layer("ours"), model.get_layer("theirs")):
        table = layer.variables[0].numpy()
        table[7] = 0.0
        layer.variables[0].assign(table)
    return model


_SPEC = tf.TensorSpec([None, 2], tf.int32)


def _round(student, dtype):
    """Gives a student the weights that a version has."""
    for variable in student.variables:
        by_row = variable.path.startswith(("ours/", "theirs/"))
        variable.assign(cases.rounded(variable, dtype, by_row=by_row))


def _num_bytes(values):
    parts = [
        part
        for value in values
        for part in quantized.parts_of("model_variables/0", value).values()
    ]
    return sum(part.shape.num_elements() * part.dtype.size for part in parts)


@_DTYPES
@pytest.mark.parametrize("by_row", [True, False])
def test_codes_are_the_nearest_whole_numbers_of_scales(dtype, by_row):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(40, 7)).astype("float32")
    values[3], values[:, 3] = 0.0, 0.0
    values[5] = 1e-42
    most = {"int8": 127, "int4": 7}[dtype]
    # Scales of 1, and values half way between two codes.
    values[6] = [most, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]
    values[:, 6] = np.clip(values[:, 6], -2.5, 2.5)
    form = quantized.Form(
        "model_variables/0", values.shape, tf.float32, dtype, by_row
    )
    parts = form.encode(values)
    for key, spec in form.specs.items():
        assert spec.is_compatible_with(parts[key])
    stored, scale = (part.numpy() for part in parts.values())
    if dtype == "int4":
        low, high = stored % 16, stored // 16
        codes = np.stack([low, high], axis=-1).reshape(40, 8)[:, :7]
        codes = codes.astype("int64") - 8
    else:
        codes = stored.astype("int64")
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert np.abs(codes).max() == most and not codes[3].any()
    if by_row:
        assert codes[6].tolist() == [most, 0, 2, 2, 0, -2, -2]
    widened = codes.astype("float32") * scale
    found = quantized.Quantized(stored, scale, values.shape, tf.float32)
    np.testing.assert_array_equal(tf.convert_to_tensor(found), widened)
    expected = cases.rounded(values, dtype, by_row=by_row)
    np.testing.assert_allclose(widened, expected, rtol=0, atol=1e-41)


@_DTYPES
def test_a_version_predicts_as_a_student_with_rounded_weights(tmp_path, dtype):
    student = _student()
    graph = student_graph.StudentGraph(student, _SPEC)
    writer = saved_model.SavedModelWriter(graph, variables_dtype=dtype)
    writer.write(str(tmp_path), writer.snapshot())
    exact = student(_ID).numpy()
    _round(student, dtype)
    expected = student(_ID).numpy()
    assert np.abs(exact - expected).max() > 1e-3
    graph_check.check_directory(str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    ids = tf.constant(_ID)
    for found in (
        loaded.serve(ids),
        *loaded.signatures["serving_default"](ids).values(),
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    # A teacher reads it, and so does who wants plain values.
    variables = saved_model.SavedModelWriter(graph).variables
    for widen in (True, False):
        values = saved_model.read_variables(
            str(tmp_path), variables, widen=widen
        )
        np.testing.assert_allclose(
            graph(values, ids), expected, rtol=1e-6, atol=1e-6
        )
    share = {"int8": 1 + 4 / _DIM, "int4": (8 + 4) / _DIM}[dtype] / 4
    assert _num_bytes(values) < 1.05 * share * _num_bytes(writer.snapshot())


def test_rows_of_a_table_are_gathered_and_then_widened():
    """A kernel is widened whole, and a table of Keras' own layer, too."""
    student = _student()
    graph = student_graph.StudentGraph(student, _SPEC)
    writer = saved_model.SavedModelWriter(graph, variables_dtype="int8")
    parts = writer.stored(writer.snapshot())
    variables = saved_model.SavedModelWriter(graph).variables
    values = saved_model.joined(parts, variables)
    traced = tf.function(lambda ids: graph(values, ids))
    definition = traced.get_concrete_function(_SPEC).graph.as_graph_def(
        add_shapes=True
    )
    widened = {
        tuple(size.size for size in shape.dim)
        for function in definition.library.function
        for node in function.node_def
        if node.op == "Mul"
        for shape in node.attr["_output_shapes"].list.shape
    }
    assert tuple(student.layers[-1].kernel.shape) in widened
    assert (_ROWS + 1, _DIM) in widened
    assert (_ROWS, _DIM) not in widened


@pytest.mark.deep
def test_a_teacher_holds_what_travels_and_follows_other_forms(exchange):
    model = cases.codistill(_student(1), cases.peers(exchange))
    cases.prepare(model, _ID, _Y)
    plain = _num_bytes(cases.teacher_variables(model))
    peer, sizes, generations = _student(2), [], []
    for step, kind in enumerate(["int4", "int4", None, "bfloat16"], start=1):
        cases.randomize(peer, step)
        cases.publish(
            exchange, peer, step=step, spec=_SPEC, variables_dtype=kind
        )
        cases.load(model, step)
        logs = cases.fit(model, _ID, _Y)
        assert np.isfinite(logs["loss"]).all()
        if kind == "int4":
            _round(peer, kind)
        teacher = model.teachers._teachers[0]
        found = teacher._copy.try_out(teacher._copy.variables, _ID)
        near = {"atol": 0.1, "rtol": 0.02} if kind == "bfloat16" else {}
        np.testing.assert_allclose(
            found[0], peer(_ID), **{"atol": 1e-5, "rtol": 1e-5, **near}
        )
        sizes.append(_num_bytes(cases.teacher_variables(model)) / plain)
        generations.append(model.teachers.generation)
    # Steps are traced again only if variables are kept another way.
    assert generations == [1, 1, 2, 2]
    assert max(sizes[:2]) < 0.22
    assert sizes[2:] == [1.0, 1.0]


def test_a_canary_sees_the_widened_values(exchange):
    """A version whose scales are wrong is refused like one of wrong weights."""
    x, y = cases.data(64)
    model = cases.following(exchange, canary=(x, y))
    peer = cases.linear(0)
    cases.publish(exchange, peer, step=1, variables_dtype="int8")
    for step, wrong in ((2, np.inf), (3, 1e30)):

        def spoil(form, value, wrong=wrong, encode=quantized.Form.encode):
            parts = encode(form, value)
            key = quantized.scale_key(form.key)
            return parts | ({key: parts[key] * wrong} if key in parts else {})

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized.Form, "encode", spoil)
            cases.publish(exchange, peer, step=step, variables_dtype="int8")
        cases.refresh_until(model, lambda s=step: s in cases.quarantined(model))
    assert "NaN or infinite" in cases.quarantined(model)[2]
    cases.publish(exchange, peer, step=4, variables_dtype="int8")
    cases.load(model, 4)
