"""The reader in docs/exchange_format.md, against versions of this package."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import docs_blocks
from tests.cases import tiers
from tfdistill.exchange import deltas
from tfdistill.exports import key_frames
from tfdistill.exports import saved_model
from tfdistill.exports import server_bundle
from tfdistill.exports import student_graph

_MOST_LINES = 60


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(scope="module")
def reader():
    """What the page's file defines."""
    (text,) = (
        block.text
        for block in docs_blocks.blocks("docs/exchange_format.md")
        if block.file_name == "read_exchange.py"
    )
    assert len([x for x in text.splitlines()[1:] if x]) <= _MOST_LINES
    found = {}
    exec(compile(text, "read_exchange.py", "exec"), found)
    return found


def _publish(publisher, exchange, writer, step):
    return publisher.publish(
        exchange,
        writer,
        writer.snapshot(),
        whole=False,
        extras={},
        group=0,
        step=step,
        variables=writer.variables,
    )


def _widened(value):
    if value.dtype == np.uint16:
        return (value.astype("uint32") << 16).view("float32")
    return value


@pytest.mark.parametrize(
    "variables_dtype",
    [None, "int4", *(tiers.deep(dtype) for dtype in ("bfloat16", "int8"))],
)
def test_versions_and_deltas_are_read_to_the_bit(
    reader, tmp_path, variables_dtype
):
    student = cases.deep(0)
    graph = student_graph.StudentGraph(student, cases.input_spec())
    writer = saved_model.SavedModelWriter(
        graph, variables_dtype=variables_dtype
    )
    exchange = tfdistill.Exchange(tmp_path, key=None)
    publisher = key_frames.KeyFrames(3, None)
    kinds = []
    for step in (8, 9, 10, 11):
        weights = student.trainable_variables[0]
        weights.assign(weights + 0.1 * (np.arange(4) == step % 4)[:, None])
        version = _publish(publisher, exchange, writer, step)
        kinds.append(deltas.is_delta(version.manifest))
        manifest, values = reader["newest"](tmp_path, 0)
        assert manifest["step"] == step
        stored = writer.stored(writer.snapshot())
        assert values.keys() == stored.keys()
        for name, value in stored.items():
            is_half = value.dtype == tf.bfloat16
            expected = (tf.cast(value, "float32") if is_half else value).numpy()
            assert _widened(values[name]).tobytes() == expected.tobytes()
            assert values[name].shape == expected.shape
    assert kinds == [False, True, True, False]


def test_what_is_frozen_comes_from_the_frame(reader, tmp_path):
    """A delta with a base is one over zeros, also where the frame has more."""
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(300, trainable=False)(inputs)
    student = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    graph = student_graph.StudentGraph(student, cases.input_spec())
    writer = saved_model.SavedModelWriter(graph)
    exchange = tfdistill.Exchange(tmp_path, key=None)
    publisher = key_frames.KeyFrames(9, None)
    for step in (1, 2):
        version = _publish(publisher, exchange, writer, step)
        stored = writer.stored(writer.snapshot())
        kernel = student.trainable_variables[0]
        kernel.assign(kernel * (np.arange(300) % 2)[:, None])
    assert deltas.base_of(version.manifest)
    _, values = reader["newest"](tmp_path, 0)
    for name, value in stored.items():
        np.testing.assert_array_equal(values[name], value.numpy())


@pytest.mark.deep
def test_many_variables_and_rows_that_servers_wrote_are_read(reader, tmp_path):
    """The index has several blocks, and tables come in parts."""
    rng = np.random.default_rng(0)
    values = {
        f"variables/{number}/.ATTRIBUTES/VARIABLE_VALUE": rng.normal(size=(3,))
        for number in range(20_000)
    }
    table, key = rng.normal(size=(300, 4)).astype("float32"), "variables/table"
    exchange = tfdistill.Exchange(tmp_path, key=None)

    def write(directory):
        os.mkdir(f"{directory}/variables")
        prefix = f"{directory}/variables/variables"
        writer = server_bundle.BundleWriter(prefix)
        writer.add({name: tf.constant(v) for name, v in values.items()})
        writer.add_rows(
            key, [tf.Variable(table[:290]), tf.Variable(table[290:])]
        )
        writer.finish()

    expected = {**values, key: table}
    exchange.publish(
        write,
        group=0,
        step=1,
        variables={
            name: {"shape": [*value.shape], "dtype": value.dtype.name}
            for name, value in expected.items()
        },
    )
    _, found = reader["newest"](tmp_path, 0)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
