"""Manifests: what is written, and what is refused of what is read."""

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdistill.exchange import manifest

SHA = "0123456789abcdef" * 4


def make(**changes):
    fields = dict(
        group=1,
        step=20,
        created=1700000000.5,
        incarnation="5f0c",
        files={"variables/variables.index": manifest.FileEntry(3, SHA)},
        graph_fingerprint="abc",
        inputs={"shape": [None, 4], "dtype": "float32"},
        outputs=[{"shape": [None, 2]}],
        variables={"dense/kernel:0": {"shape": [4, 2], "dtype": "float32"}},
        libraries={"python": "3.11.7"},
        extras={"labels": ["a", "b"], "loss": 0.25, "ok": True, "no": None},
    )
    return manifest.Manifest(**{**fields, **changes})


def fields_of(**changes):
    return {**json.loads(make().to_json()), **changes}


# As the first release wrote it, byte for byte; docs/exchange_format.md promises
# that it stays readable.
_FORMAT_1 = """{
 "created": 1700000000.5,
 "extras": {
  "of a later release": {
   "x": 1
  }
 },
 "files": {
  "saved_model.pb": {
   "sha256": "SHA",
   "size": 3
  }
 },
 "format": 1,
 "graph_fingerprint": "abc",
 "group": 1,
 "incarnation": "5f0c",
 "inputs": null,
 "libraries": {
  "of a later release": "9.9"
 },
 "outputs": null,
 "step": 20,
 "variables": {
  "dense/kernel:0": {
   "dtype": "float32",
   "shape": [
    4
   ]
  }
 }
}
""".replace("SHA", SHA)


def test_format_1_is_read_and_written_as_ever():
    found = manifest.Manifest.from_json(_FORMAT_1)
    assert (found.format, found.group, found.step) == (1, 1, 20)
    assert found.files == {"saved_model.pb": manifest.FileEntry(3, SHA)}
    assert found.to_json() == _FORMAT_1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 2),
        ("group", -1),
        ("step", "20"),
        ("step", 2**63),
        ("created", "now"),
        ("incarnation", "a/b"),
        ("graph_fingerprint", None),
        ("files", []),
        ("variables", {"v": {"shape": [-1], "dtype": "int8"}}),
        ("libraries", {"python": 3}),
        ("extras", {"big": 10**30}),
    ],
)
def test_bad_field_is_named(field, value):
    with pytest.raises(manifest.ManifestError, match=field):
        manifest.Manifest.from_json(json.dumps(fields_of(**{field: value})))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../secret",
        "a/../b",
        "a/.hidden",
        "a\0b",
        "a\\b",
        "é",
        "vаriables",  # noqa: RUF001 - a Cyrillic letter, that is the point.
        "a" * 256,
        "manifest.json",
    ],
)
def test_unsafe_file_name_is_refused(name):
    with pytest.raises(manifest.ManifestError, match="file name"):
        make(files={name: manifest.FileEntry(0, SHA)})


def test_unknown_and_missing_fields_are_named():
    with pytest.raises(manifest.ManifestError, match="'sneaky' is unknown"):
        manifest.Manifest.from_json(json.dumps(fields_of(sneaky=1)))
    for name in fields_of():
        fields = fields_of()
        del fields[name]
        with pytest.raises(manifest.ManifestError, match=name):
            manifest.Manifest.from_json(json.dumps(fields))


@pytest.mark.parametrize("field", ['"group": 1', '"size": 3'])
def test_duplicate_keys_are_refused_at_any_depth(field):
    twice = make().to_json().replace(field, f"{field}, {field}")
    with pytest.raises(manifest.ManifestError, match="twice"):
        manifest.Manifest.from_json(twice)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", b"\xff\xfe", "[" * 100_000, '{"a":' * 100_000]
)
def test_text_that_is_no_manifest(text):
    with pytest.raises(manifest.ManifestError):
        manifest.Manifest.from_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def attempt(text):
    try:
        result = manifest.Manifest.from_json(text)
    except manifest.ManifestError:
        return None
    assert manifest.Manifest.from_json(result.to_json()) == result
    return result


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(st.sampled_from(sorted(fields_of())), JSON)
def test_any_field_value_gives_a_manifest_or_a_manifest_error(field, value):
    attempt(json.dumps(fields_of(**{field: value})))
