"""What is written for a student, and what is read of a peer."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import embedding as embedding_cases
from tests.cases import tiers
from tfdistill.embedding import tables
from tfdistill.exports import graph_check
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph

_LOAD = """
import json, sys
import numpy as np
import tensorflow as tf
assert not any("tfdistill" in p for p in sys.modules)
for path in sys.argv[1:]:
    data = np.load(path + ".npz")
    found = tf.saved_model.load(path).signatures["serving_default"](
        **{k[3:]: tf.constant(v) for k, v in data.items() if k[:3] == "in:"}
    )
    expected = {k[4:]: v for k, v in data.items() if k[:4] == "out:"}
    assert set(found) == set(expected), (set(found), set(expected))
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
    print("same")
"""


def _writer(student, spec=None, **kwargs):
    graph = student_graph.StudentGraph(
        student, cases.input_spec() if spec is None else spec
    )
    return saved_model.SavedModelWriter(graph, **kwargs)


def _write(writer, path, snapshot=None):
    path.mkdir(parents=True)
    writer.write(str(path), writer.snapshot() if snapshot is None else snapshot)
    return path


# ---- snapshots ----


def _embedding():
    inputs = keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(50, 3)(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(table)
    return keras.Model(inputs, keras.layers.Dense(3)(pooled))


def test_a_snapshot_stays_while_training_goes_on():
    """Sparse gradients, of one row of the embedding, and dense ones."""
    student = _embedding()
    x = np.full([8, 2], 7, "int32")
    y = np.random.default_rng(0).integers(0, 3, 8)
    model = cases.codistill(student, optimizer="adam", loss=None)
    writer = _writer(student, cases.input_spec(2, dtype=tf.int32))
    before = [v.numpy().copy() for v in student.variables]
    snapshot = writer.snapshot()
    cases.fit(model, x, y, epochs=3, callbacks=[])
    changed = [
        not np.array_equal(v.numpy(), b)
        for v, b in zip(student.variables, before, strict=True)
    ]
    assert all(changed)
    cases.assert_close(snapshot, before)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_snapshot_survives_updates_in_place(sparse):
    """As optimizers outside Keras make them: by fused operations."""
    student = _embedding()
    writer = _writer(student, cases.input_spec(2, dtype=tf.int32))
    table = student.variables[0].value
    # An earlier sparse read and write puts the variable in another mode.
    tf.gather(table, [1])
    before = table.numpy().copy()
    snapshot = writer.snapshot()
    for _ in range(3):
        if sparse:
            rows = tf.IndexedSlices(tf.ones([1, 3]), tf.constant([1]))
            table.scatter_sub(rows)
        else:
            table.assign_sub(tf.ones_like(table))
    assert not np.array_equal(table.numpy(), before)
    np.testing.assert_array_equal(snapshot[0], before)


# ---- what is written ----


@pytest.fixture(scope="module")
def plain_interpreter(tmp_path_factory):
    """Exports by name, all opened in one plain TensorFlow process."""
    root = tmp_path_factory.mktemp("exports")
    exports = _exports()
    for name, (student, inputs, dtype) in exports.items():
        structure = keras.tree.map_structure(tf.convert_to_tensor, inputs)
        writer = _writer(student, structure, variables_dtype=dtype)
        _write(writer, root / name / "1")
        cases.randomize(student, 9)
        path = _write(writer, root / name / "2")
        if dtype:
            for variable in student.variables:
                if dtype == "bfloat16":
                    stored = tf.cast(variable.value, tf.bfloat16)
                else:
                    by_row = "table" in variable.path
                    stored = cases.rounded(variable, dtype, by_row=by_row)
                variable.assign(tf.cast(stored, tf.float32))
        expected = student(structure, training=False)
        _save_expectation(path, inputs, expected)
    paths = [root / name for name in exports]
    printed = cases.run_python(_LOAD, *[str(path / "2") for path in paths])
    assert printed.split() == ["same"] * len(paths)
    return paths


def _save_expectation(path, inputs, outputs):
    def named(structure, default, prefix):
        if not isinstance(structure, dict):
            structure = (
                {f"{default}_{i}": v for i, v in enumerate(structure)}
                if isinstance(structure, list)
                else {default: structure}
            )
        return {f"{prefix}{k}": np.asarray(v) for k, v in structure.items()}

    np.savez(
        f"{path}.npz",
        **named(inputs, "inputs", "in:"),
        **named(outputs, "outputs", "out:"),
    )


def _exports():
    x = np.random.default_rng(1).normal(size=(6, 4)).astype("float32")
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    value, kind = keras.layers.Dense(1)(joined), keras.layers.Dense(3)(joined)
    statistics = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
    )
    return {
        "bfloat16": (cases.deep(), x, "bfloat16"),
        "int8": (embedding_cases.model(), embedding_cases.data()[0], "int8"),
        "dicts": (
            keras.Model({"a": a, "b": b}, {"value": value, "kind": kind}),
            {"a": x, "b": x + 1},
            None,
        ),
        "lists": (keras.Model([a, b], [value, kind]), [x, x + 1], None),
        "statistics": (statistics, x, None),
    }


def test_versions_load_without_this_package_from_a_graph_written_once(
    plain_interpreter,
):
    assert len(plain_interpreter) == 5
    for path in plain_interpreter:
        one, two = path / "1", path / "2"
        for file in ("saved_model.pb", "fingerprint.pb"):
            assert (one / file).read_bytes() == (two / file).read_bytes()
        data = "variables/variables.data-00000-of-00001"
        assert (one / data).read_bytes() != (two / data).read_bytes()


class _Private(keras.layers.Dense):
    """Keras calls its variables `__private/...`."""


def test_a_layer_of_a_private_class_is_written(tmp_path):
    inputs = keras.Input((cases.NUM_FEATURES,))
    writer = _writer(keras.Model(inputs, _Private(3)(inputs)))
    path = _write(writer, tmp_path / "1")
    found = saved_model.read_variables(str(path), writer.variables)
    for value, variable in zip(found, writer.graph.variables, strict=True):
        np.testing.assert_array_equal(value, variable.value)


def test_a_replicated_student_is_written_once(tmp_path, two_replicas):
    with two_replicas.scope():
        student = cases.deep(3)
    path = _write(_writer(student), tmp_path / "mirrored")
    keys = tf.train.load_checkpoint(
        str(path / "variables" / "variables")
    ).get_variable_to_shape_map()
    assert len(keys) == len(student.variables) + 1
    x, _ = cases.data()
    loaded = tf.saved_model.load(str(path))
    np.testing.assert_allclose(loaded.serve(x), cases.deep(3)(x), rtol=1e-5)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.contrast = keras.layers.RandomContrast(0.5)
        self.flatten = keras.layers.Flatten()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(self.flatten(self.contrast(x)))


def _augmenting(kind):
    layers = [
        keras.layers.RandomContrast(0.5),
        keras.layers.RandomRotation(0.3),
        keras.layers.Flatten(),
        keras.layers.Dense(3),
    ]
    if kind == "sequential":
        return keras.Sequential([keras.Input((4, 4, 1)), *layers])
    if kind == "functional":
        inputs = outputs = keras.Input((4, 4, 1), name="image")
        for layer_ in layers:
            outputs = layer_(outputs)
        return keras.Model({"image": inputs}, {"logits": outputs})
    model = Subclassed()
    model(tf.zeros([1, 4, 4, 1]))
    return model


@pytest.mark.parametrize("kind", ["functional", "subclassed"])
def test_a_student_that_augments_is_exported_for_inference(tmp_path, kind):
    student = _augmenting(kind)
    directory = str(tmp_path / "ours")
    tfdistill.CodistillModel(student).export(directory, verbose=False)
    graph_check.check_directory(directory)
    x = np.random.default_rng(0).random((3, 4, 4, 1), "float32")
    x = {"image": x} if kind == "functional" else x
    loaded = tf.saved_model.load(directory)
    found, expected = loaded.serve(x), student(x, training=False)
    if kind == "functional":
        found, expected = found["logits"], expected["logits"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_what_keras_exports_in_training_mode_is_recognised(tmp_path):
    student = _augmenting("sequential")
    student.export(str(tmp_path), verbose=False)
    graph = student_graph.StudentGraph(
        student, tf.TensorSpec([None, 4, 4, 1], tf.float32)
    )
    with pytest.raises(ValueError, match="training mode.*Codist"):
        other_graphs.load(
            str(tmp_path), graph.input_spec, trust=False, remedy=""
        )


# ---- tables on parameter servers ----


@pytest.fixture
def on_servers(monkeypatch):
    """Tables that are taken for ones on servers, and small blocks."""
    monkeypatch.setattr(tables.Table, "is_on_servers", True)
    # Three rows, which neither a shard nor the table is a multiple of.
    monkeypatch.setattr(
        "tfdistill.embedding.rows.BLOCK_ELEMENTS", 3 * embedding_cases.DIM
    )


def _with_table(**kwargs):
    model = embedding_cases.model(num_shards=2)
    cases.randomize(model, 1)
    spec = tf.TensorSpec([None, len(embedding_cases.FIELDS)], tf.int32)
    return model, _writer(model, spec, **kwargs)


@pytest.mark.parametrize("dtype", [tiers.deep("bfloat16"), "int8"])
def test_a_table_on_servers_is_written_as_any_other(
    tmp_path, on_servers, dtype
):
    model, writer = _with_table(variables_dtype=dtype)
    expected = saved_model.SavedModelWriter(writer.graph).variables
    snapshot = writer.snapshot()
    assert [value is None for value in snapshot] == [True, False, False]
    ids = tf.constant(embedding_cases.data()[0])
    for name in ("first", "second"):
        # As it is when it is written.
        for shard in model.get_layer("table").shards:
            shard.assign(shard * 0.5)
        path = str(_write(writer, tmp_path / name, writer.snapshot()))
        table, *_ = saved_model.read_variables(path, expected)
        whole = embedding_cases.table(model.get_layer("table"))
        stored = (
            cases.rounded(whole, dtype, by_row=True)
            if dtype == "int8"
            else tf.cast(whole, dtype)
        )
        np.testing.assert_array_equal(table, stored)
        assert not list(pathlib.Path(path).rglob("*.parts"))
    loaded = tf.saved_model.load(path)
    np.testing.assert_allclose(loaded.serve(ids), model(ids), rtol=0.02)


def test_a_table_on_servers_must_be_finite(tmp_path, on_servers):
    model, writer = _with_table()
    shard = model.get_layer("table").shards[1]
    shard.assign(tf.fill(shard.shape, np.inf))
    with pytest.raises(ValueError, match="NaN or infinite"):
        _write(writer, tmp_path / "1")
