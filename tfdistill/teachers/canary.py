"""A small batch that each version must answer before it teaches."""

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.teachers import teacher

_log = logging.getLogger(__name__)
_Predict = Callable[[Any], list[Any]]
_NUM_EXAMPLES = 256


class Canary:
    """The first examples of held-out data, and perhaps their labels.

    Class indices, 0 and 1, and one-hot rows are taken as labels; of other
    targets, several, or none it has none.

    Attributes:
        inputs: As the student is called with, `[batch, ...]`.
        labels: Class indices `[batch, ...]`, or 0 and 1 for a student of one
            output; None without.

    Example:
        >>> canary = Canary((np.zeros([8, 4]), np.arange(8) % 2))
        >>> canary.num_examples
        8
    """

    def __init__(self, examples: Any) -> None:
        """Takes a dataset of batches, as `fit` takes it, or arrays `(x, y)`."""
        batch = _first(examples)
        self.inputs = batch[0]
        self.labels = _labels(batch[1]) if len(batch) > 1 else None
        self.num_examples = int(keras.tree.flatten(self.inputs)[0].shape[0])
        if not self.num_examples:
            raise ValueError(
                "A canary needs at least one example; received none."
            )
        # Of the outputs, once a model has answered.
        self._num_classes = 1

    def check(
        self, predict: _Predict, student: teacher.Student
    ) -> float | None:
        """Has a model answer; returns its mean cross-entropy in nats.

        None without labels. `predict` is from inputs to the flat list of
        outputs. ValueError if these are not finite, or of another shape than
        the student's.
        """
        wanted = keras.tree.flatten(student.graph.output_spec)
        outputs = [tf.convert_to_tensor(t) for t in predict(self.inputs)]
        if len(outputs) != len(wanted):
            raise ValueError(
                f"its outputs on the canary batch must be {len(wanted)}; "
                f"received {len(outputs)}."
            )
        for output, spec in zip(outputs, wanted, strict=True):
            shape = tf.TensorShape([self.num_examples, *spec.shape[1:]])
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
        if self.labels is None:
            return None
        return self._loss(outputs, from_logits=student.from_logits)

    def base_rate_loss(self) -> float:
        """The cross-entropy of whoever knows only how often classes occur."""
        _, counts = np.unique(np.asarray(self.labels), return_counts=True)
        rates = counts / counts.sum()
        return float(-(rates * np.log(rates)).sum())

    def chance_loss(self) -> float:
        """The cross-entropy of whoever knows nothing: a guess.

        Of few examples and many classes, their own base rates say too much.
        """
        return max(self.base_rate_loss(), float(np.log(self._num_classes)))

    def _loss(
        self, outputs: list[tf.Tensor], *, from_logits: bool
    ) -> float | None:
        if len(outputs) != 1:
            self._leave_out_labels(
                f"those of a student of one output; received {len(outputs)}"
            )
            return None
        logits = _logits(tf.cast(outputs[0], tf.float32), from_logits)
        num_classes = self._num_classes = int(logits.shape[-1])
        logits = tf.reshape(logits, [-1, num_classes])
        labels = np.asarray(self.labels).reshape(-1)
        if (
            len(labels) != len(logits)
            or not ((labels >= 0) & (labels < num_classes)).all()
        ):
            self._leave_out_labels(
                f"{len(logits)} numbers in 0 to {num_classes - 1}; received "
                f"{len(labels)}, from {labels.min()} to {labels.max()}"
            )
            return None
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        return float(tf.reduce_mean(losses))

    def _leave_out_labels(self, received: str) -> None:
        """Compares no more versions: the labels are at fault, not these."""
        self.labels = None
        _log.warning(
            "To compare teachers with the student, labels of held-out examples "
            "must be %s. Versions are tried out, and not compared.",
            received,
        )


def _logits(outputs: tf.Tensor, from_logits: bool) -> tf.Tensor:
    """Gives outputs a logit for each class; one output is that of 1."""
    if from_logits:
        logits, other = outputs, tf.zeros_like(outputs)
    else:
        logits = tf.math.log(tf.clip_by_value(outputs, 1e-12, 1.0))
        other = tf.math.log(tf.clip_by_value(1 - outputs, 1e-12, 1.0))
    if outputs.shape[-1] == 1:
        logits = tf.concat([other, logits], axis=-1)
    return logits


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


def _first(examples: Any) -> tuple[Any, ...]:
    """Returns the first examples, as a tuple of inputs and perhaps labels."""
    if isinstance(examples, tuple):
        return tuple(
            keras.tree.map_structure(
                lambda values: tf.convert_to_tensor(values[:_NUM_EXAMPLES]),
                part,
            )
            for part in examples
            if part is not None
        )
    if not isinstance(examples, tf.data.Dataset):
        raise ValueError(
            "`canary` must be a tf.data.Dataset, arrays `(x, y)` or None; "
            f"received {type(examples).__name__}."
        )
    rows = examples.unbatch().take(_NUM_EXAMPLES).batch(_NUM_EXAMPLES)
    for batch in rows:
        return batch if isinstance(batch, tuple) else (batch,)
    raise ValueError(
        "A canary needs at least one example; received an empty dataset."
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
