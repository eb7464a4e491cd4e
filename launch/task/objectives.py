"""What a workload is trained for, and by which figures it is judged.

The controls of Anil et al. 2018 (arXiv:1804.03235): what a teacher gives beyond
any smoother target shows against the uniform distribution and against that of
the labels.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol

import keras
import numpy as np
import tensorflow as tf

from launch.task import predictions

# Labels from which the distribution of the labels is estimated, at least.
NUM_LABELS = 100_000


class SmoothedClasses(keras.losses.Loss):
    """Cross-entropy of integer labels, smoothed.

    The target is `(1 - weight) * one_hot(label) + weight * prior`, without
    ever making it.
    """

    def __init__(self, *, prior: np.ndarray, weight: float) -> None:
        """Keeps the distribution, `[classes]`, and its share of the target."""
        super().__init__(name="smoothed_classes")
        self._prior = prior
        self._weight = weight

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats `[...]` for labels `[...]`, logits `[..., classes]`."""
        labels = tf.reshape(tf.cast(y_true, tf.int64), tf.shape(y_pred)[:-1])
        label_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=y_pred
        )
        prior = tf.constant(self._prior, y_pred.dtype)
        prior_loss = -tf.reduce_sum(prior * tf.nn.log_softmax(y_pred), -1)
        return (1.0 - self._weight) * label_loss + self._weight * prior_loss


class SmoothedClicks(keras.losses.Loss):
    """Binary cross-entropy whose targets are drawn to a fixed probability."""

    def __init__(self, *, prior: float, weight: float) -> None:
        """Keeps the probability and its share of the target."""
        super().__init__(name="smoothed_clicks")
        self._prior = prior
        self._weight = weight

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats `[batch]` for labels and logits `[batch, 1]`."""
        labels = tf.cast(tf.reshape(y_true, tf.shape(y_pred)), y_pred.dtype)
        targets = (1.0 - self._weight) * labels + self._weight * self._prior
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, y_pred)
        return tf.reduce_mean(losses, axis=-1)


class ConfidencePenalty(keras.losses.Loss):
    """A task's loss, less the entropy of what the student predicts.

    Pereyra et al. 2017 (arXiv:1701.06548): `loss - weight * H(prediction)`.
    """

    def __init__(self, inner: keras.losses.Loss, *, weight: float) -> None:
        """Takes a loss of logits, and what the entropy counts."""
        super().__init__(name="confidence_penalty")
        self._inner = inner
        self._weight = weight

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats for logits `[..., classes]`, or `[batch, 1]`."""
        if y_pred.shape[-1] == 1:
            # log p and log(1 - p) of a logistic output.
            y_pred_log = tf.concat(
                [-tf.nn.softplus(-y_pred), -tf.nn.softplus(y_pred)], axis=-1
            )
        else:
            y_pred_log = tf.nn.log_softmax(y_pred)
        entropy = -tf.reduce_sum(tf.exp(y_pred_log) * y_pred_log, axis=-1)
        return self._inner.call(y_true, y_pred) - self._weight * entropy


def label_counts(
    dataset: tf.data.Dataset, *, at_least: int = NUM_LABELS
) -> np.ndarray:
    """Counts the labels at the start of training data.

    int64 `[highest label + 1]`, among the first `at_least` or a few more; the
    data may be endless.
    """
    counts = np.zeros(0, np.int64)
    for _, labels in dataset:
        found = np.bincount(np.asarray(labels).reshape(-1).astype(np.int64))
        size = max(len(found), len(counts))
        counts = np.pad(counts, (0, size - len(counts)))
        counts += np.pad(found, (0, size - len(found)))
        if counts.sum() >= at_least:
            break
    return counts


def distribution(counts: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns the labels' distribution, as if each had come once more.

    float64 `[num_classes]`, all positive: some classes may not have come.
    """
    padded = np.pad(counts, (0, num_classes - len(counts))) + 1.0
    return padded / padded.sum()


class Objective(Protocol):
    """One kind of prediction."""

    def loss(self) -> keras.losses.Loss:
        """Returns the task's loss, of logits."""

    def smoothed_loss(
        self, weight: float, *, counts: np.ndarray | None, num_outputs: int
    ) -> keras.losses.Loss:
        """Returns the task's loss with smoothed labels.

        `counts` says how often each label comes, for smoothing by those; None
        smooths by the uniform distribution.
        """

    def metrics(self) -> list[Any]:
        """Returns what `fit` logs beside the loss; one is `log_loss`."""

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the `launch.task.predictions` of logits `[examples, ...]`."""


class Classes:
    """One of several classes."""

    def loss(self) -> keras.losses.Loss:
        """Returns the cross-entropy of integer labels."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def smoothed_loss(
        self, weight: float, *, counts: np.ndarray | None, num_outputs: int
    ) -> keras.losses.Loss:
        """Returns the cross-entropy of smoothed labels."""
        none = np.zeros(0, np.int64)  # Each as if it had come once: uniform.
        prior = distribution(none if counts is None else counts, num_outputs)
        return SmoothedClasses(prior=prior, weight=weight)

    def metrics(self) -> list[Any]:
        """Returns accuracy, and the loss without regularization."""
        kind = keras.metrics.SparseCategoricalCrossentropy
        return ["accuracy", kind(from_logits=True, name="log_loss")]

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the softmax, `[examples, classes]`."""
        return predictions.Distributions(
            probabilities=softmax(logits), labels=labels
        )


class Tokens(Classes):
    """The next token of a text, at every place of a sequence."""

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns what is kept of a softmax over a vocabulary."""
        flat = logits.reshape(-1, logits.shape[-1])
        chosen = softmax(flat)[np.arange(len(flat)), labels.reshape(-1)]
        return predictions.LabelProbabilities(
            label_probabilities=chosen,
            predicted_labels=flat.argmax(axis=-1).astype(np.int32),
            labels=labels.reshape(-1),
        )


class Clicks:
    """A click, or none."""

    def loss(self) -> keras.losses.Loss:
        """Returns the binary cross-entropy."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def smoothed_loss(
        self, weight: float, *, counts: np.ndarray | None, num_outputs: int
    ) -> keras.losses.Loss:
        """Returns the binary cross-entropy of smoothed labels."""
        if num_outputs != 1:
            raise ValueError(
                f"A click is one output; received a student with {num_outputs}."
            )
        prior = 0.5 if counts is None else distribution(counts, 2)[1]
        return SmoothedClicks(prior=float(prior), weight=weight)

    def metrics(self) -> list[Any]:
        """Returns the area under the ROC curve, and the unregularized loss."""
        kind = keras.metrics.BinaryCrossentropy
        return [
            keras.metrics.AUC(from_logits=True, name="auc"),
            kind(from_logits=True, name="log_loss"),
        ]

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the logistic function, `[examples]`."""
        flat = logits.reshape(-1)
        # exp of a negative number cannot overflow.
        small = np.exp(-np.abs(flat))
        return predictions.Distributions(
            probabilities=np.where(flat >= 0, 1.0, small) / (1.0 + small),
            labels=labels.reshape(-1),
        )


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns probabilities `[..., classes]`."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


# The objective of each data set.
OBJECTIVES: Mapping[str, Callable[[], Objective]] = {
    "cifar10": Classes,
    "criteo": Clicks,
    "digits": Classes,
    "imagenet": Classes,
    "language_model": Tokens,
    "shakespeare": Classes,
}


def of(data_name: str) -> Objective:
    """Returns the objective of a data set of `models`."""
    return OBJECTIVES[data_name]()
