"""What a workload is trained for, and by which figures it is judged.

The controls of Anil et al. 2018 (arXiv:1804.03235): comparison with the uniform
distribution and with the labels' distribution shows what a teacher adds to any
smoother target.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.held_out import predictions
from tfdistill.system import keras_internals
from tfdistill.training import global_batch

# Labels from which the distribution of the labels is estimated, at least.
NUM_LABELS = 100_000


class Regularized(keras.losses.Loss):
    """A loss that trains, beside `inner`, by which results are judged."""

    def __init__(self, inner: keras.losses.Loss, *, weight: float) -> None:
        """Takes a loss of logits, and the share or weight of the rest."""
        if not 0 < weight < 1:
            raise ValueError(f"`weight` must be in (0, 1); received {weight}.")
        super().__init__(name=type(self).__name__.lower())
        self.inner = inner
        self._weight = weight


class SmoothedClasses(Regularized):
    """Cross-entropy of integer labels, smoothed.

    The target is `(1 - weight) * one_hot(label) + weight * prior`, without
    ever making it. The prior is the distribution of `counts`.
    """

    def __init__(
        self, inner: keras.losses.Loss, *, counts: np.ndarray, weight: float
    ) -> None:
        """Takes how often each label comes."""
        super().__init__(inner, weight=weight)
        self._counts = counts

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats `[...]` for labels `[...]`, logits `[..., classes]`."""
        labels = tf.reshape(tf.cast(y_true, tf.int64), tf.shape(y_pred)[:-1])
        label_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=y_pred
        )
        shares = distribution(self._counts, int(y_pred.shape[-1]))
        prior = tf.constant(shares, y_pred.dtype)
        prior_loss = -tf.reduce_sum(prior * tf.nn.log_softmax(y_pred), -1)
        return (1.0 - self._weight) * label_loss + self._weight * prior_loss


class SmoothedClicks(SmoothedClasses):
    """Binary cross-entropy whose targets are drawn to a fixed probability."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns nats `[batch]` for labels and logits `[batch, 1]`."""
        labels = tf.cast(tf.reshape(y_true, tf.shape(y_pred)), y_pred.dtype)
        prior = float(distribution(self._counts, 2)[1])
        targets = (1.0 - self._weight) * labels + self._weight * prior
        losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, y_pred)
        return tf.reduce_mean(losses, axis=-1)


def smoothed(
    inner: keras.losses.Loss, *, weight: float, counts: np.ndarray | None = None
) -> keras.losses.Loss:
    """Returns a loss with smoothed labels: by their counts, or uniformly."""
    kinds = {Classes: SmoothedClasses, Clicks: SmoothedClicks}
    if counts is None:  # Each as if it had come once.
        counts = np.zeros(0, np.int64)
    return kinds[of(inner)](inner, counts=counts, weight=weight)


def label_counts(dataset: tf.data.Dataset) -> np.ndarray:
    """Counts the labels at the start of training data.

    int64 `[highest label + 1]`, among the first `NUM_LABELS` or a few more; the
    data may be endless.
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
    """Returns the labels' distribution, with one added to each count.

    float64 `[num_classes]`, all positive: some classes may not have come.
    """
    padded = np.pad(counts, (0, num_classes - len(counts))) + 1.0
    return padded / padded.sum()


def of(loss: keras.losses.Loss) -> Any:
    """Returns by what a loss is judged: `Classes` or `Clicks`."""
    own, kinds = _innermost(loss), keras.losses
    judged = kinds.SparseCategoricalCrossentropy, kinds.BinaryCrossentropy
    if isinstance(own, judged) and own.from_logits:
        return _BY_KIND[keras_internals.kind_of_loss(own)]
    raise ValueError(
        "The loss of a workload must be SparseCategoricalCrossentropy or "
        f"BinaryCrossentropy, with from_logits=True; received {loss!r}. Let "
        "the model return logits, or train it with your own script."
    )


def _softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


class Classes:
    """One of several classes; of a sequence, at each of its places."""

    log_loss = functools.partial(
        keras.metrics.SparseCategoricalCrossentropy,
        from_logits=True,
        name="log_loss",
    )

    @staticmethod
    def predictions(logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the softmax, or what is kept of one for each token."""
        if logits.ndim < 3:
            return predictions.Distributions(
                probabilities=_softmax(logits),
                labels=labels.reshape(-1),
            )
        flat = logits.reshape(-1, logits.shape[-1])
        chosen = _softmax(flat)[np.arange(len(flat)), labels.reshape(-1)]
        return predictions.LabelProbabilities(
            label_probabilities=chosen,
            predicted_labels=flat.argmax(axis=-1).astype(np.int32),
            labels=labels.reshape(-1),
        )


class Clicks:
    """A click, or none."""

    log_loss = functools.partial(
        keras.metrics.BinaryCrossentropy, from_logits=True, name="log_loss"
    )

    @staticmethod
    def predictions(logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the logistic function, `[examples]`."""
        return predictions.Distributions(
            # exp(-x) itself would overflow.
            probabilities=np.exp(-np.logaddexp(0, -logits.reshape(-1))),
            labels=labels.reshape(-1),
        )


class Values:
    """Numbers, each of which is an example."""

    @staticmethod
    def predictions(outputs: np.ndarray, labels: np.ndarray) -> Any:
        """Returns them, `[examples]`."""
        return predictions.Values(
            values=outputs.reshape(-1),
            labels=np.asarray(labels.reshape(-1), np.float64),
        )


# By what a compiled loss compares; see `keras_internals.kind_of_loss`.
_BY_KIND: dict[str | None, Any] = {
    "classes": Classes,
    "binary": Clicks,
    "values": Values,
}
# Losses of numbers that need not come close to the labels.
_NO_ERRORS = "categoricalhinge", "cosinesimilarity", "hinge", "squaredhinge"


def compiled(loss: object) -> tuple[Any, tuple[Any, ...], Any]:
    """Returns a model's only loss, its place among others, and the objective.

    ValueError unless there is one loss, a cross-entropy or a regression's.
    """
    found = [
        (path, _innermost(each))
        for path, each in keras.tree.flatten_with_path(loss)
        if each is not None
    ]
    if len(found) == 1:
        path, own = found[0]
        objective = _BY_KIND.get(keras_internals.kind_of_loss(own))
        has_errors = keras_internals.name_of_loss(own) not in _NO_ERRORS
        if objective is not None and has_errors:
            return own, path, objective
    names = [
        own.name if isinstance(own, keras.losses.Loss) else repr(own)
        for _, own in found
    ]
    raise ValueError(
        "What is compared are probabilities, or the errors of numbers, so the "
        "model must have one loss, a categorical or binary cross-entropy or "
        f"one of Keras' regression losses; received "
        f"{', '.join(names) or 'none'}. Models with other losses train on "
        "workers and in groups, but can't be compared: leave out the "
        "comparison, and HeldOutPredictions."
    )


def _innermost(loss: object) -> Any:
    while isinstance(loss, Regularized | global_batch.GlobalBatchLoss):
        loss = loss.inner
    return loss


def part(values: Any, path: tuple[Any, ...], names: Any = None) -> Any:
    """Returns what stands at a loss's place in outputs or labels.

    That is all of them unless there are several. `names` names the outputs.
    """
    for key in path:
        if isinstance(values, list | tuple) and isinstance(key, str):
            key = list(names).index(key)
        if isinstance(values, list | tuple | dict):
            values = values[key]
    return values


def check_labels(loss: object, labels: np.ndarray) -> None:
    """Refuses labels for which a report has no figures."""
    kind = compiled(loss)[2]
    if kind is Values and np.ptp(labels) == 0:
        raise ValueError(
            "Held-out labels of a regression must differ, as errors are "
            f"compared with their variance; received {labels.size} times "
            f"{float(labels.flat[0]):g}. Hold out more rows."
        )
    if kind is Clicks and list(known := np.unique(labels)) != [0, 1]:
        raise ValueError(
            "With a binary cross-entropy, the held-out labels must be 0 and 1, "
            f"and both must occur; received {len(labels)} rows with "
            f"{', '.join(f'{float(x):g}' for x in known[:3])}"
            f"{' and other values' * (len(known) > 3)}. Hold out more rows; "
            "what predicts other numbers, such as an autoencoder, is compared "
            "with a regression's loss, such as 'mse'."
        )


def predictions_of(
    loss: object,
    outputs: object,
    labels: np.ndarray,
    weights: Sequence[np.ndarray] = (),
) -> Any:
    """Returns the predictions of a model that `fit` trained.

    `loss` is what it was compiled with: it says what `outputs` are. Rows, and
    places in a sequence, that have a weight of 0 in one of `weights`, or that
    the loss ignores, are left out.
    """
    own, _, kind = compiled(loss)
    if not isinstance(outputs, np.ndarray):
        raise ValueError(
            "The output with a loss must be a tensor in held-out predictions; "
            f"received outputs of {type(outputs).__name__}. Leave "
            "HeldOutPredictions out."
        )
    # A function of Keras has none: it takes probabilities.
    has_settings = isinstance(own, keras.losses.Loss)
    settings = own.get_config() if has_settings else {}
    exact = np.asarray(outputs, np.float64)
    if kind is not Values and not settings.get("from_logits"):
        tiny = np.finfo(np.float64).tiny
        is_click = kind is Clicks
        exact = np.clip(exact, tiny, 1 - np.finfo(np.float64).epsneg)
        exact = np.log(exact) - (np.log1p(-exact) if is_click else 0)
    if kind is Classes and labels.shape == exact.shape:
        labels = np.argmax(labels, -1)
    if kind is Values and labels.size != exact.size:
        raise ValueError(
            "A regression must predict one number for each label; received "
            f"outputs of shape {exact.shape} for labels of shape "
            f"{labels.shape}. Leave HeldOutPredictions, or the comparison, out."
        )
    counted: np.ndarray = np.ones(labels.shape, bool)
    if (ignored := settings.get("ignore_class")) is not None:
        counted = labels != ignored
    for each in weights:
        missing = (1,) * (labels.ndim - each.ndim)
        each = each.reshape(each.shape[: labels.ndim] + missing)
        counted = counted & (each != 0)
    counted = counted.reshape(-1)
    # A label that is ignored may not be a class.
    labels = np.where(counted, labels.reshape(-1), 0)
    return kind.predictions(exact, labels).kept(counted)
