"""What a manifest must say before a file of its version is read."""

import pytest

from tests.cases import codistillation as cases
from tfdistill.follow import screen

_X, _Y = cases.data()


LABELS = ["cat", "dog", "emu"]
SCHEMA = {"labels": LABELS}


def test_a_file_stands_for_its_bytes(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, text in zip(paths, ("x\ny\n", "x\ny\n", "y\nx\n"), strict=True):
        path.write_text(text)
    found = [screen.digests({"words": path})["words"] for path in paths]
    assert found[0] == found[1] != found[2]
    # Not the path's text.
    assert found[0] != screen.digests({"words": str(paths[0])})["words"]
    with pytest.raises(FileNotFoundError):
        screen.digests({"words": tmp_path / "absent"})


def test_what_cannot_be_hashed():
    with pytest.raises(ValueError, match="must be .*received set"):
        screen.digests({"labels": {1, 2}})


def test_the_order_of_columns_does_not_count_but_that_of_labels_does():
    columns = {"age": "years", "name": "text"}
    assert screen.digests({"f": columns}) == screen.digests(
        {"f": dict(reversed(columns.items()))}
    )
    assert screen.digests({"l": LABELS}) != screen.digests({"l": LABELS[::-1]})


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        ({"labels": LABELS}, "['words']"),
        ({"labels": LABELS, "words": [1], "z": 1}, "['z']"),
        ({"labels": LABELS[::-1], "words": [1]}, "['labels']"),
    ],
)
def test_a_difference_is_named(theirs, named):
    ours = screen.digests({"labels": LABELS, "words": [1]})
    assert screen.schema_difference(ours, dict(ours)) is None
    assert named in screen.schema_difference(ours, screen.digests(theirs))
    # A manifest says anything, or nothing.
    for nothing in (None, 3):
        found = screen.schema_difference(ours, nothing)
        assert "its manifest has no schema" in found
        assert screen.schema_difference({}, nothing) is None


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        # One class would be broadcast to ten without a word.
        ({"logits": {"shape": [None, 1], "dtype": "float32"}}, "1]"),
        ({"logits": {"shape": [None, 10], "dtype": "int32"}}, "int32"),
        ({"other": {"shape": [None, 10], "dtype": "float32"}}, "other"),
        ("logits", "logits"),
    ],
)
def test_other_outputs_are_refused(theirs, named):
    ours = {"logits": {"shape": [None, 10], "dtype": "float32"}}
    half = {"logits": {"shape": [None, 10], "dtype": "float16"}}
    screen.check_spec("outputs", ours, half)
    words = rf"outputs must match the student's, .*10\].*received .*{named}"
    with pytest.raises(screen.Refused, match=words):
        screen.check_spec("outputs", ours, theirs)


def _export(exchange, schema):
    """One version of group 1, published while it trains."""
    model = cases.codistill(cases.linear(1))
    exporter = cases.exporter(exchange, 100, group=1, schema=schema)
    cases.fit(model, _X, _Y, callbacks=[exporter])


def test_another_schema_is_quarantined(exchange):
    _export(exchange, SCHEMA)
    step = exchange.latest(1).step
    model = cases.following(exchange, schema=SCHEMA)
    cases.load(model, step)
    model = cases.following(exchange, schema={"labels": LABELS[::-1]})
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "the same `schema`" in cases.quarantined(model)[step]
