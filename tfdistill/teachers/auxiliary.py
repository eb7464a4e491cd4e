"""Auxiliary heads: outputs that learn from teachers in place of others.

A student's output that learns from a teacher takes over its faults: of one
that predicts too many clicks, it learns to predict too many. An auxiliary head
takes the teachers' part. What stands below both outputs learns from both, and
the student's own output only from labels, so that it stays calibrated. Heads
are trained and nothing else: a student without them is what evaluates,
predicts, teaches and is saved.
"""

from collections.abc import Mapping
from typing import Any

import keras

from tfdistill.training import steps


class AuxiliaryHeads(keras.layers.Layer):
    """Runs a student with its heads, in a step that has teachers."""

    def __init__(self, model: keras.Model, heads: Mapping[str, str]) -> None:
        """Takes what `student_of` takes; makes no variables."""
        super().__init__(name="auxiliary_heads")
        self._model, self._heads = model, dict(heads)
        self.built = True

    def call(self, inputs: object, training: bool | None = None) -> Any:
        """Returns the student's outputs, and those that teachers teach."""
        outputs = self._model(inputs, training=training)
        own = _without(outputs, self._heads)
        taught = {of: outputs[head] for head, of in self._heads.items()}
        return own, {**own, **taught}


def student_of(model: keras.Model, heads: Mapping[str, str]) -> keras.Model:
    """Returns a model without its heads; both have the same layers.

    `heads` maps the name of each head to the name of the output that it learns
    for. ValueError if these are not outputs of a functional model.
    """
    outputs = steps.symbolic_output(model)
    if not isinstance(outputs, dict):
        raise ValueError(
            "`auxiliary_heads` need a functional model whose outputs are a "
            "dict, keras.Model(inputs, {'click': ..., 'click_soft': ...}); "
            f"received {type(model).__name__}."
        )
    own = _without(outputs, heads)
    are_alike = all(
        head in outputs and of in own and outputs[head].shape == own[of].shape
        for head, of in heads.items()
    )
    if not are_alike or len(set(heads.values())) != len(heads):
        shapes = {name: tuple(value.shape) for name, value in outputs.items()}
        raise ValueError(
            "`auxiliary_heads` must map each head to another output of the "
            f"same shape that isn't a head; received {dict(heads)} for outputs "
            f"of the shapes {shapes}."
        )
    student = keras.Model(model.input, own, name=model.name)
    if type(model) is not type(student):
        raise ValueError(
            "`auxiliary_heads` need a functional model, because a subclass's "
            f"methods would be lost; received {type(model).__name__}."
        )
    return student


def _without(outputs: Mapping[str, Any], heads: Mapping[str, str]) -> Any:
    return {k: value for k, value in outputs.items() if k not in heads}
