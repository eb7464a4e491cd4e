import pytest

from tfdistill import data_schema

LABELS = ["cat", "dog", "emu"]


def test_a_file_stands_for_its_bytes(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    for path, text in zip(paths, ("x\ny\n", "x\ny\n", "y\nx\n"), strict=True):
        path.write_text(text)
    found = [data_schema.digests({"words": path})["words"] for path in paths]
    assert found[0] == found[1] != found[2]
    # Not the path's text.
    assert found[0] != data_schema.digests({"words": str(paths[0])})["words"]
    with pytest.raises(FileNotFoundError):
        data_schema.digests({"words": tmp_path / "absent"})


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", 1),
        ("a/b", 1),
        ("x" * 65, 1),
        (3, 1),
        ("labels", {1, 2}),
        ("labels", b"x"),
        ("labels", float("nan")),
        ("labels", object()),
    ],
)
def test_what_cannot_be_hashed(name, part):
    with pytest.raises(ValueError, match="must be .*received"):
        data_schema.digests({name: part})


def test_the_order_of_columns_does_not_count_but_that_of_labels_does():
    columns = {"age": "years", "name": "text"}
    assert data_schema.digests({"f": columns}) == data_schema.digests(
        {"f": dict(reversed(columns.items()))}
    )
    assert data_schema.digests({"l": LABELS}) != data_schema.digests(
        {"l": LABELS[::-1]}
    )


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"labels": LABELS}, "says nothing of the schema's 'words'"),
        ({"labels": LABELS, "words": [1], "z": 1}, "has a part 'z'"),
        ({"labels": LABELS[::-1], "words": [1]}, "'labels' must be those"),
    ],
)
def test_a_difference_is_named(theirs, message):
    ours = data_schema.digests({"labels": LABELS, "words": [1]})
    assert data_schema.difference(ours, dict(ours)) is None
    found = data_schema.difference(ours, data_schema.digests(theirs))
    assert message in found


@pytest.mark.parametrize("theirs", [None, [], "labels", 3])
def test_a_manifest_without_a_schema_differs(theirs):
    ours = data_schema.digests({"labels": LABELS})
    assert "nothing of its schema" in data_schema.difference(ours, theirs)
    assert data_schema.difference({}, theirs) is None


def test_an_override_of_nothing_is_refused():
    with pytest.raises(ValueError, match="must come with a `schema`"):
        data_schema.Wanted(None, True)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
