"""SavedModels that are not the student's own: refused, or called as it is."""

import logging
import os
import pickle
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import hostile as hostile_cases
from tfdistill.exchange import manifest
from tfdistill.exports import other_graphs
from tfdistill.exports import student_graph

_OUT = tf.TensorSpec([None, cases.NUM_CLASSES])


def _load(path, inputs=None, outputs=_OUT):
    return other_graphs.FrozenFunction(
        str(path),
        input_spec=cases.input_spec() if inputs is None else inputs,
        output_spec=outputs,
    )


def _two_heads():
    inputs = keras.Input((4,))
    b = keras.layers.Dense(3, name="b")(inputs)
    a = keras.layers.Dense(3, name="a")(inputs)
    model = keras.Model(inputs, {"b": b, "a": a})
    cases.randomize(model, 2)
    return model


def test_a_keras_export_with_several_outputs(tmp_path):
    student = _two_heads()
    student.export(str(tmp_path), verbose=False)
    x, _ = cases.data()
    outputs = {"a": _OUT, "b": _OUT}
    found = _load(tmp_path, outputs=outputs)(x)
    expected = student(x)
    np.testing.assert_allclose(found[0], expected["a"], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected["b"], rtol=1e-5)


def test_inputs_by_name(tmp_path):
    module = tf.Module()
    module.function = tf.function(
        lambda a, b: {"p": a - b},
        input_signature=[
            tf.TensorSpec([None, 3], name="a"),
            tf.TensorSpec([None, 3], name="b"),
        ],
    )
    tf.saved_model.save(module, str(tmp_path), signatures=module.function)
    specs = {"b": tf.TensorSpec([None, 3]), "a": tf.TensorSpec([None, 3])}
    found = _load(tmp_path, inputs=specs)(
        {"b": tf.fill([1, 3], 5.0), "a": tf.fill([1, 3], 7.0)}
    )
    np.testing.assert_array_equal(found[0], [[2, 2, 2]])


@pytest.mark.parametrize(
    ("name", "classes", "match"),
    [
        ("serving_default", 1, r"3\).*found \(None, 1\)"),
        ("mine", 3, "'serving_default'; found.*mine"),
    ],
)
def test_another_signature_is_refused(tmp_path, name, classes, match):
    module = tf.Module()
    module.function = tf.function(
        lambda x: {"p": x[:, :classes]}, input_signature=[cases.input_spec()]
    )
    tf.saved_model.save(
        module, str(tmp_path), signatures={name: module.function}
    )
    with pytest.raises(ValueError, match=match):
        _load(tmp_path)


_X, _Y = cases.data()


@pytest.fixture(scope="module")
def graph():
    return student_graph.StudentGraph(cases.linear(0), cases.input_spec())


def _hostile(directory, path):
    hostile_cases.save(directory, hostile_cases.bodies(str(path))["WriteFile"])


def _named(directory, graph, *, trust):
    specs = graph.input_spec, graph.output_spec
    return other_graphs.load(
        directory, *specs, trust=trust, remedy="trust_graph=True"
    )


def test_a_hostile_one_is_refused_unless_trusted(graph, tmp_path, caplog):
    _hostile(tmp_path / "model", tmp_path / "reached")
    directory = str(tmp_path / "model")
    with pytest.raises(ValueError, match="WriteFile.*trust_graph=True"):
        _named(directory, graph, trust=False)
    assert not (tmp_path / "reached").exists()
    with caplog.at_level(logging.WARNING):
        function = _named(directory, graph, trust=True)
    assert "though its function" in caplog.text
    assert "WriteFile" in caplog.text
    function(_X)
    assert (tmp_path / "reached").exists()


def test_a_good_one_is_loaded_without_a_word(graph, tmp_path, caplog):
    student = cases.deep(1)
    student.export(str(tmp_path / "model"), verbose=False)
    function = _named(str(tmp_path / "model"), graph, trust=False)
    np.testing.assert_allclose(function(_X)[0], student(_X), rtol=1e-5)
    assert "though" not in caplog.text


def test_a_version_is_loaded_from_a_copy(
    graph, tmp_path, exchange, monkeypatch
):
    """Whoever writes to the exchange cannot change what was checked."""
    version = cases.publish(exchange, cases.deep(1))
    load = tf.saved_model.load

    def load_late(directory):
        assert not directory.startswith(str(tmp_path / "exchange"))
        shutil.rmtree(version.path)
        return load(directory)

    monkeypatch.setattr(tf.saved_model, "load", load_late)
    function = other_graphs.load_version(exchange, version, graph)
    np.testing.assert_allclose(function(_X)[0], cases.deep(1)(_X), rtol=1e-5)


class _Peers:
    """A model that follows group 1 and takes any graph, and what it refused."""

    def __init__(self, root, monkeypatch):
        self.exchange = tfdistill.Exchange(root / "exchange")
        self.root = root
        self.model = cases.codistill(
            cases.linear(0), cases.peers(self.exchange, allow_other_graphs=True)
        )
        cases.prepare(self.model, _X, _Y)
        self.step = 0
        self.loads = []
        load = tf.saved_model.load
        monkeypatch.setattr(
            tf.saved_model,
            "load",
            lambda path: self.loads.append(path) or load(path),
        )

    def publish(self, write, **changes):
        """Publishes what `write` leaves, with a fitting manifest."""
        self.step += 1
        fields = {
            "inputs": {"inputs": {"shape": [None, 4], "dtype": "float32"}},
            "outputs": {"outputs": {"shape": [None, 3], "dtype": "float32"}},
            "variables": {
                "model_variables/0/.ATTRIBUTES/VARIABLE_VALUE": {
                    "shape": [4, 3],
                    "dtype": "float32",
                }
            },
            "graph_fingerprint": "another",
        }
        return self.exchange.publish(
            write, group=1, step=self.step, **{**fields, **changes}
        )

    def refused(self):
        """Why the newest version was refused."""
        cases.refresh_until(
            self.model, lambda: self.step in cases.quarantined(self.model)
        )
        return cases.quarantined(self.model)[self.step]


def test_hostile_exports_are_quarantined_and_training_goes_on(
    tmp_path, monkeypatch
):
    peers = _Peers(tmp_path, monkeypatch)
    reached = tmp_path / "reached"
    # graph_check_test has all that is refused.
    body = hostile_cases.bodies(str(reached))["WriteFile"]
    hostile_cases.save(tmp_path / "hostile", body)
    peers.publish(hostile_cases.copy_from(tmp_path / "hostile"))
    assert "found WriteFile" in peers.refused()
    directory = tmp_path / "initialiser"
    hostile_cases.with_resource(
        directory, lambda handle: tf.io.write_file(str(reached), "x")
    )
    peers.publish(hostile_cases.copy_from(directory))
    assert "found WriteFile" in peers.refused()
    assert not peers.loads
    assert not reached.exists()
    logs = cases.fit(peers.model, _X, _Y)
    assert np.isfinite(logs["loss"]).all()
    assert peers.model.teachers.generation == 0
    # A peer that comes to its senses is followed again.
    cases.publish(peers.exchange, cases.deep(1), step=100)
    cases.load(peers.model, 100)
    assert len(peers.loads) == 1


def _pickle_bomb(path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(path),)

    return pickle.dumps(Bomb())


def test_other_files_and_a_tebibyte_in_a_version_are_quarantined(
    tmp_path, monkeypatch
):
    peers = _Peers(tmp_path, monkeypatch)
    reached = tmp_path / "reached"
    cases.linear(1).export(str(tmp_path / "good"), verbose=False)
    copy = hostile_cases.copy_from(tmp_path / "good")
    for fingerprint in (peers.model.graph.fingerprint, "another"):
        for name in ("saved_model.pbtxt", "weights.pkl", "student.keras"):

            def write(directory, name=name):
                copy(directory)
                with open(f"{directory}/{name}", "wb") as file:
                    file.write(_pickle_bomb(reached))

            peers.publish(write, graph_fingerprint=fingerprint)
            assert f"found '{name}'" in peers.refused()
    assert not peers.loads
    assert not reached.exists()
    # A sparse file, which is refused unread.
    version = peers.publish(copy)
    name = "variables/variables.data-00000-of-00001"
    size = 2**40
    os.truncate(f"{version.path}/{name}", size)
    entry = manifest.FileEntry(size, "0" * 64)
    forged = {**version.manifest.files, name: entry}
    fields = {**vars(version.manifest), "files": forged}
    with open(f"{version.path}/manifest.json", "w") as file:
        file.write(manifest.Manifest(**fields).to_json())
    assert "it must have at most" in peers.refused()
