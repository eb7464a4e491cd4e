"""A model that never changes, as a teacher: ordinary, offline distillation."""

import os
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import features as features_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import teacher
from tfdistill.training import guards


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
        canary: canary_lib.Canary | tf.data.Dataset | None = None,
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
            canary: Examples that it must predict before it teaches: a
                `Canary`, or a dataset, of which the first 256 examples are
                taken. Default: none.

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
        self._canary = canary_lib.as_canary(canary)

    @property
    def is_keras(self) -> bool:
        """Whether it is a Keras model, whose layers have names."""
        return not self._path or self._path.endswith(".keras")

    def keras_model(self) -> keras.Model:
        """Returns the Keras model; loads a file, once."""
        if not isinstance(self._given, keras.Model):
            self._given = keras.saving.load_model(self._path, compile=False)
        model = getattr(self._given, "student", self._given)
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
        graph = student.graph
        model = FrozenModel(self.keras_model(), graph, layers=student.layers)
        # What a file held is not held twice.
        self._given = None if self._path else self._given
        if student.on_servers:
            self.remote = ServerModel(model)
            self._infer = self.remote.infer
            size = len(keras.tree.flatten(graph.output_spec))
            self._try_out(lambda x: self.remote.try_out(x)[:size], student)
            return
        model.copy()
        self._infer = model
        self._try_out(model.outputs, student)

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
        self._try_out(self._infer, student)

    def _try_out(self, predict: Any, student: teacher.Student) -> None:
        if self._canary is not None:
            loss = student.loss
            self._canary.settle(loss.from_logits if loss else None)
            self._canary.check(predict, student.graph.output_spec)

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
            traced = features_lib.with_layers(model, layers, role="teacher")
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


class ServerModel:
    """A Keras model in memory, of a parameter-server group.

    Its values are copied to the servers, from which each worker fetches them
    once. Tables that are on servers are looked up there.
    """

    half = 0

    def __init__(self, model: FrozenModel) -> None:
        """Takes the model's present values, but for tables on servers."""
        self._model = model
        variables, self._values = model.graph.variables, model.values
        self._tables = {
            index: [
                on_servers.Rows(shard.value)
                for shard in variables[index].layer.shards
            ]
            for index, value in enumerate(self._values)
            if value is None
        }
        self._masters = {
            index: tf.Variable(value, trainable=False)
            for index, value in enumerate(self._values)
            if value is not None
        }
        self._local = {
            index: on_servers.WorkerVariable(
                np.zeros(master.shape, master.dtype.as_numpy_dtype),
                name=f"model_{index}",
            )
            for index, master in self._masters.items()
        }
        self._is_here = on_servers.WorkerVariable(
            np.array(False), name="model_is_here"
        )

    @property
    def worker_variables(self) -> list[on_servers.WorkerVariable]:
        """What each worker keeps of this teacher."""
        return [*self._local.values(), self._is_here]

    def use(self, arguments: tf.Tensor) -> None:
        """Fetches the values to a worker that has not got them yet."""
        del arguments

        def fetch() -> tf.Tensor:
            for index, master in self._masters.items():
                with tf.device(master.device):
                    value = master.read_value()
                self._local[index].assign(value)
            self._is_here.assign(True)
            return tf.constant(True)

        tf.cond(self._is_here.value(), lambda: tf.constant(True), fetch)

    def infer(self, inputs: Any) -> list[tf.Tensor]:
        """Predicts on a worker, in the step."""
        values = [
            self._local[index].value() if index in self._local else None
            for index in range(len(self._values))
        ]
        return self._infer(values, inputs)

    def try_out(self, inputs: Any) -> list[tf.Tensor]:
        """Predicts on the coordinator."""
        return self._infer(self._values, inputs)

    def _infer(self, values: Sequence[Any], inputs: Any) -> list[tf.Tensor]:
        found = [
            self._tables.get(index, value) for index, value in enumerate(values)
        ]
        return self._model.in_order(self._model.graph.infer_from(found, inputs))


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
