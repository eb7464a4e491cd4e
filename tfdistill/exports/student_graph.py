"""A student's inference as a pure function of variable values and inputs.

One trace serves three ends: the graph of every export, the teachers of peers
with the same graph (our own graph, their values), and the fingerprint by
which two groups find out that their graphs are the same.
"""

import hashlib
import re
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.embedding import sources
from tfdistill.embedding import tables
from tfdistill.exports import quantized
from tfdistill.system import keras_internals

# Operations that keep an output's values, and that sum weighted values.
_SAME = frozenset(
    "Cast EnsureShape ExpandDims Identity IdentityN Reshape Squeeze "
    "StopGradient Transpose".split()
)
_SUMS = frozenset(
    "BatchMatMulV2 BiasAdd Conv2D Einsum LogSoftmax MatMul".split()
)
# Attributes that say where and how a process runs a node, not what it computes:
# a call of a function has its process's configuration, which differs between
# a coordinator of servers and a worker.
_NOT_COMPUTED = frozenset(
    "config config_proto executor_type shared_name".split()
)
PROBABILITIES = SOFTMAX, SIGMOID = "Softmax", "Sigmoid"
LOGITS = "Logits"
_Table: Any = tf.saved_model.experimental.TrackableResource
_READABLE = (
    tf.lookup.StaticHashTable,
    tf.lookup.experimental.DenseHashTable,
    tf.lookup.experimental.MutableHashTable,
)


def tables_used(model: keras.Model, captured: Sequence[Any]) -> list[Any]:
    """Finds the tables that a traced function of a model looks into.

    Each once, in the order of the layers' attributes, by the function's
    captured tensors: layers hold others too, from when they were adapted.
    """
    handles = {id(tensor) for tensor in captured}
    return [
        table
        for table in _walk(model, set())
        if id(table.resource_handle) in handles
    ]


def _walk(value: object, seen: set[int]) -> Iterator[Any]:
    if id(value) in seen:
        return
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, _Table):
        yield value
    elif isinstance(value, keras.layers.Layer):
        parts = vars(value).values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    for part in parts:
        yield from _walk(part, seen)


def tables_fingerprint(tables: Sequence[Any]) -> str:
    """Hashes what the tables hold: another vocabulary is another graph.

    Resources that cannot be read count by number. Empty without tables.
    """
    if not tables:
        return ""
    digest = hashlib.sha256()
    for table in tables:
        digest.update(b"table")
        if isinstance(table, _READABLE):
            keys, values = (column.numpy() for column in table.export())
            for key, value in sorted(
                zip(keys.tolist(), values.tolist(), strict=True)
            ):
                digest.update(repr((key, value)).encode())
    return digest.hexdigest()


class StudentGraph:
    """One student's traced inference, `(values, inputs) -> outputs`.

    Attributes:
        variables: The student's variables; the shards of a table count as
            one `Table`.
        input_spec: Structure of `tf.TensorSpec`, batch dimension None.
        output_spec: Structure of `tf.TensorSpec`, batch dimension None.
        tables: The student's lookup tables, which go into its exports.
        ends: What each output is; see `ends`.
        fingerprint: 64 hexadecimal digits; equal for equal computations, in
            whatever process, strategy or naming they were traced.
    """

    def __init__(self, student: keras.Model, input_spec: object) -> None:
        """Traces a built student in inference mode.

        `input_spec` is a structure of `tf.TensorSpec` or tensors, as the
        student is called with. ValueError if the student is not built, keeps
        variables that Keras does not know or a state of each row, or gets None
        for an input.
        """
        if not student.built:
            raise ValueError(
                f"The student {student.name!r} must be built before it is "
                "traced; it has no variables yet. Call it once on a batch, or "
                "give it an Input."
            )
        absent = [
            n for n, v in named(input_spec, "inputs").items() if v is None
        ]
        if absent:
            raise ValueError(
                "An export and its teachers need a value for each input of the "
                f"student; received None for {absent} in the data. Pass zeros "
                "instead, or build the student without that input."
            )
        if stateful := keras_internals.stateful_layer(student):
            raise ValueError(
                "A student with exports or teachers must not keep a state of "
                "each row from batch to batch (`stateful=True`), which no "
                f"version contains; received the layer {stateful!r}. Leave "
                "`stateful` out, or train without exporter and teachers."
            )
        self._student = student
        self.variables = tables.variables_of(student)
        self.input_spec = keras.tree.map_structure(_batch_spec, input_spec)
        values = [tf.TensorSpec(v.shape, v.dtype) for v in self.variables]
        self._function = tf.function(self.infer_from, autograph=False)
        self._concrete = self._function.get_concrete_function(
            values, self.input_spec
        )
        outputs = named(self._concrete.structured_outputs, "outputs")
        if absent := [n for n, v in outputs.items() if v is None]:
            raise ValueError(
                "An export and its teachers need a tensor for each output of "
                f"the student; received None for {absent}. Leave these "
                "outputs out of what the student returns."
            )
        if captured := self._concrete.graph.variables:
            names = ", ".join(sorted(v.name for v in captured))
            raise ValueError(
                "Every variable of the student must be a Keras variable, so "
                f"that a teacher can have its own values; received {names}. "
                "Create them with `self.add_weight(...)`."
            )
        self.tables = tables_used(student, self._concrete.captured_inputs)
        self.output_spec = keras.tree.map_structure(
            _batch_spec, self._concrete.structured_outputs
        )
        self.ends = ends(self._concrete.graph.outputs)
        contents = tables_fingerprint(self.tables)
        self.fingerprint = fingerprint(self._concrete, contents)

    def is_table(self, variable: keras.Variable | tf.Variable) -> bool:
        """Whether rows of a variable are looked up by id."""
        return isinstance(variable, tables.Table) or any(
            isinstance(each, keras.layers.Embedding)
            and any(variable is v for v in each.variables)
            and variable.shape[:1] == (each.input_dim,)
            for each in keras_internals.all_layers(self._student)
        )

    @property
    def frozen(self) -> frozenset[int]:
        """Which of `variables` are frozen now, by index; of tables, none."""
        ids = {id(v) for v in keras_internals.frozen_weights(self._student)}
        return frozenset(
            index for index, v in enumerate(self.variables) if id(v) in ids
        )

    def infer_from(self, values: Sequence[Any], inputs: object) -> Any:
        """Runs the student's inference untraced, with tables in any shards.

        One value for each of `variables`; for a table, a tensor or a list of
        sources as `sources.rows_from` takes them; or the two parts of what is
        quantized, of which a table's rows are widened once they are gathered.
        """
        mapping, rows = [], {}
        for variable, value in zip(self.variables, values, strict=True):
            if isinstance(value, tuple):
                stored, scale = value
                value = quantized.Quantized(
                    stored, scale, variable.shape, variable.dtype
                )
            if isinstance(variable, tables.Table):
                rows[variable] = value if isinstance(value, list) else [value]
            else:
                mapping.append((variable, tf.convert_to_tensor(value)))
        with (
            keras.StatelessScope(state_mapping=mapping),
            sources.rows_from(rows),
        ):
            return self._student(inputs, training=False)

    def __call__(self, values: Sequence[Any], inputs: object) -> Any:
        """Runs the student's inference with other values in its variables.

        One tensor or variable for each of `variables`, of its shape; floats
        of another width are cast. What is quantized is widened in the graph,
        or before it if the caller traces none.
        """
        is_traced = not tf.executing_eagerly()
        # A variable itself would be traced again for each shape of inputs.
        cast = [
            (
                tf.convert_to_tensor(value.stored),
                tf.convert_to_tensor(value.scale),
            )
            if isinstance(value, quantized.Quantized) and is_traced
            else tf.cast(tf.convert_to_tensor(value), variable.dtype)
            for value, variable in zip(values, self.variables, strict=True)
        ]
        return self._function(cast, inputs)


def _batch_spec(value: tf.Tensor | tf.TensorSpec) -> tf.TensorSpec:
    shape = tf.TensorShape(value.shape)
    if shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    return tf.TensorSpec(shape, tf.as_dtype(value.dtype))


def fingerprint(
    concrete: tf.types.experimental.ConcreteFunction, contents: str = ""
) -> str:
    """Hashes what a `ConcreteFunction` computes, not how it names things.

    SHA-256 in hexadecimal over operations, attributes, wiring and what else
    the result depends on, `contents`.
    """
    graph = concrete.graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    digest = hashlib.sha256()
    outputs = [tensor.name for tensor in concrete.graph.outputs]
    _hash_nodes(digest, graph.node, functions, returns=outputs)
    for tensor, _ in concrete.graph.captures:
        if tensor.dtype not in (tf.resource, tf.variant):
            digest.update(tf.io.serialize_tensor(tensor).numpy())
    digest.update(contents.encode())
    return digest.hexdigest()


def _hash_nodes(
    digest: Any,
    nodes: Sequence[Any],
    functions: Mapping[str, Any],
    returns: Sequence[str],
    arguments: Sequence[str] = (),
) -> None:
    """Adds a graph to the digest, its nodes named by their positions."""
    names = [*arguments, *(node.name for node in nodes)]
    index = {name: str(position) for position, name in enumerate(names)}

    def position(reference: str) -> str:
        control = "^" if reference.startswith("^") else ""
        name, _, output = reference.lstrip("^").partition(":")
        return f"{control}{index[name]}:{output}"

    for node in nodes:
        digest.update(f"{node.op}|".encode())
        inputs = sorted(
            (position(i) for i in node.input if i.startswith("^")),
        )
        inputs += [position(i) for i in node.input if not i.startswith("^")]
        digest.update(",".join(inputs).encode())
        for key in sorted(node.attr):
            if not key.startswith("_") and key not in _NOT_COMPUTED:
                digest.update(f"|{key}=".encode())
                _hash_attribute(digest, node.attr[key], functions)
    digest.update(",".join(position(name) for name in returns).encode())


def _hash_attribute(
    digest: Any, attribute: tf.compat.v1.AttrValue, functions: Mapping[str, Any]
) -> None:
    """Adds an attribute; a function it names is added by its body."""
    called = [attribute.func, *attribute.list.func]
    for reference in called:
        body = functions.get(reference.name)
        if body is not None:
            _hash_nodes(
                digest,
                body.node_def,
                functions,
                returns=[body.ret[a.name] for a in body.signature.output_arg],
                arguments=[a.name for a in body.signature.input_arg],
            )
    if not any(reference.name for reference in called):
        digest.update(attribute.SerializeToString(deterministic=True))


def ends(outputs: Sequence[tf.Tensor]) -> list[str]:
    """Finds from the last operations what a graph's tensors are.

    For each, "Softmax" or "Sigmoid", which are probabilities,
    "Logits" for the result of a layer without an activation, or "".
    """
    graph = outputs[0].graph.as_graph_def()
    functions = {f.signature.name: f for f in graph.library.function}
    nodes = _by_name(graph.node)
    return [_end(t.name, nodes, functions) for t in outputs]


def _by_name(nodes: Iterable[Any]) -> dict[str, Any]:
    return {node.name: node for node in nodes}


def _end(
    reference: str, nodes: Mapping[str, Any], functions: Mapping[str, Any]
) -> str:
    name, _, output = reference.partition(":")
    node, index = nodes.get(name), int(output.rpartition(":")[2] or 0)
    if node is None:
        return ""
    if node.op in _SAME:
        source = node.input[index if node.op == "IdentityN" else 0]
        return _end(source, nodes, functions)
    if node.op.endswith("PartitionedCall"):
        body = functions[node.attr["f"].func.name]
        returned = body.signature.output_arg[index].name
        return _end(body.ret[returned], _by_name(body.node_def), functions)
    if node.op in ("Add", "AddV2"):
        # One unit's bias; else it may be anything.
        summed = nodes.get(node.input[0].partition(":")[0])
        return LOGITS if summed is not None and summed.op in _SUMS else ""
    if node.op in _SUMS:
        return LOGITS
    return node.op if node.op in PROBABILITIES else ""


def leaf_names(structure: object, default: str) -> list[str]:
    """Names the leaves of a structure, in the order of `keras.tree.flatten`.

    Dict keys and list positions joined by "_"; `default` is the name of a
    single leaf, and the prefix of numbered ones. ValueError if two leaves
    would have one name.
    """
    if not isinstance(structure, (dict, list, tuple)):
        return [default]
    paths = keras.tree.flatten_with_path(structure)
    found = [
        "_".join(str(part) for part in path)
        if isinstance(path[0], str)
        else f"{default}_{'_'.join(str(part) for part in path)}"
        for path, _ in paths
    ]
    legal = [legal_name(name, default) for name in found]
    if len(set(legal)) != len(legal):
        raise ValueError(
            f"The names of {default} must differ in letters, digits or _, "
            "because a signature cannot hold other characters; received "
            f"{found}. Rename them."
        )
    return legal


def legal_name(name: str, default: str) -> str:
    """Makes a name one that TensorFlow takes as a signature's argument.

    It puts "_" for each character that is not allowed, and `default` before
    a name that does not start with a letter.
    """
    legal = re.sub("[^A-Za-z0-9_]", "_", name)
    return legal if legal[:1].isalpha() else f"{default}_{legal}"


def named(structure: object, default: str) -> dict[str, Any]:
    """Flattens a structure to a dict by `leaf_names`."""
    leaves = keras.tree.flatten(structure)
    return dict(zip(leaf_names(structure, default), leaves, strict=True))


def to_json(structure: object, default: str) -> dict[str, Any]:
    """Describes a structure of `tf.TensorSpec` for a manifest.

    `{"shape": [None, ...], "dtype": "float32"}` by leaf name.
    """
    return {
        name: {
            "shape": None if spec.shape.rank is None else list(spec.shape),
            "dtype": spec.dtype.name,
        }
        for name, spec in named(structure, default).items()
    }
