"""What a student's inputs and outputs mean, as hashes to be compared.

Two models may have the same shapes and yet other classes, words or columns.
Their predictions then fit together by shape alone, and nothing fails.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

# Of a manifest's `extras`.
FIELD = "schema"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BLOCK_BYTES = 1024 * 1024


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
        ValueError: A name or a part cannot be hashed.
        OSError: A file cannot be read.

    Example:
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ("a", "b")})
        True
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ["b", "a"]})
        False
    """
    found = {}
    for name, part in schema.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                "The names in a `schema` must be 1 to 64 letters, digits, "
                f"'_', '.' or '-'; received {name!r}."
            )
        digest = hashlib.sha256()
        if isinstance(part, os.PathLike):
            with open(part, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
        else:
            digest.update(_text(name, part).encode())
        found[name] = digest.hexdigest()
    return found


def _text(name: str, part: Any) -> str:
    try:
        return json.dumps(part, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The part {name!r} of a `schema` must be a pathlib.Path, or "
            f"something that JSON can hold; received {type(part).__name__}: "
            f"{error}."
        ) from error


class Wanted:
    """The schema that peers must have.

    Attributes:
        ours: What `digests` returned; empty where nothing is compared.
        only_warn: Whether another one is taken, with a warning.
    """

    def __init__(
        self, schema: Mapping[str, Any] | None, only_warn: bool
    ) -> None:
        """Hashes the schema.

        Args:
            schema: See `digests`; None for nothing to be compared.
            only_warn: Whether another one is taken, with a warning.

        Raises:
            ValueError: The schema cannot be hashed, or there is none.
            OSError: A file of it cannot be read.
        """
        if only_warn and not schema:
            raise ValueError(
                "`allow_other_schemas` must come with a `schema` to compare; "
                f"received schema={schema!r}. Leave it out."
            )
        self.ours = digests(schema or {})
        self.only_warn = only_warn


def difference(ours: Mapping[str, str], theirs: Any) -> str | None:
    """Says how a peer's schema differs from ours.

    Args:
        ours: What `digests` returned.
        theirs: What the peer's manifest says; None where it says nothing.

    Returns:
        None where they are equal, else one sentence about the first part that
        differs. Where we have no schema, none of theirs differs.
    """
    if not ours:
        return None
    if not isinstance(theirs, Mapping):
        return "its manifest says nothing of its schema."
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            return f"its manifest says nothing of the schema's {name!r}."
        if name not in ours:
            return f"its schema has a part {name!r}, which ours has not."
        if theirs[name] != ours[name]:
            return f"its {name!r} must be those of this group, and are others."
    return None
