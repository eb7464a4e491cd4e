"""A model's inference on values that are not the model's: a teacher at work."""

import copy
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph


class Copy:
    """A copy of the variables of a graph, on each replica."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        values: Sequence[Any] | None = None,
        *,
        shares: bool = False,
    ) -> None:
        """Makes them, by default all 0. Call it in the strategy's scope.

        Of values that are quantized, it holds what these hold. If it `shares`,
        the student's frozen variables are used where they are, for as long as
        they have the values that are put in place.
        """
        self._graph = graph
        self._shared = set(graph.frozen) if shares else set()
        empty = [tf.zeros(v.shape, v.dtype) for v in graph.variables]
        self.variables = [
            variable.value
            if index in self._shared
            else _holding(value, variable)
            for index, (value, variable) in enumerate(
                zip(values or empty, graph.variables, strict=True)
            )
        ]

    def with_room_for(self, values: Sequence[Any]) -> "Copy":
        """Returns one that fits; where values are None, it holds the same."""
        found = copy.copy(self)
        found._shared = {i for i in self._shared if values[i] is None}
        found.variables = [
            ours if value is None else _holding(value, variable)
            for ours, value, variable in zip(
                self.variables, values, self._graph.variables, strict=True
            )
        ]
        return found

    def without_trained(self) -> "Copy":
        """Returns one that shares nothing that the student trains by now."""
        trained = self._shared - self._graph.frozen
        return self.with_room_for(
            [
                tf.convert_to_tensor(variable) if index in trained else None
                for index, variable in enumerate(self.variables)
            ]
        )

    @property
    def held(self) -> Sequence[Any]:
        """The values in use."""
        return self.variables

    def prepared(self, values: Sequence[Any]) -> list[Any]:
        """Returns values, None for those which the student shares, bit by bit.

        Any thread may call it.
        """
        return [
            None if index in self._shared and _same(value, ours) else value
            for index, (value, ours) in enumerate(
                zip(values, self.variables, strict=True)
            )
        ]

    def fits(self, values: Sequence[Any]) -> bool:
        """Whether it can hold these values: in their form, and by itself."""
        is_free = all(values[index] is None for index in self._shared)
        forms = quantized.forms(self._filled(values))
        return is_free and forms == quantized.forms(self.variables)

    def _filled(self, values: Sequence[Any]) -> list[Any]:
        return [
            ours if value is None else value
            for value, ours in zip(values, self.variables, strict=True)
        ]

    def install(self, values: Iterable[Any]) -> None:
        """Puts values that aren't None in place, in the variables' dtypes."""
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(value, quantized.Quantized):
                variable.assign(value)
            elif value is not None:
                variable.assign(tf.cast(value, variable.dtype))

    def infer(self, inputs: object) -> list[tf.Tensor]:
        """Runs the values in use, in the step."""
        return self.try_out(self.variables, inputs)

    def try_out(self, values: Sequence[Any], inputs: object) -> list[tf.Tensor]:
        """Runs other values, outside of the step; for None, those in use."""
        return keras.tree.flatten(self._graph(self._filled(values), inputs))

    def read(
        self, version: versions.Version, expected: Mapping[str, Any]
    ) -> saved_model.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return saved_model.read_variables(version.path, expected, widen=False)


def _holding(value: object, variable: keras.Variable | tf.Variable) -> Any:
    """Makes what holds a value of one of a graph's variables."""
    if isinstance(value, quantized.Quantized):
        return value.in_variables()
    return tf.Variable(tf.cast(value, variable.dtype), trainable=False)


def _same(value: object, variable: tf.Variable) -> bool:
    """Whether a value, in a variable's precision, has its bits."""
    if value is None or isinstance(value, quantized.Quantized):
        return value is None
    pair = [np.asarray(tf.cast(v, variable.dtype)) for v in (value, variable)]
    return pair[0].tobytes() == pair[1].tobytes()
