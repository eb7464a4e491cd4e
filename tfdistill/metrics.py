"""Figures for reports: quality of one model, disagreement between several.

Plain NumPy on whole arrays of predictions. Predictions are probabilities,
either `[..., classes]` with rows that sum to one, or the probability of "yes"
of a binary model: `[examples]` or `[examples, 1]`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "accuracy",
    "label_churn",
    "log_loss",
    "mean_absolute_churn",
    "prediction_difference",
    "relative_prediction_difference",
]

# Softmax in bfloat16 gives rows that miss one by some thousandths.
_ROW_SUM_TOLERANCE = 1e-2


def checked_pair(
    first: npt.ArrayLike, second: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two models' probabilities, for the same examples and classes."""
    one = checked_probabilities(first, "predictions")
    other = checked_probabilities(second, "other_predictions")
    if one.shape != other.shape:
        raise ValueError(
            "Both models must predict the same examples and classes; received "
            f"shapes {one.shape} and {other.shape}."
        )
    return one, other


def checked_probabilities(predictions: npt.ArrayLike, name: str) -> np.ndarray:
    """Returns probabilities as float64 `[examples]` or `[..., classes]`.

    From `[..., classes]`, or those of "yes" `[examples]` or `[examples, 1]`;
    `name` is what a message calls them.
    """
    array = np.asarray(predictions).astype(np.float64)
    if array.ndim == 0 or array.size == 0:
        raise ValueError(
            f"`{name}` must hold at least one example; received shape "
            f"{array.shape}."
        )
    if array.ndim == 2 and array.shape[-1] == 1:
        array = array[:, 0]
    remedy = "Apply softmax or sigmoid first if the model gives logits."
    in_range = (array >= 0) & (array <= 1 + 1e-6)  # Rounding of a softmax.
    if not in_range.all():
        where = np.unravel_index(int(np.argmin(in_range)), array.shape)
        place = tuple(int(index) for index in where)
        raise ValueError(
            f"`{name}` must be probabilities in [0, 1]; received "
            f"{array[where]} at {place}. {remedy}"
        )
    if array.ndim > 1:
        worst = float(np.max(np.abs(array.sum(axis=-1) - 1.0)))
        if worst > _ROW_SUM_TOLERANCE:
            raise ValueError(
                f"The rows of `{name}` must sum to one; received rows that "
                f"are off by up to {worst:.3g}. {remedy}"
            )
    return array


def checked_labels(
    labels: npt.ArrayLike, predictions: np.ndarray
) -> np.ndarray:
    """Returns labels as int64 that fit checked predictions.

    Whole numbers, one for each row of the predictions.
    """
    array = np.asarray(labels)
    expected = predictions.shape[: max(1, predictions.ndim - 1)]
    num_classes = predictions.shape[-1] if predictions.ndim > 1 else 2
    if array.shape == (*expected, 1):
        array = array[..., 0]
    if array.shape != expected:
        raise ValueError(
            f"`labels` must have shape {expected} to fit the predictions; "
            f"received {array.shape}. One-hot labels: pass their argmax."
        )
    with np.errstate(invalid="ignore"):
        whole = array.astype(np.int64)
    if not ((whole == array) & (whole >= 0) & (whole < num_classes)).all():
        raise ValueError(
            f"`labels` must be whole numbers from 0 to {num_classes - 1}; "
            f"received values from {array.min()} to {array.max()}."
        )
    return whole


def accuracy(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Returns the share of examples whose likeliest class is the label.

    Args:
        labels: Whole numbers, `[...]` for predictions `[..., classes]`, or
            `[examples]` or `[examples, 1]` of 0 and 1 for a binary model.
        predictions: Probabilities; a binary one counts as "yes" above 0.5.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> accuracy([0, 1], [[0.9, 0.1], [0.8, 0.2]])
        0.5
    """
    checked = checked_probabilities(predictions, "predictions")
    truth = checked_labels(labels, checked)
    return float(np.mean(truth == _predicted_labels(checked)))


def log_loss(
    labels: npt.ArrayLike,
    predictions: npt.ArrayLike,
    *,
    epsilon: float = 1e-7,
) -> float:
    """Returns the mean of minus the log of the label's probability, in nats.

    Args:
        labels: As for `accuracy`.
        predictions: Probabilities, multi-class or binary.
        epsilon: Probabilities are kept in [epsilon, 1 - epsilon]. Default
            1e-7, as in Keras.

    Returns:
        A number >= 0.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> round(log_loss([1, 0], [0.5, 0.5]), 4)
        0.6931
    """
    checked = checked_probabilities(predictions, "predictions")
    truth = checked_labels(labels, checked)
    if checked.ndim == 1:
        chosen = np.where(truth == 1, checked, 1.0 - checked)
    else:
        chosen = np.take_along_axis(checked, truth[..., np.newaxis], axis=-1)
    return float(-np.mean(np.log(np.clip(chosen, epsilon, 1.0 - epsilon))))


def mean_absolute_churn(
    predictions: npt.ArrayLike, other_predictions: npt.ArrayLike
) -> float:
    """Returns how far two models' probabilities are apart, on average.

    Binary: the mean of |p - q|, the churn of Anil et al. 2018. Multi-class:
    the mean total variation distance, `sum_c |p_c - q_c| / 2`, which is the
    same number when a binary model is written with two classes.

    Args:
        predictions: Probabilities of one model.
        other_predictions: Those of the other, for the same examples.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: If shapes differ or values are not probabilities.

    Example:
        >>> round(mean_absolute_churn([0.2, 0.9], [0.3, 0.9]), 4)
        0.05
    """
    first, second = checked_pair(predictions, other_predictions)
    difference = np.abs(first - second)
    if first.ndim > 1:
        difference = 0.5 * difference.sum(axis=-1)
    return float(np.mean(difference))


def label_churn(
    predictions: npt.ArrayLike, other_predictions: npt.ArrayLike
) -> float:
    """Returns the share of examples that two models label differently.

    Args:
        predictions: Probabilities of one model.
        other_predictions: Those of the other, for the same examples.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: If shapes differ or values are not probabilities.

    Example:
        >>> label_churn([0.2, 0.9], [0.3, 0.4])
        0.5
    """
    first, second = checked_pair(predictions, other_predictions)
    return float(np.mean(_predicted_labels(first) != _predicted_labels(second)))


def prediction_difference(predictions: Sequence[npt.ArrayLike]) -> float:
    """Returns how far several retrains are from their mean, on average.

    The mean over examples and over the M models of `|p_m - mean p|`; with
    several classes the total variation distance stands for the difference, as
    in `mean_absolute_churn`.

    Args:
        predictions: One array of probabilities per model (a retrain).

    Raises:
        ValueError: If there are fewer than two models, or they do not fit.

    Example:
        >>> round(prediction_difference([[0.1, 0.4], [0.3, 0.4]]), 4)
        0.05
    """
    stacked = _stacked(predictions)
    return float(np.mean(_distances_to_mean(stacked)))


def relative_prediction_difference(
    predictions: Sequence[npt.ArrayLike],
    labels: npt.ArrayLike | None = None,
) -> float:
    """Returns `prediction_difference` per unit of the predicted probability.

    The mean over examples of `mean_m |p_m - mean p| / mean p`. With several
    classes p is the probability of the example's label.

    Args:
        predictions: One array of probabilities per model (a retrain).
        labels: Whole numbers, `[...]` for predictions `[..., classes]`; not
            needed for a binary model.

    Raises:
        ValueError: If there are fewer than two models, or shapes do not fit.

    Example:
        >>> round(relative_prediction_difference([[0.1, 0.4], [0.3, 0.4]]), 4)
        0.25
    """
    stacked = _stacked(predictions)
    if stacked.ndim > 2:
        truth = checked_labels([] if labels is None else labels, stacked[0])
        chosen = np.broadcast_to(truth, stacked.shape[:-1])[..., np.newaxis]
        stacked = np.take_along_axis(stacked, chosen, axis=-1)[..., 0]
    mean = np.maximum(stacked.mean(axis=0), np.finfo(np.float64).tiny)
    return float(np.mean(_distances_to_mean(stacked) / mean))


def _check_several(predictions: Sequence[npt.ArrayLike]) -> None:
    if len(predictions) < 2:
        raise ValueError(
            "A comparison needs the predictions of at least two models; "
            f"received {len(predictions)}. Pass a list with one array each."
        )


def _stacked(predictions: Sequence[npt.ArrayLike]) -> np.ndarray:
    _check_several(predictions)
    first = predictions[0]
    return np.stack([checked_pair(other, first)[0] for other in predictions])


def _distances_to_mean(stacked: np.ndarray) -> np.ndarray:
    """Mean over models of the distance to their mean, for each example."""
    differences = np.abs(stacked - stacked.mean(axis=0))
    if stacked.ndim > 2:
        differences = 0.5 * differences.sum(axis=-1)
    return differences.mean(axis=0)


def _predicted_labels(predictions: np.ndarray) -> np.ndarray:
    if predictions.ndim == 1:
        return (predictions > 0.5).astype(np.int64)
    return np.argmax(predictions, axis=-1)
