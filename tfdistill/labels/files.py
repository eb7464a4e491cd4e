"""A fixed teacher's labels of a data set, written once and read many times.

A directory of labels holds TFRecord files and `labels.json`, which is written
last: a directory without it is unfinished. A record is one example: 8 bytes by
which its inputs are recognized, and then what `forms.Form.encode` keeps of each
output, all of a fixed size. Records have the order of the data set.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import signing
from tfdistill.exports import other_graphs
from tfdistill.labels import attached
from tfdistill.labels import forms

FILE_NAME, FORMAT = "labels.json", 1
# Of one record: which inputs it belongs to.
_FINGERPRINT_BYTES = 8
_PROOF = "proof"

_Predict = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Description:
    """What `labels.json` says.

    Attributes:
        teacher: Who made the labels: a digest of its files or of its values.
        num_rows: Number of examples.
        form: The arguments of `forms.Form`.
        inputs: Shape and dtype of each input of one example.
        outputs: What is kept of each output of one example: shape and dtype
            by name.
        files: By name the number of records and SHA-256, in their order.
        versions: Of the libraries that wrote them.
    """

    teacher: str
    num_rows: int
    form: Mapping[str, Any]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    files: Mapping[str, dict[str, Any]]
    versions: Mapping[str, str]
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Fails if anything that is used of it later is missing."""
        _ = self.digests, self.record_bytes

    @property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file, in their order."""
        return {name: said["sha256"] for name, said in self.files.items()}

    @property
    def record_bytes(self) -> int:
        """The size of a record."""
        return _FINGERPRINT_BYTES + sum(
            _num_bytes(spec)
            for output in self.outputs
            for spec in output.values()
        )

    def text(self) -> str:
        """Returns it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)


def write(
    dataset: tf.data.Dataset,
    teacher: keras.Model | str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    form: forms.Form | None = None,
    seed: int = 0,
    trust: bool = False,
    rows_per_file: int = 100_000,
    key: Any = "environment",
    progress: Callable[[int], None] = lambda num_rows: None,
) -> int:
    """Writes what a teacher says of each example of a data set.

    Args:
        dataset: Finite, batches as `fit` takes them; of each element only the
            inputs are used. It must give the same examples in the same order
            when the labels are read: shuffle after that.
        teacher: A Keras model, or the directory of a SavedModel. It predicts in
            inference mode.
        directory: New or empty; local or mounted.
        form: What is kept of each output. Default: all of it, as float32.
        seed: Decides what is drawn if the form has `num_samples`.
        trust: Whether to load a SavedModel that holds more than what
            `graph_ops` lists, with a warning.
        rows_per_file: About how many examples a file has.
        key: Of whoever may sign labels, as for `Exchange`: 32 bytes or more,
            None, or by default the one of the environment.
        progress: Called after each batch with the number of examples so far.

    Returns:
        The number of examples.

    Raises:
        ValueError: An argument is not as above, or what is kept of an example
            has no fixed size.
    """
    if not isinstance(dataset, tf.data.Dataset):
        raise ValueError(
            "`dataset` must be a tf.data.Dataset of batches; received "
            f"{type(dataset).__name__}."
        )
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The data set must end; received an endless one. Leave out "
            "repeat(), or take() what is to be labelled."
        )
    form = form or forms.Form()
    signer = signing.signer_for(key)
    path = _new_directory(directory)
    predict, digest = _predictor(teacher, dataset.element_spec, trust=trust)
    rows = _encoded(dataset, predict, form, seed)
    first = next(rows, None)
    if first is None:
        raise ValueError(
            "The data set must have at least one example to label; received "
            "an empty one."
        )
    batches = itertools.chain([first], rows)
    num_rows = 0
    with _Files(path, rows_per_file) as out:
        for batch in batches:
            num_rows += out.write(batch.records)
            progress(num_rows)
    description = _Description(
        teacher=digest,
        num_rows=num_rows,
        form=dataclasses.asdict(form),
        inputs=_inputs(dataset),
        outputs=first.outputs,
        files=out.files,
        versions=dict(manifest.installed_versions()),
    )
    text = description.text()
    proof = signer.proof(text.encode()) if signer else None
    content = json.dumps({"labels": json.loads(text), _PROOF: proof}, indent=1)
    storage, root = filesystem.for_root(str(path))
    storage.create(f"{root}/{FILE_NAME}", f"{content}\n".encode())
    return num_rows


def read(
    directory: str | os.PathLike[str],
    *,
    name: str = "labels",
    key: Any = "environment",
) -> "WrittenLabels":
    """Opens a directory of labels; see `WrittenLabels`.

    Args:
        directory: Where `write` wrote them.
        name: The teacher's name, for `teachers.LabelTeacher(name)`.
        key: As for `write`. With a key, labels must be signed with it.

    Raises:
        ValueError: There are no complete labels, or they were changed.
    """
    path = pathlib.Path(directory)
    description = _opened(path, signing.signer_for(key))
    for file, digest in description.digests.items():
        try:
            found = _digest(path / file)
        except OSError as error:
            raise ValueError(
                f"The labels in {path} must be whole; {file} cannot be read: "
                f"{error}. Copy the whole directory, or write them again."
            ) from error
        if found != digest:
            raise ValueError(
                f"The labels in {path} were changed: {file} must have the "
                f"SHA-256 {digest[:12]}...; found {found[:12]}.... "
                "Write them again."
            )
    return WrittenLabels(path, description, name=name)


class WrittenLabels:
    """Adds labels to the data set for which they were written.

    Example:
        labels = tfdistill.labels.read("labels", name="big")
        dataset = dataset.apply(labels).unbatch().shuffle(10_000).batch(64)
        teachers = tfdistill.teachers.LabelTeacher("big")
    """

    def __init__(
        self, path: pathlib.Path, description: _Description, *, name: str
    ) -> None:
        """Takes what `read` has checked."""
        self._path, self._description, self._name = path, description, name

    @property
    def num_rows(self) -> int:
        """Number of examples."""
        return self._description.num_rows

    @property
    def teacher(self) -> str:
        """A digest of the teacher that made them."""
        return self._description.teacher

    def __call__(self, dataset: tf.data.Dataset, *others: Any) -> Any:
        """Returns the data set with labels, as `Dataset.apply` calls it.

        It may be batched in any way, and shorter than the labels. The first
        example that is not the one that was labelled ends it with an
        `InvalidArgumentError`, so shuffle and repeat afterwards.
        """
        if others or not isinstance(dataset, tf.data.Dataset):
            raise ValueError(
                "Labels that were written are zipped to a whole data set; "
                "received an element of one. Call dataset.apply(labels), not "
                "dataset.map(labels)."
            )
        self._check_inputs(_inputs(dataset))
        size = _batch_size(dataset)
        files = [str(self._path / name) for name in self._description.digests]
        # One more than there are, to which no example is equal.
        records = tf.data.TFRecordDataset(files).concatenate(
            tf.data.Dataset.from_tensors(
                bytes(self._description.record_bytes)
            ).repeat()
        )
        joined = tf.data.Dataset.zip(
            dataset.enumerate(), records.batch(size, drop_remainder=True)
        )
        return joined.map(
            lambda numbered, kept: self._labelled(
                numbered[0], numbered[1], kept, size
            )
        )

    def _check_inputs(self, found: list[dict[str, Any]]) -> None:
        wanted = self._description.inputs
        if len(found) != len(wanted) or not all(
            ours["dtype"] == said["dtype"]
            and tf.TensorShape(ours["shape"]).is_compatible_with(said["shape"])
            for ours, said in zip(found, wanted, strict=True)
        ):
            raise ValueError(
                f"The labels in {self._path} are of batches of examples with "
                f"the inputs {wanted}; received a data set that has {found} "
                "after its first dimension. Batch it once, and read the data "
                "that were labelled."
            )

    def _labelled(
        self, number: tf.Tensor, element: Any, records: tf.Tensor, size: int
    ) -> Any:
        num_rows = attached.batch_size(element)
        # The last batch may be smaller than the others.
        records = records[:num_rows]
        found = fingerprint(attached.detach(element)[0])
        wanted = tf.io.decode_raw(
            tf.strings.substr(records, 0, _FINGERPRINT_BYTES),
            tf.uint8,
            fixed_length=_FINGERPRINT_BYTES,
        )
        same = tf.reduce_all(found == wanted, axis=1)
        first = tf.argmin(tf.cast(same, tf.int32), output_type=tf.int64)
        check = tf.debugging.Assert(
            tf.reduce_all(same),
            [
                f"The labels in {self._path} are of other data, or of other "
                f"{self.num_rows} examples: read the same data set in the same "
                "order, in batches of one size, and shuffle and repeat it "
                "afterwards. The first difference is at example",
                number * size + first,
            ],
        )
        with tf.control_dependencies([check]):
            label = attached.label(
                self._outputs(records),
                version=tf.zeros([num_rows], tf.int64),
            )
        return attached.attach(element, {self._name: label})

    def _outputs(self, records: tf.Tensor) -> list[dict[str, tf.Tensor]]:
        start, found = _FINGERPRINT_BYTES, []
        num_rows = tf.shape(records)[0]
        for output in self._description.outputs:
            kept = {}
            for name, spec in output.items():
                size = _num_bytes(spec)
                value = _decoded(
                    tf.strings.substr(records, start, size), spec, size
                )
                kept[name] = tf.reshape(value, [num_rows, *spec["shape"]])
                start += size
            found.append(kept)
        return found


def fingerprint(element: Any) -> tf.Tensor:
    """Recognizes examples by the bytes of their inputs: uint8 `[batch, 8]`.

    Of an element of a data set, as `fit` takes it.
    """
    inputs = keras.utils.unpack_x_y_sample_weight(element)[0]
    leaves = keras.tree.flatten(inputs)
    if not all(isinstance(leaf, tf.Tensor) for leaf in leaves):
        raise ValueError(
            "Examples with labels must have dense inputs; received "
            f"{[type(leaf).__name__ for leaf in leaves]}. Convert them, for "
            "example with to_tensor(), in the data set."
        )
    found = [tf.fingerprint(leaf) for leaf in leaves]
    return found[0] if len(found) == 1 else tf.fingerprint(tf.concat(found, 1))


# ---- writing ----


@dataclasses.dataclass(frozen=True)
class _Batch:
    """One record for each example, and what all records are made of."""

    records: list[bytes]
    outputs: list[dict[str, Any]]


def _encoded(
    dataset: tf.data.Dataset, predict: _Predict, form: forms.Form, seed: int
) -> Iterator[_Batch]:
    for number, element in enumerate(dataset):
        element, _ = attached.detach(element)
        parts = [fingerprint(element).numpy()]
        outputs = []
        inputs = keras.utils.unpack_x_y_sample_weight(element)[0]
        for output in map(tf.convert_to_tensor, predict(inputs)):
            kept = {
                name: value.numpy()
                for name, value in form.encode(
                    output, seed=[seed, number]
                ).items()
            }
            values = [output.numpy(), *kept.values()]
            if not all(np.isfinite(value).all() for value in values):
                raise ValueError(
                    "The teacher's outputs must be finite, as "
                    f"{form.dtype}; received NaN or infinite ones in batch "
                    f"{number}."
                )
            form.check(values[0])
            parts += kept.values()
            outputs.append(
                {
                    name: {
                        "shape": list(value.shape[1:]),
                        "dtype": value.dtype.name,
                    }
                    for name, value in kept.items()
                }
            )
        rows = [np.ascontiguousarray(part) for part in parts]
        records = [
            b"".join(row[index].tobytes() for row in rows)
            for index in range(len(rows[0]))
        ]
        yield _Batch(records, outputs)


class _Files:
    """Writes records to files of about as many each."""

    def __init__(self, path: pathlib.Path, rows_per_file: int) -> None:
        if rows_per_file < 1:
            raise ValueError(
                f"`rows_per_file` must be >= 1; received {rows_per_file}."
            )
        self._path, self._most = path, rows_per_file
        # By name of those that are closed, what `_Description` says of them.
        self.files: dict[str, dict[str, Any]] = {}
        self._writer: Any = None
        self._name, self._num_rows = "", 0
        self._record_bytes: int | None = None

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._close()

    def write(self, records: list[bytes]) -> int:
        """Writes one batch; returns its number of examples."""
        sizes = {len(record) for record in records}
        known = self._record_bytes or next(iter(sizes))
        if sizes != {known}:
            raise ValueError(
                "What is kept of an example must have one size; received "
                f"records of {sorted({known, *sizes})} bytes. Pad sequences "
                "to one length in the data set."
            )
        self._record_bytes = known
        if self._writer is None:
            self._name = f"labels-{len(self.files):05d}.tfrecord"
            self._writer = tf.io.TFRecordWriter(str(self._path / self._name))
        for record in records:
            self._writer.write(record)
        self._num_rows += len(records)
        if self._num_rows >= self._most:
            self._close()
        return len(records)

    def _close(self) -> None:
        self._writer.close()
        self.files[self._name] = {
            "num_rows": self._num_rows,
            "sha256": _digest(self._path / self._name),
        }
        self._writer, self._num_rows = None, 0


def _new_directory(directory: str | os.PathLike[str]) -> pathlib.Path:
    text = os.fspath(directory)
    if "://" in text:
        raise ValueError(
            "Labels must be in a local or mounted directory; received "
            f"{text!r}."
        )
    path = pathlib.Path(text)
    path.mkdir(parents=True, exist_ok=True)
    if (path / FILE_NAME).exists():
        raise ValueError(
            f"`directory` must hold no labels yet; {path} has complete ones. "
            "Choose another."
        )
    for unfinished in path.glob("labels-*.tfrecord"):
        unfinished.unlink()
    if any(path.iterdir()):
        raise ValueError(
            f"`directory` must be new or empty; found other files in {path}."
        )
    return path


def _predictor(
    teacher: Any, element_spec: Any, *, trust: bool
) -> tuple[_Predict, str]:
    """Returns how the teacher is asked, and a digest of it."""
    if isinstance(teacher, keras.Model):
        ask = tf.function(
            lambda x: keras.tree.flatten(teacher(x, training=False)),
            reduce_retracing=True,
        )
        return ask, _digest_of_values(teacher)
    if not isinstance(teacher, str | os.PathLike):
        raise ValueError(
            "`teacher` must be a Keras model or the directory of a SavedModel; "
            f"received {type(teacher).__name__}."
        )
    path = os.fspath(teacher)
    other_graphs.check_named(path, trust=trust, remedy="`trust`")
    spec = attached.detach(element_spec)[0]
    inputs = keras.utils.unpack_x_y_sample_weight(spec)[0]
    function = other_graphs.FrozenFunction(path, input_spec=inputs)
    digest = hashlib.sha256()
    for file in sorted(pathlib.Path(path).rglob("*")):
        if file.is_file():
            digest.update(f"{file.relative_to(path)}\0{_digest(file)}".encode())
    return function, digest.hexdigest()


def _digest_of_values(model: keras.Model) -> str:
    digest = hashlib.sha256()
    for variable in model.variables:
        value = np.asarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()


def _digest(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- reading ----


def _opened(path: pathlib.Path, signer: signing.Signer | None) -> _Description:
    try:
        found = json.loads((path / FILE_NAME).read_text("utf-8"))
        description = _Description(**found["labels"])
        text, proof = description.text(), found[_PROOF]
    except FileNotFoundError as error:
        raise ValueError(
            f"There must be complete labels in {path}; found no {FILE_NAME}, "
            "which is written last. Write them with tfdistill.labels.write, or "
            "with: python -m launch.label"
        ) from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ValueError(
            f"{path / FILE_NAME} must be what tfdistill.labels.write wrote; "
            f"{error!r}."
        ) from error
    if description.format != FORMAT:
        raise ValueError(
            f"The labels in {path} must have the format {FORMAT}; received "
            f"{description.format!r}. Write them again."
        )
    if signer and not signer.proves(proof, text.encode()):
        raise ValueError(
            f"The labels in {path} must be signed with this process's key, "
            "but are not: they were changed, or signed with another key or "
            "none. A launched run has a key of its own unless "
            f"{signing.FILE_VARIABLE} names one: set it to the same file for "
            "whoever writes labels and for the launcher. Or read them with "
            "key=None."
        )
    return description


def _decoded(
    content: tf.Tensor, spec: Mapping[str, Any], size: int
) -> tf.Tensor:
    dtype = tf.as_dtype(spec["dtype"])
    if not size:
        return tf.zeros([0], dtype)
    # TensorFlow has no kernel that decodes float16.
    read_as = tf.uint16 if dtype == tf.float16 else dtype
    found = tf.io.decode_raw(content, read_as, fixed_length=size)
    return tf.bitcast(found, dtype)


def _num_bytes(spec: Mapping[str, Any]) -> int:
    size = tf.as_dtype(spec["dtype"]).size
    return int(np.prod(spec["shape"], dtype=np.int64)) * size


def _inputs(dataset: tf.data.Dataset) -> list[dict[str, Any]]:
    """Describes the inputs of one example of a batched data set."""
    spec = attached.detach(dataset.element_spec)[0]
    inputs = keras.utils.unpack_x_y_sample_weight(spec)[0]
    return [
        {
            "shape": leaf.shape[1:].as_list() if leaf.shape.rank else None,
            "dtype": leaf.dtype.name,
        }
        for leaf in keras.tree.flatten(inputs)
    ]


def _batch_size(dataset: tf.data.Dataset) -> int:
    """Returns how many examples every batch but the last has."""
    spec = attached.detach(dataset.element_spec)[0]
    shape = keras.tree.flatten(spec)[0].shape
    if shape.rank and shape[0] is not None:
        return int(shape[0])
    for element in dataset.take(1):
        return int(attached.batch_size(element))
    return 1
