"""Keras models as teachers: copies of their values, run in inference mode.

A teacher's variables are copies, made in the strategy's scope: it does not
matter where the model itself was made, and the model may be trained further,
or be the student, without the teacher changing.
"""

import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import features
from tfdistill.training import finite


def checked(models: Any) -> tuple[Any, ...]:
    """Returns the models and paths of `TeacherSet(models=...)`."""
    if isinstance(models, keras.Model | str | bytes | os.PathLike):
        raise ValueError(
            "`models` must be a list of models or .keras files; received "
            f"{models!r}. Put it into brackets."
        )
    found = tuple(models)
    for model in found:
        if isinstance(model, str | os.PathLike):
            _check_file(os.fspath(model))
        elif not isinstance(model, keras.Model):
            raise ValueError(
                "`models` must hold keras.Model objects or paths of .keras "
                f"files; received {type(model).__name__}. Of a KerasHub "
                "preset, pass what `from_preset` returns."
            )
        elif not model.built:
            raise ValueError(
                "A teacher in `models` must be built and trained; received "
                f"{model.name!r}, which has no variables. Call it once on a "
                "batch, and load its weights."
            )
    return found


def _check_file(path: str) -> None:
    if not path.endswith(".keras"):
        raise ValueError(
            "`models` must name files that end in .keras; received "
            f"{path!r}. For the directory of a SavedModel, use "
            "TeacherSet(saved_models=[path])."
        )


def names(models: Sequence[Any]) -> list[str]:
    """Names each teacher by its path, or as its model is named; each once."""
    found: list[str] = []
    for model in models:
        name = getattr(model, "name", None) or os.fspath(model)
        number, unique = 0, name
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.append(unique)
    return found


def loaded(model: Any) -> keras.Model:
    """Returns the model itself, or what its file holds.

    Keras' safe mode stays on: a file with Python code of its own is refused.
    """
    if not isinstance(model, keras.Model):
        model = keras.saving.load_model(os.fspath(model), compile=False)
    elif hasattr(model, "codistillation"):
        # The wrapper of a student adds nothing to what it predicts.
        model = model.student
    if path := finite.Weights(model).first_not_finite():
        raise ValueError(
            "A teacher in `models` must have finite weights; received "
            f"{model.name!r} with NaN or infinity in {path}. Pass a model "
            "whose training did not diverge."
        )
    return model


class FrozenModel:
    """A model's inference on a copy of its values, called as the student is.

    Attributes:
        graph: The model's traced inference.
        values: The model's values, by variable of the graph; None for a table
            that is on parameter servers.
        variables: A copy of each, where the current strategy has them.
    """

    def __init__(
        self,
        model: keras.Model,
        student: student_graph.StudentGraph,
        *,
        layers: Sequence[str] = (),
    ) -> None:
        """Traces the model for the student's inputs; copies nothing yet.

        What hidden `layers` return follows the outputs. ValueError if inputs
        or outputs are not those of the student.
        """
        traced = model
        if layers:
            traced = features.with_layers(model, layers, role="teacher")
        try:
            self.graph = student_graph.StudentGraph(traced, student.input_spec)
            spec = self.graph.output_spec
            self._order = _order(
                spec[0] if layers else spec, student.output_spec
            )
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"The model {model.name!r} cannot be a teacher of this "
                "student: it must take the student's inputs and return "
                f"outputs of the student's shapes; {error}"
            ) from error
        self.values = saved_model.SavedModelWriter(self.graph).snapshot()
        self.variables: list[tf.Variable] = []

    def copy(self) -> None:
        """Copies the values. Call it in the strategy's scope."""
        self.variables = [
            tf.Variable(value, trainable=False) for value in self.values
        ]
        self.values = []

    def __call__(self, inputs: Any) -> list[tf.Tensor]:
        """Predicts; outputs flat, in the order of the student's, and layers."""
        return self.in_order(self.graph(self.variables, inputs))

    def outputs(self, inputs: Any) -> list[tf.Tensor]:
        """Predicts without the hidden layers."""
        return self(inputs)[: len(self._order)]

    def in_order(self, outputs: Any) -> list[tf.Tensor]:
        """Flattens what the graph returned to the order of the student's."""
        flat = keras.tree.flatten(outputs)
        hidden = flat[len(self._order) :]
        return [*(flat[index] for index in self._order), *hidden]


def _order(theirs: Any, ours: Any) -> list[int]:
    """Finds the place of each of the student's outputs among the model's."""
    specs = student_graph.named(theirs, "outputs")
    found = other_graphs.match(
        {name: spec.shape for name, spec in specs.items()},
        student_graph.named(ours, "outputs"),
        what="outputs",
    )
    places = list(specs)
    return [places.index(name) for name in found.values()]
