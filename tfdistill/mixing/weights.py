"""A student's weights as a mix sees them: taken, mixed, put in place.

Elementwise in one compiled function of the weights, of one mean of the
peers' versions and of the rule's state. A variable takes over the buffer of
the value it is assigned, so that assigning costs nothing.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import tables
from tfdistill.exports import student_graph
from tfdistill.mixing import rules


class Floats:
    """The floats of one student, in the order of its graph's variables.

    Those that are trained come first.
    """

    def __init__(
        self,
        student: keras.Model,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Takes a built student, and its graph.

        ValueError if rows of a table belong to other ids in other groups.
        """
        if any(table.is_by_id for table in tables.tables_of(student)):
            raise ValueError(
                "Only tables whose rows belong to the same ids in all groups "
                "can be mixed; received a DynamicEmbedding, which assigns rows "
                "to ids as they arrive. Learn from the other groups' "
                "predictions with teachers.Peers()."
            )
        self._strategy = strategy
        self._trained = {id(v) for v in student.trainable_variables}
        floats = [
            (index, variable)
            for index, variable in enumerate(graph.variables)
            if tf.as_dtype(variable.dtype).is_floating
        ]
        self._floats = sorted(
            floats, key=lambda pair: not self._is_trained(pair[1])
        )
        self._num_trained = sum(self._is_trained(v) for _, v in self._floats)

    def _is_trained(self, variable: keras.Variable) -> bool:
        return id(tables.parts_of(variable)[0]) in self._trained

    def is_of(self, student: keras.Model) -> bool:
        """Whether these are the weights of a student, as it trains now."""
        return self._trained == {id(v) for v in student.trainable_variables}

    def digest(self) -> str:
        """Returns the SHA-256 of the present weights, in hexadecimal."""
        return digest(self._take())

    def _take(
        self, floats: Sequence[tuple[str, Any]] | None = None
    ) -> list[tf.Tensor]:
        """Returns the values of some of them; by default of all."""
        return [
            tf.concat([self._copies(p)[0] for p in parts], axis=0)
            if len(parts := tables.parts_of(variable)) > 1
            else tf.convert_to_tensor(self._copies(parts[0])[0])
            for _, variable in floats or self._floats
        ]

    def _trained_values(self) -> list[tf.Tensor]:
        return self._take()[: self._num_trained]

    def _copies(self, variable: keras.Variable) -> tuple[Any, ...]:
        return self._strategy.experimental_local_results(variable.value)


class MixedWeights(Floats):
    """All floats of a student, and the state of the rule that mixes them."""

    def __init__(
        self,
        student: keras.Model,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
        rule: rules.Rule,
    ) -> None:
        """Makes the rule's state, of the student's present weights."""
        super().__init__(student, graph, strategy)
        self._rule = rule
        self.variables = [
            tf.Variable(value, trainable=False)
            for value in rule.start(self._trained_values())
        ]
        values = [tf.TensorSpec(v.shape, v.dtype) for _, v in self._floats]
        state = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        number = tf.TensorSpec([], tf.float64)
        # Traced here: the first mix shall not wait for it.
        if rule.way is None:
            self._mix = tf.function(
                self._mixed, autograph=False
            ).get_concrete_function(values, values, state, number, number)
        else:
            self._move = tf.function(
                self._moved, autograph=False
            ).get_concrete_function(values, number)

    def start(self) -> None:
        """Begins the rule's state again, at the present weights."""
        values = self._rule.start(self._trained_values())
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(value)

    def mean_of(self, versions: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the mean of versions, for `mix`; in any thread."""
        if not versions:
            return []
        with tf.device("CPU:0"):
            return [
                mean_of([tf.cast(v[index], variable.dtype) for v in versions])
                for index, variable in self._floats
            ]

    def mix(self, others: Sequence[Any], *, num: int) -> None:
        """Mixes the weights with the mean of `num` other groups', if any."""
        share = num / (num + 1)
        others = others or self._take()
        if self._rule.way is not None:
            self._move(
                list(others), tf.constant(self._rule.way * share, tf.float64)
            )
            return
        own = self._take()
        new, state = self._mix(
            own,
            list(others),
            list(map(tf.convert_to_tensor, self.variables)),
            tf.constant(share, tf.float64),
            tf.constant(num + 1, tf.float64),
        )
        for (_, variable), value in zip(self._floats, new, strict=True):
            tables.assign(variable, value, self._strategy)
        for variable, value in zip(self.variables, state, strict=True):
            variable.assign(value)

    def _moved(self, others: list[tf.Tensor], way: tf.Tensor) -> None:
        """Moves all floats in place, in two passes over the memory."""
        for (_, variable), other in zip(self._floats, others, strict=True):
            for part, target in tables.by_part(variable, other):
                for copy in self._copies(part):
                    with tf.device(copy.device):
                        tf.raw_ops.ResourceApplyGradientDescent(
                            var=copy.handle,
                            alpha=tf.cast(way, copy.dtype),
                            delta=tf.convert_to_tensor(copy) - target,
                        )

    def _mixed(
        self,
        own: list[tf.Tensor],
        others: list[tf.Tensor],
        state: list[tf.Tensor],
        share: tf.Tensor,
        num: tf.Tensor,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        mean = [
            o + tf.cast(share, o.dtype) * (other - o)
            for o, other in zip(own, others, strict=True)
        ]
        first, rule = self._num_trained, self._rule
        found = rule.mixed(own[:first], mean[:first], state, num=num)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ValueError(
                f"`mixed` of {type(rule).__name__} must return the new weights "
                f"and the new state, as two lists; received {found!r:.200}."
            )
        others = rule.statistics(own[first:], mean[first:])
        for method, kind, new, old in (
            ("mixed", "weights", found[0], own[:first]),
            ("mixed", "state", found[1], state),
            ("statistics", "values", others, own[first:]),
        ):
            shapes = [
                [
                    (tuple(v.shape), v.dtype.name)
                    for v in map(tf.convert_to_tensor, x)
                ]
                for x in (new, old)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"`{method}` of {type(rule).__name__} must return {kind} "
                    f"of the same shapes and dtypes, in the same order, "
                    f"{shapes[1]}; received {shapes[0]}."
                )
        return [*found[0], *others], list(found[1])


def digest(values: Sequence[tf.Tensor]) -> str:
    """Returns the SHA-256 of tensors' bytes, in hexadecimal."""
    found = hashlib.sha256()
    for value in values:
        # No buffer holds bfloat16, or nothing at all.
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def mean_of(values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the mean of tensors; equal ones stay what they are."""
    first, *others = values
    mean = first
    for value in others:
        mean += 1 / len(values) * (value - first)
    return mean
