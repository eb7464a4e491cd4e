"""The manifest: what a published version holds, and how it is written down.

A manifest is the only proof that a version is whole. It comes from another
process, often from another machine, so it is read as hostile input.
"""

import dataclasses
import json
import math
import re
import reprlib
import time
from collections.abc import Mapping
from typing import Any

from tfdistill.system import extras

FILE_NAME = "manifest.json"
FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024
MAX_FILES = 10_000
MAX_DEPTH = 64
MAX_INT = 2**63 - 1

_SAFE_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class ManifestError(ValueError):
    """A manifest that is malformed, or that this release cannot read."""


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """A file of a version: its bytes and its SHA-256 in lower-case hex."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one version holds and where it comes from.

    Every field is checked on construction, so a `Manifest` that exists is
    well formed. Mappings must not be changed afterwards.

    Attributes:
      group: Index of the publishing group.
      step: The student's global step; it is also the version's number.
      created: Seconds since the epoch, for people: nothing is ordered by it.
      incarnation: Identifies one run of the publishing process.
      files: Relative path of each file but the manifest, with `/` between
        components, to its size and checksum.
      graph_fingerprint: Equal for versions that differ only in variables.
      inputs: Structure of input specs, as JSON.
      outputs: Structure of output specs, as JSON.
      variables: Name of each variable to `{"shape": [...], "dtype": "..."}`.
      libraries: Library name to the version used by the publisher.
      extras: Anything else the publisher adds, as JSON.
      format: Number of the manifest's own format.
    """

    group: int
    step: int
    created: float
    incarnation: str
    files: Mapping[str, FileEntry]
    graph_fingerprint: str = ""
    inputs: Any = None
    outputs: Any = None
    variables: Mapping[str, Mapping[str, Any]] = dataclasses.field(
        default_factory=dict
    )
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extras: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Checks every field."""
        fields = self._fields()
        for name, kind in _KINDS.items():
            _check_kind(name, fields[name], kind)
        most = f"at most {MAX_FILES} entries long"
        _require(len(self.files) <= MAX_FILES, "files", most, len(self.files))
        for name in self.files:
            check_file_name(name)

    def _fields(self) -> dict[str, Any]:
        files = {name: vars(entry) for name, entry in self.files.items()}
        return {**vars(self), "files": files}

    def to_json(self) -> str:
        """Returns the manifest as indented JSON text with sorted keys."""
        fields = self._fields()
        text = json.dumps(fields, sort_keys=True, indent=1, default=dict)
        _check_length(len(text) + 1)
        return text + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Reads what `to_json` returned, or raises a ManifestError."""
        _check_length(len(text))
        fields = _parse(text)
        _check_kind("format", fields.get("format"), _KINDS["format"])
        known = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(known ^ fields.keys()):
            fault = "missing" if name in known else "unknown to this release"
            raise ManifestError(
                f"The fields of a manifest must be {sorted(known)}; "
                f"{_shorten(name)} is {fault}."
            )
        _check_kind("files", fields["files"], _KINDS["files"])
        files = {
            name: FileEntry(**entry) for name, entry in fields["files"].items()
        }
        return cls(**{**fields, "files": files})


def draft(**fields: Any) -> Manifest:
    """Returns the manifest of a version to come, which has no files yet."""
    libraries = extras.installed_versions()
    return Manifest(
        created=time.time(), files={}, libraries=libraries, **fields
    )


def check_file_name(name: str) -> None:
    """Raises ManifestError unless `name` is a safe relative path."""
    _require(
        all(_SAFE_PART.fullmatch(part) for part in name.split("/"))
        and len(name) <= 1024
        and name != FILE_NAME,
        "a file name",
        "a relative path of at most 1024 characters whose components consist "
        "(at most 255 long) are ASCII letters, digits, '_', '.' and '-', do "
        f"not start with '.', and not {FILE_NAME}",
        name,
    )


def _parse(text: str | bytes) -> dict[str, Any]:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique_pairs)
    except ManifestError:
        raise
    except (ValueError, RecursionError) as error:
        raise ManifestError(
            f"A manifest must be JSON text; {_shorten(str(error))}."
        ) from error
    _require(isinstance(value, dict), "the manifest", "an object", value)
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ManifestError(
                "Keys of an object in a manifest must differ; received "
                f"{_shorten(key)} twice."
            )
        result[key] = value
    return result


def _check_kind(field: str, value: Any, kind: Any) -> None:
    """Checks a value, and what is in it, against one of `_KINDS`."""
    if isinstance(kind, tuple):
        must_be, holds = kind
        _require(holds(value), field, must_be, value)
    elif isinstance(kind, list):
        fits = isinstance(value, list | tuple)
        _require(fits, field, "a list", value)
        for item in value:
            _check_kind(field, item, kind[0])
    elif str in kind:
        _require(isinstance(value, Mapping), field, "an object", value)
        for name, item in value.items():
            _check_kind(f"a key of {field}", name, _TEXT)
            _check_kind(f"{field}.{name}", item, kind[str])
    else:
        fits = isinstance(value, Mapping) and value.keys() == kind.keys()
        names = " and ".join(kind)
        _require(fits, field, f"an object with only {names}", value)
        for name, item in value.items():
            _check_kind(f"{field}.{name}", item, kind[name])


def _like(pattern: str) -> Any:
    fits = re.compile(pattern).fullmatch
    return (
        f"text that matches {pattern}",
        lambda value: isinstance(value, str) and fits(value) is not None,
    )


def _is_number(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) <= MAX_INT


def _is_json(value: object, depth: int = 0) -> bool:
    if isinstance(value, Mapping):
        fits = all(isinstance(key, str) for key in value)
        items: Any = value.values()
    elif isinstance(value, list | tuple):
        fits, items = True, value
    else:
        fits = value is None or isinstance(value, str | bool)
        return fits or _is_number(value)
    return (
        fits
        and depth < MAX_DEPTH
        and all(_is_json(item, depth + 1) for item in items)
    )


_TEXT = ("text", lambda value: isinstance(value, str))
_COUNT = (
    "an integer in 0..2**63-1",
    lambda value: type(value) is int and 0 <= value <= MAX_INT,
)
_JSON = (
    "made of objects, lists, strings, booleans, null and finite numbers "
    f"(integers within 64 bits), as JSON is, nested at most {MAX_DEPTH} deep",
    _is_json,
)
# The kind of each field: in words and as a check, or as its parts.
_KINDS: dict[str, Any] = {
    "format": (
        f"{FORMAT}, the only manifest format this release knows (run the same "
        "release of tfdistill in every group)",
        lambda value: type(value) is int and value == FORMAT,
    ),
    "group": _COUNT,
    "step": _COUNT,
    "created": ("a finite number", _is_number),
    "incarnation": _like("[A-Za-z0-9_-]{1,64}"),
    "graph_fingerprint": _TEXT,
    "files": {str: {"size": _COUNT, "sha256": _like("[0-9a-f]{64}")}},
    "variables": {str: {"shape": [_COUNT], "dtype": _TEXT}},
    "libraries": {str: _TEXT},
    "inputs": _JSON,
    "outputs": _JSON,
    "extras": {str: _JSON},
}


def _check_length(length: int) -> None:
    _require(
        length <= MAX_BYTES, "the manifest", f"<= {MAX_BYTES} bytes", length
    )


def _require(holds: bool, field: str, must_be: str, received: object) -> None:
    if not holds:
        raise ManifestError(
            f"`{_shorten(field)[1:-1]}` must be {must_be}; received "
            f"{_shorten(received)} of type {type(received).__name__}."
        )


def _shorten(value: object) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of many digits.
        return f"<a {type(value).__name__} too long to print>"
