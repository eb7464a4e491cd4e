"""A fixed teacher's labels of a data set, written once and read many times.

A directory of labels holds one file of TFRecords and `labels.json`, which is
written last: a directory without it is unfinished. A record is one batch of the
data set: a hash by which its inputs are recognized, and what `Form.encode`
keeps of each output, as serialized tensors.
"""

# Not `Dataset.save`: it never returns when the data set that it saves fails,
# nor at Ctrl-C.

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exports import other_graphs
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.system import extras
from tfdistill.system import run_files

FILE_NAME, FORMAT = "labels.json", 3
_RECORDS = "labels.tfrecord"

_Predict = Callable[[Any], list[Any]]


def write(
    dataset: tf.data.Dataset,
    teacher: keras.Model | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    form: forms.Form | None = None,
    trust: bool = False,
    progress: Callable[[int], None] = lambda num_rows: None,
) -> int:
    """Writes a teacher's predictions for each example of a data set.

    Args:
        dataset: Finite, batches as `fit` takes them; of each element only the
            inputs are used. It must give the same batches in the same order
            when the labels are read: shuffle after that.
        teacher: A Keras model, or the directory of a SavedModel. It predicts in
            inference mode.
        directory: New or empty; local or mounted.
        form: How much of each output is kept. Default: the whole output, as
            float32.
        trust: Whether to load a SavedModel that holds more than what
            `graph_ops` lists, with a warning.
        progress: Called after each batch with the number of examples so far.

    Returns:
        The number of examples.

    Raises:
        ValueError: An argument is not as above, or the kept outputs have no
            fixed size per example.
    """
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The data set must end; received an endless one. Leave out "
            "repeat(), or take() only the examples to label."
        )
    form = form or forms.Form()
    path = _new_directory(directory)
    predict, ends, name = _predictor(teacher, dataset.element_spec, trust=trust)
    num_rows, outputs = 0, None
    with tf.io.TFRecordWriter(str(path / _RECORDS)) as writer:
        for element in dataset:
            record, kept = _record(element, predict, ends, form, num_rows)
            found = _described(kept)
            if outputs not in (None, found):
                raise ValueError(
                    "The outputs kept for each example must have the same "
                    f"size; received {outputs} and {found}. Pad sequences to "
                    "one length in the data set."
                )
            outputs = found
            writer.write(record)
            num_rows += int(attached.batch_size(element))
            progress(num_rows)
    if outputs is None:
        raise ValueError(
            "The data set must have at least one example to label; received an "
            "empty data set."
        )
    said = {
        "format": FORMAT,
        "num_rows": num_rows,
        # What is kept of each output of an example: shape and dtype by name.
        "outputs": outputs,
        "num_bytes": (path / _RECORDS).stat().st_size,
        # For people.
        "teacher": name,
        "form": dataclasses.asdict(form),
        "versions": dict(extras.installed_versions()),
    }
    content = json.dumps(said, indent=1)
    run_files.write(path / FILE_NAME, [f"{content}\n".encode()])
    return num_rows


def read(
    directory: str | os.PathLike[str], *, name: str = "labels"
) -> "WrittenLabels":
    """Opens a directory of labels; see `WrittenLabels`.

    Args:
        directory: Where `write` wrote them.
        name: The teacher's name, for `teachers.LabelTeacher(name)`.

    Raises:
        ValueError: There are no complete labels.
    """
    path = pathlib.Path(directory)
    try:
        said = json.loads((path / FILE_NAME).read_text("utf-8"))
        if said["format"] != FORMAT:
            raise ValueError(f"its format must be {FORMAT}")
        found, wanted = (path / _RECORDS).stat().st_size, said["num_bytes"]
        if found != wanted:
            raise ValueError(
                f"{_RECORDS} must have {wanted} bytes, not {found}"
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"There must be complete labels in {path}, with {FILE_NAME}, which "
            f"is written last; received {type(error).__name__}: {error}. Write "
            "them with tfdistill.labels.write, or with: tfdistill label"
        ) from error
    return WrittenLabels(path, said, name=name)


class WrittenLabels:
    """Adds labels to the data set for which they were written.

    Example:
        ```python
        labels = tfdistill.labels.read("labels", name="big")
        dataset = dataset.apply(labels).unbatch().shuffle(10_000).batch(64)
        teachers = tfdistill.teachers.LabelTeacher("big")
        ```
    """

    def __init__(
        self, path: pathlib.Path, said: Mapping[str, Any], *, name: str
    ) -> None:
        """Takes what `read` has checked."""
        self._path, self._name = path, name
        # Number of examples.
        self.num_rows: int = said["num_rows"]
        self._spec = tuple(
            {
                name: tf.TensorSpec([None, *part["shape"]], part["dtype"])
                for name, part in output.items()
            }
            for output in said["outputs"]
        )

    def __call__(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the data set with labels, as `Dataset.apply` calls it.

        Its batches must be the labeled batches; fewer of them will do. The
        first one that differs ends it with an `InvalidArgumentError`, so
        shuffle, repeat and batch in another way afterwards.
        """
        records = tf.data.TFRecordDataset(str(self._path / _RECORDS))
        # More than there are, with a hash that no batch has.
        none = tf.nest.map_structure(
            lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), self._spec
        )
        more = tf.data.Dataset.from_tensors((tf.zeros([8], tf.uint8), none))
        kept = records.map(self._parsed).concatenate(more.repeat())
        joined = tf.data.Dataset.zip(dataset.enumerate(), kept)
        labelled = joined.map(
            lambda numbered, kept: self._labelled(*numbered, *kept)
        )
        count = dataset.cardinality()
        if count < 0:
            return labelled
        # Keras needs the count, and files of records don't have it.
        return labelled.apply(tf.data.experimental.assert_cardinality(count))

    def _parsed(self, record: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the hash of a batch, and what is kept of its outputs."""
        hashed, *parts = tf.unstack(
            tf.io.parse_tensor(record, tf.string),
            1 + len(tf.nest.flatten(self._spec)),
        )
        tensors = [
            tf.ensure_shape(tf.io.parse_tensor(part, spec.dtype), spec.shape)
            for part, spec in zip(
                parts, tf.nest.flatten(self._spec), strict=True
            )
        ]
        kept = tf.nest.pack_sequence_as(self._spec, tensors)
        return tf.io.decode_raw(hashed, tf.uint8), kept

    def _labelled(
        self,
        number: tf.Tensor,
        element: object,
        wanted: tf.Tensor,
        kept: Sequence[tf.Tensor],
    ) -> Any:
        """Labels a batch."""
        found = attached.fingerprint(_inputs(element))
        check = tf.debugging.Assert(
            tf.reduce_all(found == wanted),
            [
                f"The labels in {self._path} were written for other data, or "
                f"for {self.num_rows} other examples: read the same data set "
                "in the same order, in batches of the same size, and shuffle "
                "and repeat it afterwards. The first difference is in batch",
                number,
            ],
        )
        with tf.control_dependencies([check]):
            version = tf.zeros([attached.batch_size(element)], tf.int64)
        label = attached.label(kept, version=version)
        return attached.attach(element, {self._name: label})


def _inputs(element: object) -> Any:
    bare, _ = attached.detach(element)
    return keras.utils.unpack_x_y_sample_weight(bare)[0]


# ---- writing ----


def _record(
    element: object,
    predict: _Predict,
    ends: list[str],
    form: forms.Form,
    num_before: int,
) -> tuple[bytes, list[dict[str, tf.Tensor]]]:
    """Returns the record of a batch, and what is in it of its outputs."""
    inputs, found = _inputs(element), []
    for output, end in zip(predict(inputs), ends, strict=True):
        output = tf.convert_to_tensor(output)
        kept = form.encode(output)
        if not all(
            np.isfinite(value).all() for value in (output, *kept.values())
        ):
            raise ValueError(
                f"The teacher's outputs must be finite, as {form.dtype}; "
                f"received NaN or infinite values after {num_before} examples."
            )
        form.check(output.numpy())
        if end in student_graph.PROBABILITIES and not forms.is_top(kept):
            # `LabelTeacher` reads what they are in the name.
            kept = {f"whole_{end}": kept["whole"]}
        found.append(kept)
    parts = [
        attached.fingerprint(inputs).numpy().tobytes(),
        *map(tf.io.serialize_tensor, tf.nest.flatten(tuple(found))),
    ]
    return tf.io.serialize_tensor(tf.stack(parts)).numpy(), found


def _described(kept: list[dict[str, tf.Tensor]]) -> list[dict[str, Any]]:
    return [
        {
            name: {"shape": list(part.shape[1:]), "dtype": part.dtype.name}
            for name, part in output.items()
        }
        for output in kept
    ]


def _new_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    text = os.fspath(directory)
    if "://" in text:
        raise ValueError(
            "Labels must be in a local or mounted directory; received "
            f"{text!r}."
        )
    path = pathlib.Path(text)
    path.mkdir(parents=True, exist_ok=True)
    # Records without `labels.json` are what a stopped writer has left.
    found = {file.name for file in path.iterdir()}
    if found - {_RECORDS}:
        raise ValueError(
            f"`directory` must be new or empty; found {sorted(found)[:5]} in "
            f"{path}. Choose another."
        )
    return path


def _predictor(
    teacher: keras.Model | str | os.PathLike[str],
    element_spec: object,
    *,
    trust: bool,
) -> tuple[_Predict, list[str], str]:
    """Returns how the teacher is asked, what it gives, and its name."""
    spec = _inputs(element_spec)
    if isinstance(teacher, keras.Model):
        ask = tf.function(
            lambda x: keras.tree.flatten(teacher(x, training=False)),
            reduce_retracing=True,
        )
        ends = student_graph.ends(ask.get_concrete_function(spec).outputs)
        return ask, ends, teacher.name
    if not isinstance(teacher, str | os.PathLike):
        raise ValueError(
            "`teacher` must be a Keras model or the directory of a SavedModel; "
            f"received {type(teacher).__name__}."
        )
    path = os.fspath(teacher)
    loaded = other_graphs.load(path, spec, trust=trust, remedy="`trust`")
    return loaded, loaded.ends, path
