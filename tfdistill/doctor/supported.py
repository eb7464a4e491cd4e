"""Which versions of Python and of its libraries tfdistill is made for.

The ranges stand in pyproject.toml, and in the metadata of the installed
package; they are read from there, so that no second list can differ.
"""

import importlib.metadata
import operator
import pathlib
import re
import tomllib
from collections.abc import Mapping

_PROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9_.-]+)\s*(\[[^\]]*\])?\s*\(?([^;)]*)")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*([0-9.]+)\s*")
_RULES = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


def ranges(project: pathlib.Path = _PROJECT) -> Mapping[str, str]:
    """Returns the range of each requirement by name, Python's as `python`.

    Args:
        project: pyproject.toml of a checkout, which goes before the metadata
            of what is installed.
    """
    try:
        found = tomllib.loads(project.read_text("utf-8"))["project"]
        if found["name"] != "tfdistill":
            raise KeyError("another project's")
        python, wanted = found["requires-python"], found["dependencies"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        try:
            metadata = importlib.metadata.metadata("tfdistill")
        except importlib.metadata.PackageNotFoundError:
            return {}
        python = metadata["Requires-Python"] or ""
        wanted = metadata.get_all("Requires-Dist") or []
    result = {"python": python}
    for text in wanted:
        match = _REQUIREMENT.match(text)
        if match and "extra ==" not in text:
            result[match[1].lower()] = match[3].strip()
    return result


def fits(version: str, wanted: str) -> bool:
    """Whether a version is in a range.

    Args:
        version: Such as `3.12.1`; what follows the numbers is left out.
        wanted: Such as `>=3.11,<3.14`.

    Example:
        >>> fits("3.13.2", ">=3.11,<3.14"), fits("3.14.0rc1", ">=3.11,<3.14")
        (True, False)
    """
    clauses = [_CLAUSE.fullmatch(text) for text in wanted.split(",") if text]
    return all(
        _RULES[clause[1]](*_comparable(version, clause[2]))
        for clause in clauses
        if clause is not None
    )


def _comparable(one: str, other: str) -> tuple[list[int], list[int]]:
    numbers = [
        [int(part) for part in re.findall(r"\d+", _release(text))]
        for text in (one, other)
    ]
    length = max(map(len, numbers))
    first, second = (n + [0] * (length - len(n)) for n in numbers)
    return first, second


def _release(text: str) -> str:
    match = re.match(r"\d+(\.\d+)*", text)
    return match[0] if match else "0"
