"""Hidden layers of a student, compared with those of its teacher in a step.

Both models give their hidden layers beside their outputs, so that neither runs
twice. Functional models say what a layer returns; others do not.
"""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.teachers import soft_targets
from tfdistill.training import global_batch


def with_layers(
    model: keras.Model, names: Sequence[str], *, role: str
) -> keras.Model:
    """Returns a model of the same layers, `[outputs, [layer, ...]]`.

    `role` is what a message calls the model. ValueError if it is not
    functional, or has no such layer.
    """
    home = next(base for base in type(model).__mro__ if "call" in vars(base))
    is_keras = home.__module__.partition(".")[0] == "keras"
    if getattr(model, "inputs", None) is None or not is_keras:
        raise ValueError(
            f"The {role} of a FeatureDistillation must be a functional or "
            "Sequential model without a `call` of its own, whose layers have "
            f"outputs; received {type(model).__name__}. Build it from "
            "keras.Input, or learn from outputs only, by a "
            "`distillation_loss`."
        )
    hidden = [_hidden(model, name, role) for name in names]
    if isinstance(model, keras.Sequential):
        return keras.Model(model.inputs[0], [model.outputs[0], hidden])
    # Of a list of one, Keras takes and returns the one.
    inputs, outputs = (
        each[0] if isinstance(each, list | tuple) and len(each) == 1 else each
        for each in (model.input, model.output)
    )
    return keras.Model(inputs, [outputs, hidden])


def _hidden(model: keras.Model, name: str, role: str) -> Any:
    found = [layer for layer in model.layers if layer.name == name]
    if not found or isinstance(found[0], keras.Model):
        known = [
            layer.name
            for layer in model.layers
            if not isinstance(layer, keras.Model)
        ]
        raise ValueError(
            f"FeatureDistillation must name layers of the {role}, which are "
            f"{known}; received {name!r}. A model that is a layer itself "
            "cannot be looked into: make its layers part of the model."
        )
    output = found[0].output
    if not isinstance(output, keras.KerasTensor) or len(output.shape) < 2:
        raise ValueError(
            f"The layer {name!r} of the {role} must return one tensor "
            f"[batch, ..., features]; received {output}. Name another layer."
        )
    return output


class Features:
    """A `FeatureDistillation` between one student and one teacher.

    Attributes:
        loss: What it was made of.
        weight: What the term counts beside the distillation loss.
        teacher_layers: The layers of the teacher that are compared.
        projections: The layers that were asked for, one for each pair, which
            are trained with the student and are no part of it.
    """

    def __init__(
        self,
        loss: losses_lib.FeatureDistillation,
        student: keras.Model,
        teacher: keras.Model,
    ) -> None:
        """Makes the projections. Call it in the strategy's scope."""
        if not isinstance(loss, losses_lib.FeatureDistillation):
            raise ValueError(
                "`feature_loss` must be a tfdistill.losses."
                f"FeatureDistillation; received {loss!r}."
            )
        self.loss, self.weight = loss, loss.weight
        self._loss = global_batch.over_global_batch(loss.loss)
        ours = [own for own, _ in loss.pairs]
        self.teacher_layers = [theirs for _, theirs in loss.pairs]
        self._student = with_layers(student, ours, role="student")
        found = with_layers(teacher, self.teacher_layers, role="teacher")
        self._num_outputs = len(keras.tree.flatten(student.outputs))
        hidden = self._student.output[1]
        targets = found.output[1]
        self.projections: list[keras.layers.Dense] = []
        for (own, theirs), one, other in zip(
            loss.pairs, hidden, targets, strict=True
        ):
            if loss.projection:
                layer = keras.layers.Dense(
                    other.shape[-1],
                    name=f"projection_{own}_to_{theirs}".replace("/", "_"),
                )
                layer.build(one.shape)
                self.projections.append(layer)
            _check_shapes(
                (own, (*one.shape[:-1], other.shape[-1]))
                if loss.projection
                else (own, one.shape),
                (theirs, other.shape),
            )

    def student(self, inputs: Any) -> tuple[Any, list[tf.Tensor]]:
        """Runs the student in training; returns outputs and features."""
        outputs, hidden = self._student(inputs, training=True)
        if not self.projections:
            return outputs, hidden
        pairs = zip(self.projections, hidden, strict=True)
        return outputs, [layer(value) for layer, value in pairs]

    def split(
        self, soft: soft_targets.SoftTargets
    ) -> tuple[soft_targets.SoftTargets, list[tf.Tensor]]:
        """Takes the teacher's features away from its outputs."""
        return soft.first(self._num_outputs), [
            teachers[0] for teachers in soft.outputs[self._num_outputs :]
        ]

    def __call__(
        self,
        targets: Sequence[tf.Tensor],
        hidden: Sequence[tf.Tensor],
        rows: tf.Tensor,
    ) -> tf.Tensor:
        """Computes this replica's share of the term, a float scalar.

        `rows` says what each example counts, float `[batch]`.
        """
        total = tf.zeros([])
        for target, value in zip(targets, hidden, strict=True):
            leading = tf.reshape(rows, [-1, *[1] * (len(value.shape) - 1)])
            # Before any arithmetic: 0 * NaN is NaN.
            target = tf.where(leading > 0, target, tf.zeros_like(target))
            weights = tf.broadcast_to(leading[..., 0], tf.shape(value)[:-1])
            share = self._loss(target, value, weights)
            total += tf.cast(share, tf.float32)
        return total


def _check_shapes(student: tuple[str, Any], teacher: tuple[str, Any]) -> None:
    (own, ours), (name, theirs) = student, teacher
    if not tf.TensorShape(ours).is_compatible_with(tf.TensorShape(theirs)):
        raise ValueError(
            f"The layers of a pair must return one shape; received "
            f"{tuple(ours)} from {own!r} of the student and {tuple(theirs)} "
            f"from {name!r} of the teacher. If they differ in the last "
            "dimension only, pass FeatureDistillation(projection=True)."
        )
