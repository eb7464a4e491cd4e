"""Readers of what others write: any input gives a result or a plain error.

manifest_test.py does the same for manifests.
"""

import functools
import pathlib
import tempfile

import hypothesis
from hypothesis import strategies as st

from tests.cases import codistillation as cases
from tfdistill.exchange import signing
from tfdistill.exports import graph_check
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph


@functools.cache
def _graph():
    graph = student_graph.StudentGraph(cases.deep(0), cases.input_spec())
    with tempfile.TemporaryDirectory() as directory:
        writer = saved_model.SavedModelWriter(graph)
        writer.write(directory, writer.snapshot())
        return pathlib.Path(directory, "saved_model.pb").read_bytes()


# What the message says whatever the key is.
_HARMLESS = (
    "The key of an exchange must have 16 to 4096 bytes; received 0123456789. "
    "Create a key with: openssl rand -hex 32"
)
_TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
)


@hypothesis.given(_TEXT)
def test_any_text_is_a_key_or_a_value_error_that_hides_it(text):
    hypothesis.assume(len(text) > 3)
    try:
        signing.signer_for("environment", {signing.KEY_VARIABLE: text})
    except ValueError as error:
        assert text not in str(error) or text in _HARMLESS


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
