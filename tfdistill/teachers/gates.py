"""What a version must pass before it teaches: files, specs, schema, a batch.

Age is no gate: it lowers the weight of a version in use
(staleness.py).

Two models may have the same shapes and yet other classes, words or columns.
Their predictions then fit together by shape only, and nothing fails.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.exchange import versions
from tfdistill.exports import graph_check
from tfdistill.exports import student_graph
from tfdistill.teachers import peer

_log = logging.getLogger(__name__)
# Of a manifest's `extras`.
SCHEMA_FIELD, INTERVAL_FIELD = "schema", "every_steps"
EXAMPLES_FIELD = "examples"
# Of versions that hold an average of the weights.
DECAY_FIELD = "ema_decay"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_BLOCK_BYTES = 1024 * 1024
# Of a mean in float32: the uniform distribution itself is allowed.
_ROUNDING = 1e-5
# How much less than the student a teacher without labels may agree.
_AGREEMENT_MARGIN = 0.3
# Models with batch normalization may be a margin worse for one version.
_FAR_MARGINS = 5.0


def digests(schema: Mapping[str, Any]) -> dict[str, str]:
    """Hashes each part of a schema.

    Args:
        schema: What must be the same in every group, by names of your own,
            such as `{"labels": ["cat", "dog"], "vocabulary":
            pathlib.Path("words.txt"), "features": {"age": "years"}}`. A path
            stands for its file's bytes, anything else for itself as JSON:
            text, numbers, lists and dicts.

    Returns:
        SHA-256 in hexadecimal by name.

    Raises:
        ValueError: A name or a part cannot be hashed.
        OSError: A file cannot be read.

    Example:
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ("a", "b")})
        True
        >>> digests({"labels": ["a", "b"]}) == digests({"labels": ["b", "a"]})
        False
    """
    found = {}
    for name, part in schema.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                "The names in a `schema` must be 1 to 64 letters, digits, "
                f"'_', '.' or '-'; received {name!r}."
            )
        digest = hashlib.sha256()
        if isinstance(part, os.PathLike):
            with open(part, "rb") as file:
                while block := file.read(_BLOCK_BYTES):
                    digest.update(block)
        else:
            digest.update(_text(name, part).encode())
        found[name] = digest.hexdigest()
    return found


def _text(name: str, part: Any) -> str:
    try:
        return json.dumps(part, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"The part {name!r} of a `schema` must be a pathlib.Path, or "
            f"something that JSON can hold; received {type(part).__name__}: "
            f"{error}."
        ) from error


def schema_difference(ours: Mapping[str, str], theirs: Any) -> str | None:
    """Says, in one sentence, how a peer's schema differs from ours.

    `ours` is what `digests` returned, `theirs` what the peer's manifest says.
    Nothing differs from an empty schema.
    """
    if not ours:
        return None
    if not isinstance(theirs, Mapping):
        return "its manifest has no schema."
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            return f"its schema has no part {name!r}, which ours has."
        if name not in ours:
            return f"its schema has a part {name!r}, which ours does not have."
        if theirs[name] != ours[name]:
            return f"its {name!r} must be the same as ours, but differs."
    return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model makes of the canary batch.

    Attributes:
        num_classes: Of the outputs; 0 if they have none.
        loss: Mean cross-entropy; None without labels.
        classes: Without labels, the class of each example; None if unknown.
        confidence: The mean probability of these classes.
    """

    num_classes: int = 0
    loss: float | None = None
    classes: np.ndarray | None = None
    confidence: float = 0.0

    @property
    def is_sure(self) -> bool:
        """Whether it is nearer to certainty than to a uniform guess."""
        return self.confidence >= (1 + 1 / max(self.num_classes, 1)) / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Behind:
    """How far a teacher is behind the student on the canary batch.

    Attributes:
        by: By how much, in the measure of the comparison; negative: ahead.
        margin: How much of that is allowed.
    """

    by: float
    margin: float

    def is_worse(self, *, was_worse: bool) -> bool:
        """Whether it is worse; once it was, by more than half of the margin."""
        return self.by > self.margin / (1 + was_worse)

    @property
    def is_far_worse(self) -> bool:
        """Whether no good teacher is ever so much behind."""
        return self.by > _FAR_MARGINS * self.margin


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """With what a teacher's answer is compared.

    Attributes:
        student: The answer of the student.
        others: The classes that the student gave before, and then those of
            the other teachers in use.
    """

    student: Answer
    others: Sequence[np.ndarray] = ()


def _majority(opinions: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the most frequent class by example; of a tie, the first's."""
    votes = np.stack(opinions)
    counts = (votes[:, np.newaxis] == votes).sum(axis=1)
    best = counts.argmax(axis=0)
    return np.take_along_axis(votes, best[np.newaxis], axis=0)[0]


class Canary:
    """A small batch of real inputs, and perhaps their labels.

    Each version of a peer, and each fixed SavedModel, must predict this batch
    before it becomes a teacher. A version is refused if its outputs are not
    finite or have another shape, and, with labels, if it is worse than a
    uniform guess. Hold the batch out of training. With labels, an untrained
    student may be refused: if peers publish from the start, leave the labels
    out or increase `margin`.

    With labels, the student predicts the batch as well, in the background at
    each refresh. A teacher whose loss exceeds the student's by more than
    `student_margin` is `worse`: it has no weight until its loss exceeds the
    student's by less than half of that. A teacher that was not worse before
    has as long as two of its versions take to show that it is not, unless it
    is worse by five margins. Without labels, the same happens to a
    teacher that agrees much less than the student (by .3 of the examples) with
    what the student said before and the other teachers say, by majority, once
    the student is sure of itself.
    """

    def __init__(
        self,
        inputs: Any,
        *,
        labels: Any = None,
        from_logits: bool | None = None,
        margin: float = 0.5,
        student_margin: float = 0.2,
    ) -> None:
        """Checks the labels.

        Args:
            inputs: As the student is called with, `[batch, ...]`.
            labels: Class indices `[batch, ...]`, or 0 and 1 for a student of
                one output. The student must then have one output tensor,
                `[batch, ..., classes]`. Default: outputs are only looked at.
            from_logits: Whether the outputs are logits, not probabilities.
                Default: as the distillation loss takes them.
            margin: The mean cross-entropy, in nats, may exceed that of the
                uniform distribution by this much. Default 0.5.
            student_margin: In nats, how much worse than the student a teacher
                may be. Default 0.2; `math.inf` for no comparison.

        Raises:
            ValueError: An argument is not as above.
        """
        if not 0 <= margin < math.inf:
            raise ValueError(
                f"`margin` must be finite and >= 0; received {margin}."
            )
        if not student_margin >= 0:
            raise ValueError(
                f"`student_margin` must be >= 0; received {student_margin}."
            )
        self.inputs = keras.tree.map_structure(tf.convert_to_tensor, inputs)
        sizes = {int(t.shape[0]) for t in keras.tree.flatten(self.inputs)}
        self._labels = None if labels is None else np.asarray(labels)
        if self._labels is not None:
            sizes.add(len(self._labels))
            if self._labels.dtype.kind not in "iub":
                raise ValueError(
                    "`labels` must be whole numbers, class indices; received "
                    f"{self._labels.dtype}."
                )
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(
                "`inputs` and `labels` must have the same number of examples, "
                f">= 1; received {sorted(sizes)}."
            )
        self._batch_size = sizes.pop()
        self._from_logits = from_logits
        self._margin = margin
        self.student_margin = student_margin
        self._has_classes = False

    @classmethod
    def from_dataset(
        cls, dataset: tf.data.Dataset, *, num_examples: int = 256, **kwargs: Any
    ) -> "Canary":
        """Makes a canary of the first examples of a dataset, as `fit` takes it.

        Class indices, 0 and 1, and one-hot rows are taken as labels; a dataset
        with other targets, several, or none gives a canary without labels.

        Args:
            dataset: Batches of inputs, `(inputs, targets)` or `(inputs,
                targets, sample_weight)`, held out of training.
            num_examples: How many to take, >= 1. Default 256.
            **kwargs: As in `Canary`, but for `labels`.

        Raises:
            ValueError: The dataset is empty.
        """
        found = list(dataset.unbatch().take(num_examples).batch(num_examples))
        if not found:
            raise ValueError(
                "A canary needs at least one example; received an empty "
                "dataset."
            )
        batch = found[0]
        if not isinstance(batch, tuple):
            return cls(batch, **kwargs)
        labels = _labels(batch[1]) if len(batch) > 1 else None
        return cls(batch[0], labels=labels, **kwargs)

    def settle(self, from_logits: bool | None, *, has_classes: bool) -> None:
        """Says what outputs are, unless the canary was made with it."""
        if self._from_logits is None:
            self._from_logits = from_logits
        self._has_classes = has_classes

    @property
    def compares(self) -> bool:
        """Whether teachers are compared with the student."""
        return self.student_margin < math.inf

    def behind(self, teacher: Answer, beside: Beside | None) -> Behind | None:
        """How far a teacher is behind the student; None if unknown."""
        if beside is None:
            return None
        student = beside.student
        if teacher.loss is not None and student.loss is not None:
            return Behind(
                by=teacher.loss - student.loss, margin=self.student_margin
            )
        if teacher.classes is None or student.classes is None:
            return None
        if not beside.others or not student.is_sure:
            return None
        reference = _majority(beside.others)
        ours = (student.classes == reference).mean()
        theirs = (teacher.classes == reference).mean()
        return Behind(by=float(ours - theirs), margin=_AGREEMENT_MARGIN)

    def check(
        self, predict: Callable[[Any], list[Any]], output_spec: Any
    ) -> Answer:
        """Asks a teacher; raises ValueError if its answer is not sensible.

        `predict` is from inputs to the flat list of outputs.
        """
        answer = self.ask(predict, output_spec)
        if answer.loss is None:
            return answer
        most = math.log(answer.num_classes) + self._margin
        if not answer.loss <= most + _ROUNDING:
            _log.info(
                "The cross-entropy on the canary batch is %.4f.", answer.loss
            )
            # One digit: a reason is logged once, and each version of a peer
            # that has diverged would have another number.
            raise ValueError(
                "its cross-entropy on the canary batch must be at most "
                f"{most:.3f}, that of the uniform distribution and a margin; "
                f"received about {answer.loss:.1g}."
            )
        return answer

    def ask(
        self, predict: Callable[[Any], list[Any]], output_spec: Any
    ) -> Answer:
        """Asks any model, however bad; ValueError if its outputs are none."""
        outputs = self._outputs(predict, output_spec)
        if self._labels is not None:
            return self._loss(outputs)
        if len(outputs) != 1 or not self._has_classes:
            return Answer()
        probabilities = tf.nn.softmax(self._by_class(outputs[0])).numpy()
        return Answer(
            num_classes=probabilities.shape[-1],
            classes=probabilities.argmax(axis=-1),
            confidence=float(probabilities.max(axis=-1).mean()),
        )

    def _by_class(self, output: tf.Tensor) -> tf.Tensor:
        """Returns logits, a row for each example or position."""
        logits = self._logits(tf.cast(output, tf.float32))
        return tf.reshape(logits, [-1, int(logits.shape[-1])])

    def _outputs(
        self, predict: Callable[[Any], list[Any]], output_spec: Any
    ) -> list[tf.Tensor]:
        wanted = keras.tree.flatten(output_spec)
        outputs = [tf.convert_to_tensor(t) for t in predict(self.inputs)]
        if len(outputs) != len(wanted):
            raise ValueError(
                f"its outputs on the canary batch must be {len(wanted)}; "
                f"received {len(outputs)}."
            )
        for output, spec in zip(outputs, wanted, strict=True):
            shape = tf.TensorShape([self._batch_size, *spec.shape[1:]])
            if not shape.is_compatible_with(output.shape):
                raise ValueError(
                    f"its outputs on the canary batch must have the shape "
                    f"{shape}; received {output.shape}."
                )
            finite = tf.math.is_finite(tf.cast(output, tf.float32))
            if not bool(tf.reduce_all(finite)):
                raise ValueError(
                    "its outputs on the canary batch must be finite; received "
                    "NaN or infinite ones."
                )
        return outputs

    def _loss(self, outputs: list[tf.Tensor]) -> Answer:
        if len(outputs) != 1:
            raise ValueError(
                "a canary batch with labels is for students of one output; "
                f"received {len(outputs)}. Leave the labels out."
            )
        logits = self._by_class(outputs[0])
        num_classes = int(logits.shape[-1])
        labels = np.asarray(self._labels).reshape(-1)
        if (
            len(labels) != len(logits)
            or not ((labels >= 0) & (labels < num_classes)).all()
        ):
            raise ValueError(
                f"the canary batch's labels must be {len(logits)} numbers in 0 "
                f"to {num_classes - 1}; received {len(labels)}, up to "
                f"{labels.max()}."
            )
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return Answer(
            num_classes=num_classes, loss=float(tf.reduce_mean(losses))
        )

    def _logits(self, outputs: tf.Tensor) -> tf.Tensor:
        """Gives outputs a logit for each class; one output is that of 1."""
        if self._from_logits in (None, True):
            logits, other = outputs, tf.zeros_like(outputs)
        else:
            logits = tf.math.log(tf.clip_by_value(outputs, 1e-12, 1.0))
            other = tf.math.log(tf.clip_by_value(1 - outputs, 1e-12, 1.0))
        if outputs.shape[-1] == 1:
            logits = tf.concat([other, logits], axis=-1)
        return logits


def as_canary(given: Any) -> Canary | None:
    """Returns the canary that a `TeacherSet` was given, or a dataset's."""
    if isinstance(given, tf.data.Dataset):
        return Canary.from_dataset(given)
    if given is None or isinstance(given, Canary):
        return given
    raise ValueError(
        "`canary` must be a tfdistill.Canary, a tf.data.Dataset or None; "
        f"received {type(given).__name__}. Arrays: tfdistill.Canary(x, "
        "labels=y)."
    )


def _labels(targets: Any) -> np.ndarray | None:
    """Returns targets as class indices; None if they are none."""
    if len(keras.tree.flatten(targets)) != 1:
        return None
    values = np.asarray(keras.tree.flatten(targets)[0])
    if values.dtype.kind in "iub":
        return values
    if not np.isin(values, (0, 1)).all():
        return None
    is_one_hot = values.ndim > 1 and values.shape[-1] > 1
    if is_one_hot and not (values.sum(axis=-1) == 1).all():
        return None
    return (values.argmax(axis=-1) if is_one_hot else values).astype(np.int64)


class StudentOnCanary:
    """The student's own answer to the canary batch, found in the background."""

    def __init__(
        self,
        canary: Canary,
        graph: student_graph.StudentGraph,
        *,
        snapshot: Callable[[], Any],
        predict: Callable[[Any, Any], list[Any]],
        most_busy: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Finds nothing yet.

        `snapshot` takes the values that an export would hold, at no cost;
        `predict` is from these and inputs to the flat list of outputs. It is
        called for `most_busy` of the time at most, by `clock` in seconds.
        """
        self._canary = canary
        self._graph = graph
        self._snapshot = snapshot
        self._predict = predict
        self._most_busy = most_busy
        self._clock = clock
        self._pause_ends = -math.inf
        # At most one, so that a slow look skips values rather than queues.
        self._taken: list[Any] = []
        # None: unknown, or not finite.
        self.answer: Answer | None = None
        self.past: Answer | None = None

    def take(self) -> None:
        """Takes the student's values, between two steps."""
        self._taken = [self._snapshot()]

    def beside(self, others: Sequence[Answer | None]) -> Beside | None:
        """Returns with what to compare a teacher; `others` are the others'."""
        if self.answer is None:
            return None
        opinions = [
            answer.classes
            for answer in (self.past, *others)
            if answer is not None and answer.classes is not None
        ]
        return Beside(student=self.answer, others=opinions)

    def begin(self) -> None:
        """Finds the answer here and now, where the student may be traced."""
        self.take()
        self._find()

    def examine(self) -> None:
        """Finds the answer of the values taken last, if it is time."""
        start = self._clock()
        if start >= self._pause_ends:
            self._find()
            busy = self._clock() - start
            self._pause_ends = start + busy / self._most_busy

    def _find(self) -> None:
        taken, self._taken = self._taken, []
        for values in taken:
            self.past = self.answer
            try:
                self.answer = self._canary.ask(
                    functools.partial(self._predict, values),
                    self._graph.output_spec,
                )
            except Exception as error:  # TensorFlow raises many kinds.
                self.answer = None
                _log.info("The student's canary batch failed: %s", error)


class VersionScreen:
    """Checks the files, the size, the specs and the schema of a version."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        *,
        schema: Mapping[str, str] | None = None,
        only_warn: bool = False,
    ) -> None:
        """Reads nothing; `schema` is what `digests` made of ours."""
        self._graph = graph
        self._schema = schema or {}
        self._only_warn = only_warn
        self._warned: set[str] = set()

    def __call__(self, version: versions.Version) -> None:
        """Checks one version; raises RejectedError if it must not be read."""
        found = version.manifest
        own_graph = found.graph_fingerprint == self._graph.fingerprint
        try:
            graph_check.check_names(found.files)
            graph_check.check_size(
                version.num_bytes, self._graph, own_graph=own_graph
            )
        except ValueError as error:
            raise peer.RejectedError(str(error)) from error
        for what, ours, said in (
            ("inputs", self._graph.input_spec, found.inputs),
            ("outputs", self._graph.output_spec, found.outputs),
        ):
            check_spec(what, student_graph.to_json(ours, what), said)
        self._check_schema(version)

    def _check_schema(self, version: versions.Version) -> None:
        theirs = version.manifest.extras.get(SCHEMA_FIELD)
        difference = schema_difference(self._schema, theirs)
        if difference is None:
            return
        if not self._only_warn:
            raise peer.RejectedError(
                f"{difference} Give every group's StudentExporter and "
                "TeacherSet the same `schema`, or set "
                "TeacherSet(allow_other_schemas=True)."
            )
        if difference not in self._warned:
            self._warned.add(difference)
            _log.warning(
                "Using the teacher of group %d although %s",
                version.group,
                difference,
            )


def check_spec(what: str, ours: dict[str, Any], theirs: Any) -> None:
    """Checks a version's inputs or outputs, `what`, against the student's.

    `ours` is what `student_graph.to_json` made, `theirs` what the manifest
    says. Names, shapes and kinds of numbers must be the same, or RejectedError.
    """

    def kinds(spec: Any) -> Any:
        return {
            name: (leaf["shape"], _kind(leaf["dtype"]))
            for name, leaf in spec.items()
        }

    try:
        same = kinds(ours) == kinds(theirs)
    except (AttributeError, KeyError, TypeError):
        same = False
    if not same:
        raise peer.RejectedError(
            f"its {what} must be those of the student, {ours}; received "
            f"{theirs}."
        )


def _kind(name: str) -> str:
    """What a dtype must have in common: numbers of other widths are cast."""
    dtype = tf.as_dtype(name)
    if dtype.is_floating:
        return "float"
    return "integer" if dtype.is_integer else dtype.name
