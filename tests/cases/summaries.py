"""What a training has written for TensorBoard, and what the docs list."""

import os
import pathlib
import re
from typing import Any

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.compat.proto import summary_pb2

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _read(directory: pathlib.Path) -> Any:
    found = event_accumulator.EventAccumulator(
        str(directory), size_guidance={event_accumulator.TENSORS: 0}
    )
    return found.Reload()


def tags(directory: pathlib.Path) -> set[str]:
    found = _read(directory).Tags()
    return {*found["scalars"], *found["tensors"]}


def descriptions(directory: pathlib.Path) -> dict[str, str]:
    """What TensorBoard shows of each tag, whichever way it loads files."""
    read = _read(directory)
    found = {tag: read.SummaryMetadata(tag) for tag in tags(directory)}
    return {
        tag: each.summary_description
        for tag, each in found.items()
        if each.data_class == summary_pb2.DATA_CLASS_SCALAR
    }


def scalars(directory: pathlib.Path, tag: str) -> list[tuple[int, float]]:
    """The points of one tag, in the order of the files."""
    return [(p.step, p.value) for p in _read(directory).Scalars(tag)]


def point(tag: str, value: float) -> summary_pb2.Summary:
    made = summary_pb2.Summary.Value(tag=tag, simple_value=value)
    return summary_pb2.Summary(value=[made])


def documented() -> set[str]:
    text = (_ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)` \| .+ \| .+ \|$", text, re.MULTILINE))


def environment() -> dict[str, str]:
    """Of a program that imports this checkout and the tests' modules."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
