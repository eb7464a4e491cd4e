"""A small batch that each version must answer before it teaches."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)
_NUM_EXAMPLES = 256


class Canary:
    """The first examples of held-out data.

    Attributes:
        inputs: As the student is called with, `[batch, ...]`.
        targets: As `fit` takes them; None without.

    Example:
        >>> canary = Canary((tf.zeros([8, 4]), tf.range(8) % 2))
        >>> canary.num_examples
        8
    """

    def __init__(self, examples: Any) -> None:
        """Takes a dataset of batches, as `fit` takes it, or arrays `(x, y)`."""
        if isinstance(examples, tf.data.Dataset):
            rows = examples.unbatch().batch(_NUM_EXAMPLES)
            batch = next(iter(rows), ())
            batch = batch if isinstance(batch, tuple) else (batch,)
        elif isinstance(examples, tuple):
            batch = keras.tree.map_structure(
                lambda values: tf.convert_to_tensor(values[:_NUM_EXAMPLES]),
                tuple(part for part in examples if part is not None),
            )
        else:
            raise ValueError(
                "`canary` must be a tf.data.Dataset, arrays `(x, y)` or None; "
                f"received {type(examples).__name__}."
            )
        self.num_examples = len(keras.tree.flatten(batch[0])[0]) if batch else 0
        if not self.num_examples:
            raise ValueError(
                "A canary needs at least one example; received none."
            )
        self.inputs = batch[0]
        self.targets = batch[1] if len(batch) > 1 else None

    def check(
        self, predict: Callable[[Any], list[Any]], output_spec: Any
    ) -> list[tf.Tensor]:
        """Has a model answer; returns its outputs.

        `predict` is from inputs to the flat list of outputs. ValueError if
        these are not finite, or of another shape than the student's.
        """
        wanted = [
            tf.TensorShape([self.num_examples, *spec.shape[1:]])
            for spec in keras.tree.flatten(output_spec)
        ]
        outputs = [tf.convert_to_tensor(t) for t in predict(self.inputs)]
        shapes = [output.shape for output in outputs]
        if len(shapes) != len(wanted) or not all(
            map(tf.TensorShape.is_compatible_with, wanted, shapes)
        ):
            raise ValueError(
                "its outputs on the canary batch must have the shape "
                f"{', '.join(map(str, wanted))}; received "
                f"{', '.join(map(str, shapes))}."
            )
        for output in outputs:
            finite = tf.math.is_finite(tf.cast(output, tf.float32))
            if not bool(tf.reduce_all(finite)):
                raise ValueError(
                    "its outputs on the canary batch must be finite; received "
                    "NaN or infinite ones."
                )
        return outputs


class Yardstick:
    """The labels of a canary batch, and the loss of base rates there.

    Attributes:
        base: That loss, a mean by example; 0 without labels.
    """

    def __init__(
        self, targets: Any, student: Any, outputs: list[tf.Tensor]
    ) -> None:
        """Finds out by the student's outputs what can be compared."""
        self._from_logits = student.from_logits
        self._regression: Any
        self._labels: np.ndarray | None
        self._regression = self._labels = None
        self.base = 0.0
        if not student.regression:
            self._take_labels(labels_of(targets))
        elif np.size(targets) == np.size(outputs[0]) and len(outputs) == 1:
            self._regression = student.regression
            self._take_numbers(targets, outputs[0])

    def _take_labels(self, labels: np.ndarray | None) -> None:
        self._labels = labels
        if labels is not None:
            _, counts = np.unique(labels, return_counts=True)
            rates = counts / counts.sum()
            self.base = float(-(rates * np.log(rates)).sum())

    def _take_numbers(self, targets: Any, like: tf.Tensor) -> None:
        self._targets = tf.cast(tf.reshape(targets, like.shape), like.dtype)
        mean = tf.reduce_mean(self._targets, axis=0, keepdims=True)
        means = tf.broadcast_to(mean, self._targets.shape)
        self.base = float(np.mean(self._regression.call(self._targets, means)))

    def losses(self, outputs: list[tf.Tensor]) -> np.ndarray | None:
        """Returns the loss of each example; None if there is none."""
        if self._regression:
            losses = self._regression.call(self._targets, outputs[0])
            return np.reshape(losses, [len(self._targets), -1]).mean(axis=1)
        if self._labels is None:
            return None
        logits = logits_of(outputs, from_logits=self._from_logits)
        labels, num_classes = self._labels, logits.shape[-1]
        fits = len(labels) == len(logits) and len(outputs) == 1
        if fits and labels.min() >= 0 and labels.max() < num_classes:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, logits
            ).numpy()
        # The labels are at fault, not these versions.
        self._labels = None
        _log.warning(
            "To compare teachers with the student, it must have one output, "
            "and the labels of held-out examples must be %d numbers in 0 to "
            "%d; received %d, from %d to %d. Versions are not compared.",
            *(len(logits), num_classes - 1),
            *(len(labels), labels.min(), labels.max()),
        )
        return None


def of_validation(data: Any) -> Canary | None:
    """Returns the canary in `validation_data` of `fit`, if it can be read.

    It cannot where each worker, or a function, has data of its own.
    """
    if not isinstance(data, tf.data.Dataset | tuple | list):
        return None
    try:
        return Canary(data if isinstance(data, tf.data.Dataset) else (*data,))
    except Exception as error:  # `fit` reads them too, and knows what to say.
        _log.info("No canary could be made of the validation data: %s", error)
        return None


def logits_of(outputs: list[tf.Tensor], *, from_logits: bool) -> tf.Tensor:
    """Returns a logit for each class, `[rows, classes]`, of the first output.

    One number a row is the logit, or the probability, of class 1.
    """
    values = tf.cast(outputs[0], tf.float32)
    values = tf.reshape(values, [-1, values.shape[-1]])
    if values.shape[-1] == 1:
        other = tf.zeros_like(values) if from_logits else 1 - values
        values = tf.concat([other, values], axis=-1)
    if from_logits:
        return values
    return tf.math.log(tf.clip_by_value(values, 1e-12, 1.0))


def labels_of(targets: Any) -> np.ndarray | None:
    """Returns targets as a vector of class indices; None if they are none."""
    flat = keras.tree.flatten(targets)
    if len(flat) != 1:
        return None
    values = np.asarray(flat[0])
    if values.dtype.kind not in "iub":
        if not np.isin(values, (0, 1)).all():
            return None
        if values.ndim > 1 and values.shape[-1] > 1:
            is_one_hot = (values.sum(axis=-1) == 1).all()
            return values.argmax(axis=-1).reshape(-1) if is_one_hot else None
    return values.astype(np.int64).reshape(-1)


def blank(input_spec: Any) -> Any:
    """Returns one row of zeros; None if a size is unknown."""
    specs = keras.tree.flatten(input_spec)
    if not all(spec.shape[1:].is_fully_defined() for spec in specs):
        return None
    return keras.tree.map_structure(
        lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype), input_spec
    )
