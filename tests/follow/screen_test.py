"""What a manifest must say before a file of its version is read."""

import pytest

import tfdistill
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


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("a/b", 1),
        ("labels", {1, 2}),
        ("labels", object()),
    ],
)
def test_what_cannot_be_hashed(name, part):
    with pytest.raises(ValueError, match="must be .*received"):
        screen.digests({name: part})


def test_the_order_of_columns_does_not_count_but_that_of_labels_does():
    columns = {"age": "years", "name": "text"}
    assert screen.digests({"f": columns}) == screen.digests(
        {"f": dict(reversed(columns.items()))}
    )
    assert screen.digests({"l": LABELS}) != screen.digests({"l": LABELS[::-1]})


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"labels": LABELS}, "has no part 'words'"),
        ({"labels": LABELS, "words": [1], "z": 1}, "has a part 'z'"),
        ({"labels": LABELS[::-1], "words": [1]}, "'labels' must be the same"),
    ],
)
def test_a_difference_is_named(theirs, message):
    ours = screen.digests({"labels": LABELS, "words": [1]})
    assert screen.schema_difference(ours, dict(ours)) is None
    found = screen.schema_difference(ours, screen.digests(theirs))
    assert message in found


@pytest.mark.parametrize("theirs", [None, 3])
def test_a_manifest_without_a_schema_differs(theirs):
    ours = screen.digests({"labels": LABELS})
    assert "its manifest has no schema" in screen.schema_difference(
        ours, theirs
    )
    assert screen.schema_difference({}, theirs) is None


def _export(exchange, schema):
    """One version of group 1, published while it trains."""
    model = cases.codistill(cases.linear(1))
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=100, group=1, schema=schema
    )
    cases.fit(model, _X, _Y, callbacks=[exporter])


@pytest.mark.parametrize("ours", [SCHEMA, None])
def test_one_schema_or_none_to_compare(exchange, ours):
    _export(exchange, SCHEMA)
    model = cases.following(exchange, schema=ours)
    cases.load(model, exchange.latest(1).step)


@pytest.mark.parametrize(
    "theirs", [None, {"labels": ["dog", "cat", "emu"]}, {"words": [1]}]
)
def test_another_schema_is_quarantined(exchange, theirs):
    _export(exchange, theirs)
    step = exchange.latest(1).step
    model = cases.following(exchange, schema=SCHEMA)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    assert "the same `schema`" in cases.quarantined(model)[step]
