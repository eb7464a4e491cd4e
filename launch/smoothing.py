"""Label smoothing: losses that pull predictions towards a fixed distribution.

The controls of Anil et al. 2018 (arXiv:1804.03235): what a teacher gives beyond
any smoother target shows against the uniform distribution and against that of
the labels.
"""

import keras
import numpy as np
import tensorflow as tf

# Labels from which the distribution of the labels is estimated, at least.
NUM_LABELS = 100_000


class SmoothedClasses(keras.losses.Loss):
    """Cross-entropy of integer labels, smoothed.

    The target is `(1 - weight) * one_hot(label) + weight * prior`, without
    ever making it.
    """

    def __init__(self, *, prior: np.ndarray, weight: float) -> None:
        """Keeps the distribution.

        Args:
            prior: float `[classes]`, sums to one.
            weight: Its share of the target, in [0, 1).
        """
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
        """Keeps the probability.

        Args:
            prior: In (0, 1).
            weight: Its share of the target, in [0, 1).
        """
        super().__init__(name="smoothed_clicks")
        self._prior = prior
        self._weight = weight

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats `[batch]` for labels and logits `[batch, 1]`."""
        labels = tf.cast(tf.reshape(y_true, tf.shape(y_pred)), y_pred.dtype)
        targets = (1.0 - self._weight) * labels + self._weight * self._prior
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, y_pred)
        return tf.reduce_mean(losses, axis=-1)


def label_counts(dataset: tf.data.Dataset) -> np.ndarray:
    """Counts the labels at the start of training data.

    Args:
        dataset: Batches of (inputs, whole-number labels); may be endless.

    Returns:
        How often each label came, int64 `[highest label + 1]`, among the
        first `NUM_LABELS` or a few more.
    """
    counts = np.zeros(0, np.int64)
    for _, labels in dataset:
        found = np.bincount(np.asarray(labels).reshape(-1).astype(np.int64))
        size = max(len(found), len(counts))
        counts = np.pad(counts, (0, size - len(counts)))
        counts += np.pad(found, (0, size - len(found)))
        if counts.sum() >= NUM_LABELS:
            break
    return counts


def distribution(counts: np.ndarray, num_classes: int) -> np.ndarray:
    """Returns the labels' distribution, as if each had come once more.

    Args:
        counts: Of `label_counts`.
        num_classes: Classes that there are; some may not have come.

    Returns:
        float64 `[num_classes]`, all positive.
    """
    padded = np.pad(counts, (0, num_classes - len(counts))) + 1.0
    return padded / padded.sum()
