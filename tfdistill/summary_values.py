"""What is worth a point in TensorBoard, taken from those who know it."""

import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdistill import summary_tags

Scalars = dict[str, Any]
# Of more values than a curve each is worth, none is shown.
_MOST_VALUES = 32


def of_logs(logs: Mapping[str, Any]) -> Scalars:
    """Returns logs as scalars; `tag_0`, `tag_1` and so on of a vector.

    What is no number, and vectors of more than 32 values, are left out.

    Args:
        logs: Logs of an epoch by tag.

    Example:
        >>> of_logs({"loss": 1.5, "f1": np.array([0.5, 0.25]), "note": "a"})
        {'loss': 1.5, 'f1_0': 0.5, 'f1_1': 0.25}
    """
    found: Scalars = {}
    for tag, value in logs.items():
        values = np.asarray(value)
        if values.dtype.kind not in "biuf" or values.size > _MOST_VALUES:
            continue
        if not values.ndim:
            found[tag] = float(values)
        for index, number in enumerate(values.flat if values.ndim else ()):
            found[f"{tag}_{index}"] = float(number)
    return found


def of_teachers(status: Sequence[Mapping[str, Any]], step: int) -> Scalars:
    """Returns the scalars of all teachers but how far they agree.

    Args:
        status: What `TeacherSet.status` returned.
        step: The student's global step.

    Returns:
        Values by tag; None for what is not known.
    """
    found: Scalars = {}
    for index, teacher in enumerate(status):
        version = teacher["step"] if teacher["step"] >= 0 else None
        name = summary_tags.of_teacher(teacher["name"], index)
        values = {
            "staleness_steps": None if version is None else step - version,
            "staleness_secs": teacher["age_secs"],
            "version": version,
            "health": summary_tags.HEALTH_CODES[teacher["health"]],
            "share": teacher["share"],
            "num_quarantined": teacher["num_quarantined"],
            "num_swaps": teacher["swaps"],
            "read_secs": teacher["read_secs"],
            "read_bytes": teacher["last_bytes"],
        }
        found |= {f"teachers/{name}/{key}": v for key, v in values.items()}
    return found


def of_exchange(exporter: Any, loader: Any) -> Scalars:
    """Returns the scalars of exports and refreshes.

    Args:
        exporter: The `StudentExporter` of the training, or None.
        loader: Its `TeacherLoader`, or None.
    """
    found: Scalars = {}
    if exporter is not None:
        found |= {
            "exchange/export_secs": exporter.writes.last_secs,
            "exchange/export_bytes": exporter.last_num_bytes,
            "exchange/num_published": exporter.num_published,
            "exchange/num_skipped": exporter.num_skipped,
            "exchange/num_failed": exporter.num_failed,
            "exchange/export_blocked_secs": exporter.blocked.last_secs,
        }
    if loader is not None:
        found["exchange/refresh_blocked_secs"] = loader.blocked.last_secs
    return found


class TeacherNews:
    """Tells what has changed about the teachers since it was last asked."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Knows of no teacher.

        Args:
            clock: Unix seconds. Default `time.time`.
        """
        self._clock = clock
        self._known: dict[str, tuple[str, frozenset[int]]] = {}

    def of(
        self, status: Sequence[Mapping[str, Any]], step: int
    ) -> dict[str, str]:
        """Returns what is new, as Markdown, by tag.

        Args:
            status: What `TeacherSet.status` returned.
            step: The student's global step.
        """
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(self._clock()))
        news = {}
        for index, teacher in enumerate(status):
            name = summary_tags.of_teacher(teacher["name"], index)
            before = self._known.get(name, ("absent", frozenset()))
            refused = frozenset(teacher["quarantined"])
            self._known[name] = teacher["health"], refused
            lines = [
                f"version {version} is quarantined: "
                f"{_quoted(teacher['quarantined'][version])}"
                for version in sorted(refused - before[1])
            ]
            if teacher["health"] != before[0]:
                why = teacher["reason"]
                lines.append(
                    f"version {teacher['step']} is "
                    f"**{teacher['health'].replace('_', ' ')}**"
                    + (f": {_quoted(why)}" if why else "")
                )
            if lines:
                news[f"teachers/{name}/news"] = "\n".join(
                    f"- step {step}, {now} UTC: {line}" for line in lines
                )
        return news


def _quoted(reason: str) -> str:
    """As code: a reason may repeat what a peer has written."""
    return f"`{' '.join(reason.replace('`', chr(39)).split())}`"
