"""A student as SavedModels: the graph once, the variables often; and back.

`model.export` traces and writes everything each time. Between two exports of
one student only values change, so `SavedModelWriter` keeps the graph's files
and writes one copy of each variable beside them. What it writes is a whole
SavedModel for `tf.saved_model.load` and TensorFlow Serving.
"""

import inspect
import os
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import tables
from tfdistill.exports import checkpoints
from tfdistill.exports import quantized
from tfdistill.exports import server_bundle
from tfdistill.exports import student_graph
from tfdistill.system import keras_internals

# None stands for a table on parameter servers, which is read as it is written.
Snapshot = list[tf.Tensor | quantized.Quantized | None]


def _served(
    graph: student_graph.StudentGraph,
    stored: Mapping[str, tf.Tensor],
    forms: Sequence[quantized.Form],
) -> tuple[tf.Module, Any]:
    """Returns what the SavedModel holds, and `serving_default`.

    What is not in `stored` belongs to a table on parameter servers, whose rows
    are written another way.
    """
    module = tf.Module()
    parts = {}
    with tf.init_scope():
        for variable, form in zip(graph.variables, forms, strict=True):
            for key, spec in form.specs.items():
                parts[key] = (
                    tf.Variable(
                        stored[key], trainable=False, name=_name(variable)
                    )
                    if key in stored
                    else _stand_in(spec, _name(variable))
                )
    values = [
        quantized.whole(form.key, parts, form.shape, form.dtype)
        for form in forms
    ]
    module.model_variables = [parts[form.key] for form in forms]
    if scales := {
        str(index): value.scale
        for index, value in enumerate(values)
        if isinstance(value, quantized.Quantized)
    }:
        module.scales = scales
    # A SavedModel holds a table only if an attribute leads to it.
    module.tables = list(graph.tables)
    module.serve = tf.function(
        lambda inputs: graph(values, inputs),
        input_signature=[graph.input_spec],
        autograph=False,
    )
    specs = student_graph.named(graph.input_spec, "inputs")

    @tf.function(autograph=False)
    def serving_default(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        inputs = keras.tree.pack_sequence_as(
            graph.input_spec, [tensors[name] for name in specs]
        )
        return student_graph.named(module.serve(inputs), "outputs")

    # Signatures must be flat.
    return module, serving_default.get_concrete_function(
        **{
            name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
            for name, spec in specs.items()
        }
    )


def _stand_in(spec: tf.TensorSpec, name: str) -> tf.Variable:
    """A variable of one row, in a graph that holds for any number of them."""
    dim = spec.shape[1]
    return tf.Variable(
        tf.zeros([1, dim], spec.dtype),
        shape=tf.TensorShape([None, dim]),
        trainable=False,
        name=name,
    )


def _name(variable: keras.Variable) -> str:
    """A path as a name; TensorFlow takes none that begins with a "_"."""
    path = str(variable.path)
    return f"v{path}" if path.startswith("_") else path


_KEY = "model_variables/{}/.ATTRIBUTES/VARIABLE_VALUE"
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class SavedModelWriter:
    """Writes one student as a SavedModel, again and again.

    Attributes:
        graph: The student's.
        is_quantized: Whether floats are written as numbers with scales.
        variables: As in a manifest: shape and dtype by checkpoint key.
    """

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        *,
        variables_dtype: str | None = None,
    ) -> None:
        """Prepares the writer; nothing is written or traced yet.

        With `variables_dtype="bfloat16"` half as much travels: float
        variables are stored as bfloat16 and widened inside the graph. "int8"
        and "int4" apply to variables with two axes or more; see `quantized`.
        """
        if variables_dtype not in (None, "bfloat16", *quantized.DTYPES):
            raise ValueError(
                "`variables_dtype` must be None, 'bfloat16', 'int8' or 'int4'; "
                f"received {variables_dtype!r}."
            )
        self.graph = graph
        self.is_quantized = variables_dtype in quantized.DTYPES
        self._forms = [
            _form(graph, index, variables_dtype)
            for index in range(len(graph.variables))
        ]
        specs: dict[str, tf.TensorSpec] = {}
        for form in self._forms:
            specs.update(form.specs)
        self.variables: dict[str, dict[str, Any]] = in_order(
            {
                key: {"shape": list(spec.shape), "dtype": spec.dtype.name}
                for key, spec in specs.items()
            }
        )
        self._files: dict[str, bytes] | None = None
        self._object_graph: tf.Tensor | None = None

    def snapshot(self, averages: Mapping[int, Any] | None = None) -> Snapshot:
        """Takes the student's current values, for the training thread.

        `averages` has the values that are taken in place of variables', by
        the `id` of these.

        Reading shares the variable's buffer; the next update of the variable
        writes to a new one. So this takes no time and no copy, and the
        values stay as they are however long a writer holds them.

        Tables on parameter servers are not part of it: their rows are read
        while they are written, as every step there reads what others have
        written by then.
        """
        found = averages or {}
        return [
            None
            if isinstance(v, tables.Table) and v.is_on_servers
            else tf.convert_to_tensor(
                found[id(v)] if id(v) in found else v.value
            )
            for v in self.graph.variables
        ]

    def write(self, directory: str, snapshot: Snapshot) -> None:
        """Writes a whole SavedModel. May run in a background thread.

        The directory, a path or URL, exists and is empty. ValueError if a
        value is NaN or infinite.
        """
        self.write_stored(directory, self.stored(snapshot))

    def write_stored(
        self, directory: str, stored: Mapping[str, tf.Tensor]
    ) -> None:
        """Writes what `stored` returned, as `write` does."""
        with tf.device("CPU:0"):
            if self._files is None:
                self._files, self._object_graph = self._write_graph(
                    directory, stored
                )
            else:
                for name, content in self._files.items():
                    path = f"{directory}/{name}"
                    tf.io.gfile.makedirs(path.rpartition("/")[0])
                    with tf.io.gfile.GFile(path, "wb") as file:
                        file.write(content)
            tf.io.gfile.makedirs(f"{directory}/variables")
            self._write_values(f"{directory}/variables/variables", stored)

    @property
    def described(self) -> dict[str, Any]:
        """What a manifest says of what it writes, for `Exchange.publish`."""
        graph = self.graph
        return {
            "graph_fingerprint": graph.fingerprint,
            "inputs": student_graph.to_json(graph.input_spec, "inputs"),
            "outputs": student_graph.to_json(graph.output_spec, "outputs"),
            "variables": self.variables,
        }

    def stored(self, snapshot: Snapshot) -> dict[str, tf.Tensor]:
        """Returns what `write` writes, by key; raises as it does."""
        held = [
            (variable, value)
            for variable, value in zip(
                self.graph.variables, snapshot, strict=True
            )
            if value is not None
        ]
        check_finite([v for _, v in held], [v.path for v, _ in held])
        found: dict[str, tf.Tensor] = {}
        with tf.device("CPU:0"):
            for value, form in zip(snapshot, self._forms, strict=True):
                if value is not None:
                    found.update(form.encode(value))
        return found

    def _write_values(
        self, prefix: str, stored: Mapping[str, tf.Tensor]
    ) -> None:
        whole = {**stored, _OBJECT_GRAPH: self._object_graph}
        if len(stored) == len(self.variables):
            checkpoints.write(prefix, whole)
            return
        bundle = server_bundle.BundleWriter(prefix)
        bundle.add(whole)
        for variable, form in zip(
            self.graph.variables, self._forms, strict=True
        ):
            if form.key not in stored:
                shards = [shard.value for shard in variable.shards]
                bundle.add_rows(form.key, shards, encode=form.encode)
        bundle.finish()

    def _write_graph(
        self, directory: str, stored: Mapping[str, tf.Tensor]
    ) -> tuple[dict[str, bytes], tf.Tensor]:
        """Lets TensorFlow write one SavedModel and keeps its graph's files.

        In the draft itself: a process that is killed leaves nothing elsewhere.
        """
        module, signature = _served(self.graph, stored, self._forms)
        # Not what `patch_keras` gives a script, which all workers call.
        save = inspect.unwrap(tf.saved_model.save)
        save(module, directory, signatures=signature)
        (object_graph,) = checkpoints.read(
            directory, {_OBJECT_GRAPH: tf.string}
        )
        tf.io.gfile.rmtree(f"{directory}/variables")  # Written again.
        files = {}
        for parent, _, names in tf.io.gfile.walk(directory):
            for name in names:
                path = f"{parent}/{name}"
                with tf.io.gfile.GFile(path, "rb") as file:
                    files[path[len(directory) + 1 :]] = file.read()
        return files, object_graph


def _form(
    graph: student_graph.StudentGraph, index: int, dtype: str | None
) -> quantized.Form:
    """Returns how one of a graph's variables is written."""
    variable = graph.variables[index]
    own, rank = tf.as_dtype(variable.dtype), len(variable.shape)
    stays = not own.is_floating or (dtype in quantized.DTYPES and rank < 2)
    return quantized.Form(
        _KEY.format(index),
        list(variable.shape),
        own,
        own.name if dtype is None or stays else dtype,
        by_row=dtype in quantized.DTYPES and graph.is_table(variable),
    )


def export_for_inference(
    student: keras.Model,
    filepath: str | os.PathLike[str],
    *,
    format: str = "tf_saved_model",
    verbose: bool | None = None,
    input_signature: object = None,
    **kwargs: object,
) -> None:
    """Exports a student as `keras.Model.export` does, in inference mode.

    Keras 3.15 passes no `training` when it calls the model, so layers whose
    default is training, namely the layers that augment images, still augment
    what they serve. Formats other than a SavedModel are Keras' own.
    """
    if format != "tf_saved_model":
        student.export(
            filepath,
            format=format,
            verbose=verbose,
            input_signature=input_signature,
            **kwargs,
        )
        return
    archive = keras.export.ExportArchive()
    archive.track(student)
    archive.add_endpoint(
        "serve",
        lambda *inputs: student(*inputs, training=False),
        input_signature=input_signature
        or keras_internals.export_signature(student),
        **kwargs,
    )
    archive.write_out(filepath, verbose=verbose is not False)


def check_finite(values: Sequence[Any], names: Sequence[str]) -> None:
    """Refuses floats that hold a NaN or an infinity; names the first."""
    for value, name in zip(values, names, strict=True):
        is_quantized = isinstance(value, quantized.Quantized)
        tensor = tf.convert_to_tensor(value.limit if is_quantized else value)
        if tensor.dtype.is_floating and not bool(
            tf.reduce_all(tf.math.is_finite(tensor))
        ):
            raise server_bundle.NotFiniteError(name)


def read_variables(
    directory: str,
    variables: Mapping[str, Mapping[str, Any]],
    *,
    only: Collection[str] | None = None,
    widen: bool = True,
) -> Snapshot:
    """Reads a version's variables, in the order of the student's.

    `variables` are the shape and dtype expected by checkpoint key; floats of
    another width are accepted, and other variables are not. `only` some keys
    are read if it says so, and all are checked. What is quantized is widened,
    unless `widen` is False. ValueError if a variable is missing, is of another
    shape or kind, or is not finite.
    """
    keys = [key for key in variables if only is None or key in only]
    found = checkpoints.contents(directory)
    check_contents(found, variables)
    scales = found.keys() - variables.keys()
    names = [n for key in keys for n in quantized.keys_of(key, scales)]
    tensors = checkpoints.read(directory, {k: found[k][1] for k in names})
    parts = dict(zip(names, tensors, strict=True))
    for name, value in parts.items():
        # The files may have changed meanwhile.
        if value.shape != found[name][0]:
            raise ValueError(
                f"variable {name} differs from the variable that was exported."
            )
    values = joined(parts, {key: variables[key] for key in keys})
    check_finite(values, keys)
    return [*map(tf.convert_to_tensor, values)] if widen else values


def joined(
    parts: Mapping[str, Any], variables: Mapping[str, Mapping[str, Any]]
) -> list[Any]:
    """Joins what was read by key, in the order of the variables expected.

    Scales that are expected as separate variables are returned as such.
    """
    scales = {k: v for k, v in parts.items() if k not in variables}
    return [
        quantized.whole(
            key,
            {**scales, key: parts[key]},
            expected["shape"],
            expected["dtype"],
        )
        for key, expected in variables.items()
    ]


def check_contents(
    found: Mapping[str, tuple[tf.TensorShape, tf.DType]],
    variables: Mapping[str, Mapping[str, Any]],
) -> None:
    """Checks the shapes and kinds that were found against those expected.

    Instead of floats there may be numbers with scales; see `quantized`.
    """
    rest = found.keys() - variables.keys() - {_OBJECT_GRAPH}
    for key, expected in variables.items():
        if key not in found:
            raise ValueError(f"variable {key} is missing.")
        names = quantized.keys_of(key, rest)
        specs = {name: tf.TensorSpec(*found[name]) for name in names}
        if len(names) > 1 and quantized.may_be(key, expected, specs):
            rest -= specs.keys()
            continue
        shape, dtype = found[key]
        kind = tf.as_dtype(expected["dtype"]).is_floating
        if shape.as_list() != list(expected["shape"]) or (
            dtype.is_floating != kind or dtype == tf.string
        ):
            raise ValueError(
                f"variable {key} must be {expected['dtype']} "
                f"{list(expected['shape'])}; received {dtype.name} "
                f"{shape.as_list()}."
            )
    if rest:
        raise ValueError(
            f"its checkpoint must hold the {len(variables)} variables of the "
            f"student and no others; received {sorted(rest)[:3]} besides."
        )


def in_order(
    variables: Mapping[str, Any],
) -> dict[str, Any]:
    """Brings a manifest's variables into the order they were written in.

    That is by the number in their keys, and then so the scales of some.
    ValueError for other keys.
    """
    num_scales = sum(key.startswith("scales/") for key in variables)
    keys = [_KEY.format(n) for n in range(len(variables) - num_scales)]
    keys += [k for k in map(quantized.scale_key, keys) if k in variables]
    if variables.keys() != {*keys}:
        raise ValueError(
            f"the manifest's variables must be numbered from 0 on; received "
            f"{sorted(variables)}."
        )
    return {key: variables[key] for key in keys}
