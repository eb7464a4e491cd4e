"""The scalars of a group in TensorBoard: their tags and values.

docs/tensorboard.md lists them with their units and meanings.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

Scalars = dict[str, Any]
_HEALTH_CODES = {
    "absent": 0,
    "dropped": 1,
    "too_stale": 2,
    "fading": 3,
    "good": 4,
}
_OF_ANSWERS = (
    *("num_answers", "num_missed", "num_unsent", "num_forged"),
    "sent_bytes",
)


def of_name(teacher: str) -> str:
    """Returns what stands for a teacher in tags, which slashes divide.

    Example:
        >>> of_name("group_1"), of_name("/data/large.keras")
        ('group_1', 'data_large.keras')
    """
    return teacher.strip("/").replace("/", "_")


def of_logs(logs: Mapping[str, Any]) -> Scalars:
    """Returns the numbers among logs.

    Example:
        >>> of_logs({"loss": 1.5, "f1": np.array([0.5, 0.25]), "note": "a"})
        {'loss': 1.5}
    """
    arrays = {tag: np.asarray(value) for tag, value in logs.items()}
    return {
        tag: float(value)
        for tag, value in arrays.items()
        if not value.ndim and value.dtype.kind in "biuf"
    }


def of_teachers(status: Sequence[Mapping[str, Any]], step: int) -> Scalars:
    """Returns each teacher's scalars but its agreement; None if unknown."""
    found: Scalars = {}
    for teacher in status:
        version = teacher["step"] if teacher["step"] >= 0 else None
        values = {
            "staleness_steps": None if version is None else step - version,
            "version": version,
            "health": _HEALTH_CODES[teacher["health"]],
            "share": teacher["share"],
            "num_quarantined": teacher["num_quarantined"],
            "num_swaps": teacher["swaps"],
            "read_secs": teacher["read_secs"],
            "read_bytes": teacher["last_bytes"],
            # Of peers that send predictions.
            **{key: teacher[key] for key in _OF_ANSWERS if key in teacher},
        }
        name = of_name(teacher["name"])
        found |= {f"teachers/{name}/{key}": v for key, v in values.items()}
    return found


def of_exchange(exporter: Any, loader: Any) -> Scalars:
    """Returns the scalars of exports and refreshes."""
    found: Scalars = {}
    if exporter is not None:
        found |= {
            "exchange/export_secs": exporter.writes.last_secs,
            "exchange/export_bytes": exporter.last_num_bytes,
            "exchange/num_published": exporter.totals["published"],
            "exchange/num_skipped": exporter.totals["skipped"],
            "exchange/num_failed": exporter.totals["failed"],
            "exchange/export_blocked_secs": exporter.blocked.last_secs,
        }
    if loader is not None:
        found["exchange/refresh_blocked_secs"] = loader.blocked.last_secs
    return found


def of_mixing(mixer: Any) -> Scalars:
    """Returns the scalars of a `WeightMixer`; none without one."""
    if mixer is None:
        return {}
    return {
        "mixing/num_mixes": mixer.num_mixes,
        "mixing/num_skipped": mixer.num_skipped,
        "mixing/num_waits": mixer.num_waits,
        "mixing/read_bytes": mixer.num_bytes,
        "mixing/staleness_steps": max(
            mixer.staleness_steps.values(), default=None
        ),
        "mixing/blocked_secs": mixer.blocked.last_secs,
        "mixing/wait_secs": mixer.waits.last_secs,
    }
