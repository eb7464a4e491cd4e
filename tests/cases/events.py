"""Reads what a training has written for TensorBoard, as TensorBoard does."""

import os
import pathlib
from typing import Any

import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

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


def environment() -> dict[str, str]:
    """Of a program that imports this checkout and the tests' modules."""
    root = pathlib.Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), os.environ["PYTHONPATH"]])
    return {**os.environ, "PYTHONPATH": path}
