"""A model that never changes, as a teacher: ordinary, offline distillation."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import copies
from tfdistill.teachers import features as features_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import teacher
from tfdistill.training import guards
from tfdistill.training import steps


class FixedTeacher(teacher.Teacher):
    """A Keras model, a `.keras` file or a SavedModel, run as it is.

    A Keras model's values are copied when `fit` begins: it does not matter
    where the model was made, and it may be trained further, or be the student,
    without the teacher changing. Memory holds both.

    Under parameter servers it must be a Keras model or a `.keras` file.

    Example:
        >>> model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
        >>> FixedTeacher(model, name="large").name
        'large'
    """

    def __init__(
        self,
        model: keras.Model | str | os.PathLike[str],
        *,
        name: str | None = None,
        weight: float = 1.0,
        trust_graph: bool = False,
    ) -> None:
        """Loads nothing yet.

        Args:
            model: A built Keras model, such as those of KerasHub; the path of
                a `.keras` file, which is loaded in Keras' safe mode; or the
                directory of a SavedModel.
            name: For logs. Default: the model's name, or the path.
            weight: What it counts beside other teachers, >= 0. Default 1.
            trust_graph: Whether to load a SavedModel that holds more than
                `exports.graph_ops` lists. Loading one runs its code. Default
                False.

        Raises:
            ValueError: An argument is not as above.
        """
        if isinstance(model, keras.Model):
            if not model.built:
                raise ValueError(
                    "A FixedTeacher must be built and trained; received "
                    f"{model.name!r}, which has no variables. Call it once on "
                    "a batch, and load its weights."
                )
            path, default = "", model.name
        elif isinstance(model, str | os.PathLike):
            path = default = os.fspath(model)
        else:
            raise ValueError(
                "A FixedTeacher must be a keras.Model, the path of a .keras "
                "file or the directory of a SavedModel; received "
                f"{type(model).__name__}. Of a KerasHub preset, pass what "
                "`from_preset` returns."
            )
        super().__init__(name=name or default, weight=weight)
        self._given: Any = model
        self._path = path
        self._trust_graph = trust_graph

    @property
    def is_keras(self) -> bool:
        """Whether it is a Keras model, whose layers have names."""
        return not self._path or self._path.endswith(".keras")

    def keras_model(self) -> keras.Model:
        """Returns the Keras model; loads a file, once."""
        if not isinstance(self._given, keras.Model):
            self._given = keras.saving.load_model(self._path, compile=False)
        model = self._given
        if isinstance(model, steps.Codistilled):
            model = model.student
        if path := guards.first_not_finite(model):
            raise ValueError(
                "A FixedTeacher must have finite weights; received "
                f"{model.name!r} with NaN or infinity in {path}. Pass a model "
                "whose training did not diverge."
            )
        return model

    def attach(self, student: teacher.Student) -> None:
        """Loads the model, and copies its values."""
        if not self.is_keras:
            self._load(student)
            return
        graph, order = _traced(self.keras_model(), student)
        # What a file held is not held twice.
        self._given = None if self._path else self._given
        values = saved_model.SavedModelWriter(graph).snapshot()
        if student.on_servers:
            self.remote = on_servers.ServerCopy("model", graph, values)
        place = self.remote or copies.Copy(graph, values)

        def in_order(outputs: list[tf.Tensor]) -> list[tf.Tensor]:
            ours = [outputs[index] for index in order]
            return [*ours, *outputs[len(order) :]]

        self._infer = lambda inputs: in_order(place.infer(inputs))

    def _load(self, student: teacher.Student) -> None:
        if student.on_servers:
            raise ValueError(
                "A fixed teacher of a parameter-server group must be a Keras "
                f"model or a .keras file; received {self._path!r}. Pass one "
                "of these, or train without parameter servers."
            )
        self._infer = other_graphs.load(
            self._path, student.graph, trust=self._trust_graph
        )

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Runs the model on the student's inputs."""
        return self._infer(batch.inputs)


def only_model(teachers: Sequence[teacher.Teacher]) -> keras.Model:
    """Returns the one Keras model that is the only teacher.

    Raises:
        ValueError: There are other teachers, or several.
    """
    only = teachers[0] if len(teachers) == 1 else None
    if not isinstance(only, FixedTeacher) or not only.is_keras:
        raise ValueError(
            "`feature_loss` needs exactly one teacher, a Keras model, since it "
            "names that model's layers; received "
            f"{[each.name for each in teachers]}. Pass "
            "teachers.FixedTeacher(model), or leave `feature_loss` out."
        )
    return only.keras_model()


def _traced(
    model: keras.Model, student: teacher.Student
) -> tuple[student_graph.StudentGraph, list[int]]:
    """Traces a model's inference for the student's inputs.

    Returns also the places of the student's outputs among the model's. What
    its hidden layers return follows the outputs. ValueError if inputs or
    outputs are not those of the student.
    """
    names, traced = student.layers, model
    if names:
        traced = features_lib.with_layers(model, names, role="teacher")
    try:
        graph = student_graph.StudentGraph(traced, student.graph.input_spec)
        spec = graph.output_spec[0] if names else graph.output_spec
        return graph, _order(spec, student.graph.output_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The model {model.name!r} cannot be a teacher of this "
            "student: it must take the student's inputs and return "
            f"outputs of the student's shapes; {error}"
        ) from error


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
