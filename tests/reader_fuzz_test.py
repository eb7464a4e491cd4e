"""Readers of what others write: any input gives a result or a plain error.

manifest_test.py and identity_test.py do the same for manifests and TF_CONFIG.
"""

import functools
import json
import pathlib
import tempfile

import hypothesis
import pytest
from hypothesis import strategies as st

from launch import recipes
from tests.cases import codistillation as cases
from tfdistill.cluster import identity
from tfdistill.exchange import signing
from tfdistill.exports import graph_check
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.follow import screen

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([-1, 0, 1e400, "nan", "digits", "all"])
    | st.text(max_size=5),
    lambda part: (
        st.lists(part, max_size=3)
        | st.dictionaries(st.text(max_size=3), part, max_size=3)
    ),
    max_leaves=6,
)


def _fields(tree, prefix=()):
    """The place of each field of a configuration."""
    for name, value in tree.items():
        yield (*prefix, name)
        if isinstance(value, dict):
            yield from _fields(value, (*prefix, name))


_TREE = json.loads(recipes.get("digits").to_json())


@functools.cache
def _graph():
    graph = student_graph.StudentGraph(cases.deep(0), cases.input_spec())
    with tempfile.TemporaryDirectory() as directory:
        writer = saved_model.SavedModelWriter(graph)
        writer.write(directory, writer.snapshot())
        return pathlib.Path(directory, "saved_model.pb").read_bytes()


# ---- configurations ----


def _read_config(text):
    path = pathlib.Path(tempfile.mkdtemp(), "config.json")
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    try:
        recipe = recipes.read(path)
    except ValueError:
        return
    path.write_text(recipe.to_json())
    assert not recipes.changed_names(recipes.read(path), recipe)


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(st.text() | st.binary() | _JSON.map(json.dumps))
def test_any_text_is_a_configuration_or_a_value_error(text):
    _read_config(text)


def test_text_nested_too_deeply_is_a_value_error():
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="`seed` must be"):
            recipes.override(recipes.get("digits"), [f"seed={text}"])


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.sampled_from(sorted(_fields(_TREE))), _JSON)
def test_any_value_of_any_field_is_taken_or_a_value_error(place, value):
    tree = json.loads(json.dumps(_TREE))
    parent = tree
    for name in place[:-1]:
        parent = parent[name]
    parent[place[-1]] = value
    _read_config(json.dumps(tree))


# ---- the environment ----

# What the message says whatever the key is.
_HARMLESS = (
    "The key of an exchange must have 16 to 4096 bytes; received 0123456789. "
    "Make one with: openssl rand -hex 32"
)
_TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)


@hypothesis.given(
    st.dictionaries(
        st.sampled_from(sorted(identity.KNOWN_VARIABLES))
        | _TEXT.map("TFDISTILL_{}".format),
        _TEXT,
        max_size=4,
    )
)
def test_any_environment_is_a_cluster_or_a_value_error(environ):
    try:
        identity.Cluster.from_env(environ)
    except ValueError as error:
        assert "TF" in str(error)


@hypothesis.given(_TEXT)
def test_any_text_is_a_key_or_a_value_error_that_hides_it(text):
    hypothesis.assume(len(text) > 3)
    try:
        signing.signer_for("environment", {signing.KEY_VARIABLE: text})
    except ValueError as error:
        assert text not in str(error) or text in _HARMLESS


# ---- what peers publish ----


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.data())
def test_a_graph_with_other_bytes_passes_or_is_refused(data):
    content = bytearray(_graph())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        graph_check.check(bytes(content))
    except graph_check.GraphError as error:
        assert "its" in str(error) or "it must" in str(error)


@hypothesis.given(_JSON)
def test_any_schema_of_a_peer_differs(theirs):
    ours = screen.digests({"labels": ["a"]})
    assert screen.schema_difference(ours, theirs)
