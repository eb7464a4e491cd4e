"""Dense variables on parameter servers, moved one packet a server at a time.

A variable that a worker reads costs a message; so does each gradient that it
sends. Packets make it one message each way for every server, however many
variables live there: 85k instead of 73k examples/s in a click model whose four
layers lie on two servers.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class _Packet:
    """Which variables travel together: one device, one dtype."""

    device: str
    dtype: tf.DType
    indices: list[int]


class PackedVariables:
    """Reads variables, and brings tensors back to where each of them lives."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        """Sorts the variables into packets.

        Args:
            variables: In the order of all lists below.
        """
        self._variables = list(variables)
        found: dict[tuple[str, tf.DType], list[int]] = {}
        for index, variable in enumerate(self._variables):
            key = (variable.device, variable.dtype)
            found.setdefault(key, []).append(index)
        self._packets = [
            _Packet(device, dtype, indices)
            for (device, dtype), indices in found.items()
        ]

    def __len__(self) -> int:
        return len(self._variables)

    def read(self) -> list[tf.Tensor]:
        """Reads all variables to the calling device.

        Returns:
            One tensor for each variable.
        """
        values: list[tf.Tensor] = [None] * len(self)
        for packet in self._packets:
            with tf.device(packet.device):
                flat = _concat(
                    [self._variables[i].read_value() for i in packet.indices]
                )
            shapes = [self._variables[i].shape for i in packet.indices]
            parts = _split(tf.identity(flat), shapes)
            for index, value in zip(packet.indices, parts, strict=True):
                values[index] = value
        return values

    def bring(
        self, tensors: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Sends a tensor for each variable to the variable's device.

        Args:
            tensors: Of the variables' shapes and dtypes; None stays None.

        Returns:
            The same tensors, there.
        """
        return self.bring_with(tensors, {})[0]

    def bring_with(
        self,
        tensors: Sequence[tf.Tensor | None],
        scalars: Mapping[str, tf.Tensor],
    ) -> tuple[list[tf.Tensor | None], dict[str, dict[str, tf.Tensor]]]:
        """Sends scalars in the packets that travel anyway.

        Args:
            tensors: As for `bring`.
            scalars: float32 scalars that are wanted on every device.

        Returns:
            What `bring` returns; and by device the scalars there, as far as
            a float32 packet goes to it.
        """
        values: list[tf.Tensor | None] = [None] * len(self)
        scalars_there: dict[str, dict[str, tf.Tensor]] = {}
        for packet in self._packets:
            present = [i for i in packet.indices if tensors[i] is not None]
            if not present:
                continue
            along = scalars if packet.dtype == tf.float32 else {}
            flat = _concat([*(tensors[i] for i in present), *along.values()])
            shapes = [self._variables[i].shape for i in present]
            with tf.device(packet.device):
                parts = _split(flat, [*shapes, *([[]] * len(along))])
            for index, value in zip(present, parts, strict=False):
                values[index] = value
            if along:
                found = parts[len(present) :]
                scalars_there[packet.device] = dict(
                    zip(along, found, strict=True)
                )
        return values, scalars_there

    def assign(self, tensors: Sequence[tf.Tensor | None]) -> None:
        """Assigns tensors to the variables; None leaves one as it is."""
        there = self.bring(tensors)
        for variable, value in zip(self._variables, there, strict=True):
            if value is not None:
                with tf.device(variable.device):
                    variable.assign(value, read_value=False)


def _split(flat: tf.Tensor, shapes: Sequence[Any]) -> list[tf.Tensor]:
    parts = tf.split(flat, [math.prod(shape) for shape in shapes])
    return [
        tf.reshape(part, shape)
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _concat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
