"""What may be in a SavedModel from elsewhere: its files and its graph."""

import functools
import os
import pathlib
import tempfile

import keras
import pytest
import tensorflow as tf

from models import language_model
from tests.cases import codistillation as cases
from tests.cases import hostile as hostile_cases
from tests.cases import tiers
from tfdistill.exports import graph_check
from tfdistill.exports import graph_ops
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph


def _check(directory):
    graph_check.check((directory / "saved_model.pb").read_bytes())


def _write(student, spec, directory):
    graph = student_graph.StudentGraph(student, spec)
    writer = saved_model.SavedModelWriter(graph)
    directory.mkdir()
    writer.write(str(directory), writer.snapshot())


def _text_model():
    layer = keras.layers.TextVectorization(output_sequence_length=4)
    layer.adapt(["a b c", "b d"])
    return [layer, keras.layers.Embedding(10, 4)]


def _vocabulary(tmp_path):
    path = tmp_path / "vocabulary.txt"
    path.write_text("a\nb\n")
    return keras.layers.StringLookup(vocabulary=str(path))


def _sequential(*layers, shape=(), dtype="string"):
    return keras.Sequential(
        [
            keras.Input(shape, dtype=dtype),
            *layers,
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


_TEXT = tf.TensorSpec([None], tf.string)
_IDS = tf.TensorSpec([None, None], tf.int32)
_LAYERS = keras.layers
# Students that we build, and the spec of their inputs.
_OURS = {
    "language model": lambda _: (
        language_model.build_model(
            vocabulary_size=20, units=4, embedding_dim=3
        ),
        _IDS,
    ),
    "lookup in a file": lambda tmp_path: (
        _sequential(_vocabulary(tmp_path), _LAYERS.Embedding(4, 3)),
        _TEXT,
    ),
    "text": lambda _: (_sequential(*_text_model()), _TEXT),
}
_EVERY_RUN = {"lookup in a file"}


@pytest.mark.parametrize("name", tiers.but_for(_EVERY_RUN, _OURS))
def test_our_own_exports_pass(tmp_path, name):
    student, spec = _OURS[name](tmp_path)
    _write(student, spec, tmp_path / "ours")
    _check(tmp_path / "ours")
    # And those that Keras writes, with another signature and more functions.
    student.export(str(tmp_path / "keras"), verbose=False)
    _check(tmp_path / "keras")


def test_nothing_that_runs_reads_or_writes_files():
    words = ("File", "Read", "Save", "Restore", "Print", "PyFunc", "Summary")
    words += ("Dataset", "Queue", "Send", "Recv", "Debug", "Custom", "Remote")
    words += ("Collective", "Iterator", "Stage", "Handle", "Tensorrt", "Xla")
    suspects = {n for n in graph_ops.RUN if any(word in n for word in words)}
    assert suspects == {
        "DisableCopyOnRead",
        "InitializeTableFromTextFileV2",
        "ReadVariableOp",
    }
    assert not graph_ops.TOP & {"DecodeJpeg", "MatchingFiles"}


@pytest.mark.parametrize("name", sorted(hostile_cases.bodies("")))
def test_an_operation_that_reaches_out_is_refused(tmp_path, name):
    path = tmp_path / "reached"
    body = hostile_cases.bodies(str(path))[name]
    hostile_cases.save(tmp_path / "model", body)
    with pytest.raises(
        graph_check.GraphError, match=f"found {name.split()[0]}"
    ):
        _check(tmp_path / "model")
    assert not path.exists()


def test_initialisers_and_unused_functions_are_looked_at(tmp_path):
    path = str(tmp_path / "reached")
    hostile_cases.with_resource(
        tmp_path / "a", lambda handle: tf.io.write_file(path, "x")
    )
    hostile_cases.with_unused_function(tmp_path / "b", path)
    for name in "ab":
        with pytest.raises(graph_check.GraphError, match="found WriteFile"):
            _check(tmp_path / name)


def _fill(path):
    return lambda handle: tf.raw_ops.InitializeTableFromTextFileV2(
        table_handle=handle, filename=path, key_index=-2, value_index=-1
    )


def test_a_table_is_filled_from_an_asset_alone(tmp_path):
    hostile_cases.with_resource(tmp_path / "a", _fill("/etc/passwd"))
    inner = tf.function(
        lambda handle, path: [_fill(path)(handle)] and 0, autograph=False
    )
    hostile_cases.with_resource(
        tmp_path / "b", lambda handle: inner(handle, tf.constant("/etc/passwd"))
    )
    for name in "ab":
        with pytest.raises(graph_check.GraphError, match="from its own assets"):
            _check(tmp_path / name)


@functools.cache
def _linear_graph():
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory, "model")
        _write(cases.linear(1), cases.input_spec(), path)
        return (path / "saved_model.pb").read_bytes()


def _linear(directory):
    directory.mkdir()
    (directory / "saved_model.pb").write_bytes(_linear_graph())
    return directory


def _first(model, op):
    for function in hostile_cases.functions(model):
        for node in function.node_def:
            if node.op == op:
                return function, node
    raise ValueError(op)


def _call_outside(model):
    _, node = _first(model, "StatefulPartitionedCall")
    node.attr["f"].func.name = "__some_function_of_the_process"


def _hide_call(model):
    """A call inside the attributes of a call."""
    _, node = _first(model, "StatefulPartitionedCall")
    inner = node.attr["f"].func.attr["g"].list.func.add()
    inner.name = "__some_function_of_the_process"


def _custom(model):
    _, node = _first(model, "MatMul")
    node.op = "MyOwnOp"


def _asset(name):
    def change(model):
        model.meta_graphs[0].asset_file_def.add(filename=name)

    return change


def _no_objects(model):
    model.meta_graphs[0].ClearField("object_graph_def")


def _two_graphs(model):
    model.meta_graphs.add().CopyFrom(model.meta_graphs[0])


def _top(model):
    model.meta_graphs[0].graph_def.node.add(name="w", op="WriteFile")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_call_outside, "in its own file; found '__some"),
        (_hide_call, "in its own file; found '__some"),
        (_custom, "found MyOwnOp"),
        (_asset("../../etc/passwd"), "an asset has an invalid name"),
        (_no_objects, "one graph with objects"),
        (_two_graphs, "it holds 2 graphs"),
        (_top, "its graph must hold only.*WriteFile"),
    ],
)
def test_what_no_exporter_writes_is_refused(tmp_path, change, message):
    directory = _linear(tmp_path / "model")
    _check(directory)
    hostile_cases.edit(directory, change)
    with pytest.raises(graph_check.GraphError, match=message):
        _check(directory)


def test_a_restoring_function_may_run_and_is_held_to_that(tmp_path):
    """Loading calls what an object names to restore it."""
    directory = _linear(tmp_path / "model")

    def change(model):
        names = [f.signature.name for f in hostile_cases.functions(model)]
        (name,) = [n for n in names if "traced_restore" in n]
        graph = model.meta_graphs[0].object_graph_def
        graph.concrete_functions[name].SetInParent()
        node = graph.nodes.add()
        node.bare_concrete_function.concrete_function_name = name
        saveable = graph.nodes[0].saveable_objects["x"]
        saveable.restore_function = len(graph.nodes) - 1

    hostile_cases.edit(directory, change)
    with pytest.raises(
        graph_check.GraphError, match="found .*(Restore|Assign)"
    ):
        _check(directory)


WHOLE = [
    "saved_model.pb",
    "fingerprint.pb",
    "variables/variables.index",
    "variables/variables.data-00000-of-00001",
]


@pytest.mark.parametrize(
    "name",
    [
        "saved_model.pbtxt",
        "weights.pkl",
        "assets/library.so",
        "assets/../x.txt",
        "variables/variables.data-\u0660\u0660\u0660\u0660\u0660-of-00001",
    ],
)
def test_other_files_are_refused(name):
    with pytest.raises(graph_check.GraphError, match="must be the files of"):
        graph_check.check_names([*WHOLE, name])


def _link_file(directory):
    (directory / "fingerprint.pb").unlink()
    (directory / "fingerprint.pb").symlink_to("/etc/passwd")


def _pipe_for_graph(directory):
    (directory / "saved_model.pb").unlink()
    os.mkfifo(directory / "saved_model.pb")


@pytest.mark.parametrize("change", [_link_file, _pipe_for_graph])
def test_a_changed_directory_is_refused(tmp_path, change):
    _write(cases.linear(1), cases.input_spec(), tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(graph_check.GraphError, match="its files must be"):
        graph_check.check_directory(str(tmp_path / "model"))
