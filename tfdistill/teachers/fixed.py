"""A model that never changes, as a teacher: ordinary, offline distillation."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import features  # noqa: F401  # For a file's layers.
from tfdistill.embedding import tables
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import output_kinds
from tfdistill.teachers import teacher
from tfdistill.training import guards
from tfdistill.training import steps


class FixedTeacher(teacher.Teacher):
    """A Keras model, a `.keras` file or a SavedModel that doesn't change.

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
            model: A built Keras model, such as a KerasHub model; the path of
                a `.keras` file, which is loaded in Keras' safe mode; or the
                directory of a SavedModel.
            name: For logs. Default: the model's name, or the path.
            weight: Weight relative to other teachers, >= 0. Default 1.
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
                    f"{model.name!r}, which has no variables. Call the model "
                    "once on a batch, and load its weights."
                )
            path, default = "", model.name
        elif isinstance(model, str | os.PathLike):
            path = default = os.fspath(model)
        else:
            raise ValueError(
                "A FixedTeacher must be a keras.Model, the path of a .keras "
                "file or the directory of a SavedModel; received "
                f"{type(model).__name__}. For a KerasHub preset, pass the "
                "model that `from_preset` returns."
            )
        super().__init__(name=name or default, weight=weight)
        self._given: Any = model
        self._path = path
        self._trust_graph = trust_graph
        # What runs the model, and the places of the student's outputs there.
        self._copy: Any = None
        self._order: Sequence[int] = ()

    def _model(self) -> keras.Model:
        model = self._given
        if self._path:
            model = keras.saving.load_model(self._path, compile=False)
        if isinstance(model, steps.Codistilled):
            model = model.student
        if path := guards.first_not_finite(model):
            raise ValueError(
                "A FixedTeacher must have finite weights; received "
                f"{model.name!r} with NaN or infinity in {path}. Pass a model "
                "whose training didn't diverge."
            )
        return model

    def attach(self, student: teacher.Student) -> None:
        """Loads the model, and copies its values."""
        if self._path and not self._path.endswith(".keras"):
            self._copy = self._loaded(student)
            ends = self._copy.ends
            self._order = range(len(ends))
        else:
            graph, self._order = _traced(self._model(), student)
            ends = [graph.ends[index] for index in self._order]
            values = saved_model.SavedModelWriter(graph).snapshot()
            self._copy = student.place(self.name, graph, values)
        output_kinds.check_ends(
            self.name, ends, student.losses, student.graph.ends
        )

    def _loaded(self, student: teacher.Student) -> other_graphs.FrozenFunction:
        if student.on_servers:
            raise ValueError(
                "A fixed teacher of a parameter-server group must be a Keras "
                f"model or a .keras file; received {self._path!r}. Pass such a "
                "model, or train without parameter servers."
            )
        return other_graphs.load(
            self._path,
            student.graph.input_spec,
            student.graph.output_spec,
            trust=self._trust_graph,
            remedy="teachers.FixedTeacher(path, trust_graph=True)",
        )

    def values(self, writer: saved_model.SavedModelWriter) -> list[Any] | None:
        """Returns its values for the variables that a student's writer writes.

        None if it has other variables.
        """
        if isinstance(self._copy, other_graphs.FrozenFunction):
            try:
                return saved_model.read_variables(self._path, writer.variables)
            except (ValueError, OSError):
                return None
        found = [
            v if isinstance(v, list) else tf.convert_to_tensor(v)
            for v in self._copy.variables
        ]
        ours = writer.graph.variables
        same = len(found) == len(ours) and all(
            _shapes(v)
            == _shapes(tables.parts_of(o) if isinstance(v, list) else o)
            for v, o in zip(found, ours, strict=True)
        )
        return found if same else None

    def predict(self, inputs: object) -> list[tf.Tensor]:
        """Runs the model outside of a step, which may be on other workers."""
        if isinstance(self._copy, other_graphs.FrozenFunction):
            return self._copy(inputs)
        return self._copy.try_out(self._copy.variables, inputs)

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Runs the model on the student's inputs."""
        outputs = self._copy.infer(batch.inputs)
        ordered = [outputs[index] for index in self._order]
        return output_kinds.checked(self.name, ordered, batch.losses)


def _shapes(value: Any) -> list[list[int]]:
    parts = value if isinstance(value, list) else [value]
    return [[*part.shape] for part in parts]


def _traced(
    model: keras.Model, student: teacher.Student
) -> tuple[student_graph.StudentGraph, list[int]]:
    """Traces a model's inference for the student's inputs.

    Also returns the places of the student's outputs among the model's.
    ValueError if its inputs or outputs don't fit the student's.
    """
    try:
        graph = student_graph.StudentGraph(model, student.graph.input_spec)
        return graph, _order(graph.output_spec, student.graph.output_spec)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"The model {model.name!r} cannot be a teacher of this "
            "student: it must take the student's inputs and return "
            f"outputs of the student's shapes; {error}"
        ) from error


def _order(theirs: object, ours: object) -> list[int]:
    """Finds the place of each of the student's outputs among the model's."""
    specs = student_graph.named(theirs, "outputs")
    found = other_graphs.match(
        {name: spec.shape for name, spec in specs.items()},
        student_graph.named(ours, "outputs"),
        what="outputs",
    )
    places = list(specs)
    return [places.index(name) for name in found.values()]
