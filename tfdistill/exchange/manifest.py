"""The manifest: what a published version holds, and how it is written down.

A manifest is the only proof that a version is whole. It comes from another
process, often from another machine, so it is read as hostile input.
"""

import dataclasses
import functools
import importlib.metadata
import json
import math
import platform
import re
import reprlib
import sys
import types
from collections.abc import Mapping
from typing import Any

from tfdistill import _version

FILE_NAME = "manifest.json"
FORMAT = 1
MAX_BYTES = 16 * 1024 * 1024
MAX_FILES = 10_000
MAX_DEPTH = 64
MAX_INT = 2**63 - 1

_SAFE_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_INCARNATION = re.compile(r"[A-Za-z0-9_-]{1,64}")
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
        _check_format(self.format)
        _check_count("group", self.group)
        _check_count("step", self.step)
        _require(_is_number(self.created), "created", "finite", self.created)
        _check_pattern("incarnation", self.incarnation, _INCARNATION)
        _check_type("graph_fingerprint", self.graph_fingerprint, str)
        _check_files(self.files)
        _check_variables(self.variables)
        _check_type("libraries", self.libraries, Mapping)
        for name, version in self.libraries.items():
            _check_type("a key of libraries", name, str)
            _check_type(f"libraries.{name}", version, str)
        _check_type("extras", self.extras, Mapping)
        for field in ("inputs", "outputs", "extras"):
            _check_json(field, getattr(self, field))

    def to_json(self) -> str:
        """Returns the manifest as indented JSON text with sorted keys."""
        fields = dict(vars(self))
        fields["files"] = {name: vars(e) for name, e in self.files.items()}
        text = json.dumps(fields, sort_keys=True, indent=1, default=dict)
        _check_length(len(text) + 1)
        return text + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Reads what `to_json` returned, or raises a ManifestError."""
        _check_length(len(text))
        fields = _parse(text)
        _check_format(fields.get("format"))
        known = {field.name for field in dataclasses.fields(cls)}
        for name in sorted(known ^ fields.keys()):
            fault = "missing" if name in known else "unknown to this release"
            raise ManifestError(
                f"The fields of a manifest must be {sorted(known)}; received "
                f"one where {_shorten(name)} is {fault}."
            )
        _check_type("files", fields["files"], dict)
        files = {}
        for name, entry in fields["files"].items():
            _check_keys(f"files.{name}", entry, "size", "sha256")
            files[name] = FileEntry(**entry)
        return cls(**{**fields, "files": files})


def check_file_name(name: str) -> None:
    """Raises ManifestError unless `name` is a safe relative path."""
    _check_type("a file name", name, str)
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
    _check_type("the manifest", value, dict)
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


def _check_files(files: Any) -> None:
    _check_type("files", files, Mapping)
    most = f"at most {MAX_FILES} entries long"
    _require(len(files) <= MAX_FILES, "files", most, len(files))
    for name, entry in files.items():
        check_file_name(name)
        _check_type(f"files.{name}", entry, FileEntry)
        _check_count(f"files.{name}.size", entry.size)
        _check_pattern(f"files.{name}.sha256", entry.sha256, _SHA256)


def _check_variables(variables: Any) -> None:
    _check_type("variables", variables, Mapping)
    for name, spec in variables.items():
        _check_type("a key of variables", name, str)
        field = f"variables.{name}"
        _check_keys(field, spec, "shape", "dtype")
        _check_type(f"{field}.shape", spec["shape"], list | tuple)
        for size in spec["shape"]:
            _check_count(f"{field}.shape", size)
        _check_type(f"{field}.dtype", spec["dtype"], str)


def _check_format(value: Any) -> None:
    _require(
        type(value) is int and value == FORMAT,
        "format",
        f"{FORMAT}, the only manifest format this release knows (run the same "
        "release of tfdistill in every group)",
        value,
    )


def _check_type(field: str, value: Any, kind: Any) -> None:
    name = getattr(kind, "__name__", str(kind))
    _require(isinstance(value, kind), field, f"of type {name}", value)


def _check_keys(field: str, value: Any, *keys: str) -> None:
    fits = isinstance(value, Mapping) and value.keys() == {*keys}
    _require(fits, field, f"an object with only {' and '.join(keys)}", value)


def _check_pattern(field: str, value: Any, pattern: re.Pattern[str]) -> None:
    _check_type(field, value, str)
    matches = pattern.fullmatch(value) is not None
    _require(matches, field, f"text that matches {pattern.pattern}", value)


def _check_count(field: str, value: Any) -> None:
    fits = type(value) is int and 0 <= value <= MAX_INT
    _require(fits, field, "an integer in 0..2**63-1", value)


def _is_number(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return type(value) is int and abs(value) <= MAX_INT


def _check_json(field: str, value: Any, depth: int = 0) -> None:
    _require(
        depth <= MAX_DEPTH, field, f"nested at most {MAX_DEPTH} deep", value
    )
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_type(f"a key in {field}", key, str)
            _check_json(field, item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_json(field, item, depth + 1)
    else:
        _require(
            value is None or isinstance(value, str | bool) or _is_number(value),
            field,
            "made of objects, lists, strings, booleans, null and finite "
            "numbers (integers within 64 bits), as JSON is",
            value,
        )


def _check_length(length: int) -> None:
    _require(
        length <= MAX_BYTES, "the manifest", f"<= {MAX_BYTES} bytes", length
    )


def _require(holds: bool, field: str, must_be: str, received: Any) -> None:
    if not holds:
        raise ManifestError(
            f"`{_shorten(field)[1:-1]}` must be {must_be}; received "
            f"{_shorten(received)} of type {type(received).__name__}."
        )


def _shorten(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python refuses to print integers of many digits.
        return f"<a {type(value).__name__} too long to print>"


@functools.cache
def installed_versions() -> Mapping[str, str]:
    """Returns the versions of Python, tfdistill, Keras and TensorFlow.

    Neither of the last two is imported for it, and one that is not installed
    is left out.
    """
    versions = {
        "python": platform.python_version(),
        "tfdistill": _version.__version__,
    }
    for name in ("keras", "tensorflow"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        versions[name] = str(version)
    return types.MappingProxyType(versions)
