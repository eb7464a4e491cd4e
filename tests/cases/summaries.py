"""What a training has written for TensorBoard, and what the docs list."""

import os
import pathlib
import re
from typing import Any

import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_HPARAMS = "_hparams_/session_start_info"


def _read(directory: pathlib.Path) -> Any:
    found = event_accumulator.EventAccumulator(
        str(directory),
        size_guidance={event_accumulator.TENSORS: 0},
    )
    return found.Reload()


def tags(directory: pathlib.Path) -> set[str]:
    """All tags of a TensorBoard run."""
    found = _read(directory).Tags()
    return {*found["scalars"], *found["tensors"]}


def scalars(directory: pathlib.Path, tag: str) -> list[tuple[int, float]]:
    """The points of one tag, in the order of the files."""
    return [(p.step, p.value) for p in _read(directory).Scalars(tag)]


def texts(directory: pathlib.Path, tag: str) -> list[str]:
    """The texts of one tag."""
    return [
        tf.make_ndarray(event.tensor_proto).item().decode()
        for event in _read(directory).Tensors(tag)
    ]


def layout(directory: pathlib.Path) -> list[Any]:
    """The categories of the custom-scalars layout."""
    (event,) = _read(directory).Tensors("custom_scalars__config__")
    data = tf.make_ndarray(event.tensor_proto).item()
    return list(layout_pb2.Layout.FromString(data).category)


def hyperparameters(directory: pathlib.Path) -> dict[str, Any]:
    """What the HParams dashboard shows of a run."""
    metadata = _read(directory).SummaryMetadata(_HPARAMS)
    data = plugin_data_pb2.HParamsPluginData.FromString(
        metadata.plugin_data.content
    )
    return {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in data.session_start_info.hparams.items()
    }


def point(tag: str, value: float) -> summary_pb2.Summary:
    """A summary of one scalar."""
    made = summary_pb2.Summary.Value(tag=tag, simple_value=value)
    return summary_pb2.Summary(value=[made])


def documented() -> set[str]:
    """The tags that the docs list."""
    text = (_ROOT / "docs" / "tensorboard.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| `([^`]+)` \| .+ \| .+ \|$", text, re.MULTILINE))


def environment() -> dict[str, str]:
    """Of a program that imports this checkout and the tests' modules."""
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
