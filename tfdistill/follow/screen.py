"""What the manifest of a version must have before any of its files is read.

Two models may have the same shapes and yet other classes, words or columns.
Their predictions then fit together by shape only, and nothing fails.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill.exchange import deltas
from tfdistill.exchange import versions
from tfdistill.exports import graph_check
from tfdistill.exports import student_graph

# In a manifest's `extras`: hashes of what labels and columns mean, the steps
# between exports, how many versions came before, and in how many seconds its
# group receives a version from each other group.
SCHEMA_FIELD, INTERVAL_FIELD = "schema", "every_steps"
COUNT_FIELD, HEARS_FIELD = "versions", "hears_secs"
BURN_IN_FIELD = "burn_in"


class Refused(ValueError):  # noqa: N818
    """A version must not be used; the message says why."""


def check(
    version: versions.Version,
    *,
    specs: Any,
    schema: Mapping[str, str],
    only_own: str = "",
) -> None:
    """Raises `Refused` if a version must not be read.

    `specs` has the `input_spec` and `output_spec` of versions, as a
    `StudentGraph` does. `schema` is what `digests` made of ours. With
    `only_own`, a remedy, versions must be of the student's own graph.
    """
    found = version.manifest
    try:
        if not deltas.is_delta(found):
            graph_check.check_names(found.files)
        if isinstance(specs, student_graph.StudentGraph):
            graph_check.check_size(version.num_bytes, specs)
    except ValueError as error:
        raise Refused(str(error)) from error
    for what, spec, said in (
        ("inputs", specs.input_spec, found.inputs),
        ("outputs", specs.output_spec, found.outputs),
    ):
        check_spec(what, student_graph.to_json(spec, what), said)
    if difference := schema_difference(schema, found.extras.get(SCHEMA_FIELD)):
        raise Refused(
            f"{difference} Give the StudentExporter and the teachers of "
            "every group the same `schema`."
        )
    if only_own and found.graph_fingerprint != specs.fingerprint:
        raise Refused(f"its graph differs from the student's. {only_own}")


def check_spec(what: str, ours: Mapping[str, Any], theirs: object) -> None:
    """Checks a version's inputs or outputs, `what`, against the student's.

    `ours` is what `student_graph.to_json` made, `theirs` what the manifest
    says. Names, shapes and kinds of numbers must be the same, or `Refused`.
    """

    def kinds(described: Any) -> Any:
        return {
            name: (leaf["shape"], _kind(leaf["dtype"]))
            for name, leaf in described.items()
        }

    try:
        same = kinds(ours) == kinds(theirs)
    except (AttributeError, KeyError, TypeError):
        same = False
    if not same:
        raise Refused(
            f"its {what} must match the student's, {ours}; received {theirs}."
        )


def _kind(name: str) -> str:
    """What a dtype must have in common: numbers of other widths are cast."""
    dtype = tf.as_dtype(name)
    if dtype.is_floating:
        return "float"
    return "integer" if dtype.is_integer else dtype.name


def digests(schema: Mapping[str, Any]) -> dict[str, str]:
    """Hashes each part of a schema.

    Args:
        schema: What must be the same in every group, by names of your own,
            such as `{"labels": ["cat", "dog"], "vocabulary":
            pathlib.Path("words.txt"), "features": {"age": "years"}}`. A path
            stands for its file's bytes, anything else for itself as JSON:
            text, numbers, lists and dicts.

    Returns:
        SHA-256 in hexadecimal by name.

    Raises:
        ValueError: A part cannot be hashed.
        OSError: A file cannot be read.

    Example:
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ("a", "b")})
        True
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ["b", "a"]})
        False
    """
    found = {}
    for name, part in schema.items():
        if isinstance(part, os.PathLike):
            with open(part, "rb") as file:
                digest = hashlib.file_digest(file, "sha256")
        else:
            try:
                text = json.dumps(part, sort_keys=True, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(
                    f"The part {name!r} of a `schema` must be a pathlib.Path, "
                    "or something that JSON can hold; received "
                    f"{type(part).__name__}: {error}."
                ) from error
            digest = hashlib.sha256(text.encode())
        found[str(name)] = digest.hexdigest()
    return found


def schema_difference(ours: Mapping[str, str], theirs: object) -> str | None:
    """Returns how a peer's schema differs from ours; from none, none does."""
    if not ours:
        return None
    if not isinstance(theirs, Mapping):
        return "its manifest has no schema."
    names = sorted(ours.keys() | theirs.keys())
    differ = [name for name in names if ours.get(name) != theirs.get(name)]
    if not differ:
        return None
    return (
        "its schema must match this group's, but differs in "
        f"{str(differ)[:200]}."
    )
