"""Figures for reports: quality of one model, disagreement between several.

Plain NumPy on whole arrays of predictions. Predictions are probabilities,
either `[..., classes]` with rows that sum to one, or the probability of "yes"
of a binary model: `[examples]` or `[examples, 1]`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "calibration_curve",
    "calibration_offset",
    "churn",
    "click_quality",
    "distances",
    "divergence",
    "log_losses",
    "placements",
    "quality",
    "spread",
]

# Softmax in bfloat16 gives rows that miss one by some thousandths.
_ROW_SUM_TOLERANCE = 1e-2
# As in Keras: the least probability whose logarithm is taken.
_EPSILON = 1e-7


def _pair(
    first: npt.ArrayLike, second: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two models' probabilities, for the same examples and classes."""
    one = _probabilities(first, "predictions")
    other = _probabilities(second, "other_predictions")
    if one.shape != other.shape:
        raise ValueError(
            "Both models must predict the same examples and classes; received "
            f"shapes {np.shape(first)} and {np.shape(second)}."
        )
    return one, other


def _probabilities(predictions: npt.ArrayLike, name: str) -> np.ndarray:
    """Returns probabilities as float64 `[..., classes]`.

    Those of "yes" get the class "no" in front; `name` is what a message calls
    them.
    """
    array = np.asarray(predictions).astype(np.float64)
    if array.ndim == 0 or array.size == 0:
        raise ValueError(
            f"`{name}` must hold at least one example; received shape "
            f"{array.shape}."
        )
    remedy = "Apply softmax or sigmoid first if the model returns logits."
    in_range = (array >= 0) & (array <= 1 + 1e-6)  # Rounding of a softmax.
    if not in_range.all():
        where = np.unravel_index(int(np.argmin(in_range)), array.shape)
        place = tuple(int(index) for index in where)
        raise ValueError(
            f"`{name}` must be probabilities in [0, 1]; received "
            f"{array[where]} at {place}. {remedy}"
        )
    if _is_binary(array):
        yes = array.reshape(-1)
        return np.stack([1.0 - yes, yes], axis=-1)
    worst = float(np.max(np.abs(array.sum(axis=-1) - 1.0)))
    if worst > _ROW_SUM_TOLERANCE:
        raise ValueError(
            f"The rows of `{name}` must each sum to one; received rows that "
            f"are off by up to {worst:.3g}. {remedy}"
        )
    return array


def _is_binary(predictions: npt.ArrayLike) -> bool:
    shape = np.shape(predictions)
    return len(shape) == 1 or (len(shape) == 2 and shape[-1] == 1)


def _labels(labels: npt.ArrayLike, predictions: np.ndarray) -> np.ndarray:
    """Returns labels as int64 that fit checked predictions.

    Whole numbers, one for each row of the predictions.
    """
    array = np.asarray(labels)
    expected, num_classes = predictions.shape[:-1], predictions.shape[-1]
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


def quality(
    labels: npt.ArrayLike, predictions: npt.ArrayLike
) -> dict[str, float]:
    """Returns figures for the quality of a model's predictions.

    Args:
        labels: Whole numbers, `[...]` for predictions `[..., classes]`, or
            `[examples]` or `[examples, 1]` of 0 and 1 for a binary model.
        predictions: Probabilities; a binary one counts as "yes" above 0.5.

    Returns:
        `accuracy`, the share of examples whose likeliest class is the label;
        and `log_loss`, the mean of minus the log of the label's probability,
        in nats. Probabilities are kept in [1e-7, 1 - 1e-7], as in Keras.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> quality([0, 1], [[0.5, 0.5], [0.5, 0.5]])["accuracy"]
        0.5
        >>> round(quality([1, 0], [0.5, 0.5])["log_loss"], 4)
        0.6931
    """
    checked = _probabilities(predictions, "predictions")
    truth = _labels(labels, checked)
    return {
        "accuracy": float(np.mean(truth == checked.argmax(axis=-1))),
        "log_loss": float(np.mean(_nats(truth, checked))),
    }


def log_losses(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> np.ndarray:
    """Returns each example's log loss; `quality` has their mean.

    Args:
        labels: As for `quality`.
        predictions: Probabilities.

    Returns:
        Nats, float64 `[...]`, or `[examples]` for a binary model.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> log_losses([1, 0], [0.5, 0.75]).round(4)
        array([0.6931, 1.3863])
    """
    checked = _probabilities(predictions, "predictions")
    return _nats(_labels(labels, checked), checked)


def _nats(truth: np.ndarray, checked: np.ndarray) -> np.ndarray:
    chosen = np.take_along_axis(checked, truth[..., np.newaxis], axis=-1)
    return -np.log(np.clip(chosen[..., 0], _EPSILON, 1.0 - _EPSILON))


def click_quality(
    labels: np.ndarray, predictions: np.ndarray
) -> dict[str, float]:
    """Returns how well a binary model ranks, and how well calibrated it is.

    Normalized entropy is the log loss divided by the log loss of always
    predicting the mean label; calibration is the mean prediction divided by the
    mean label (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads
    at Facebook").

    Args:
        labels: 0 and 1, `[examples]`.
        predictions: Probabilities of 1, `[examples]`.

    Returns:
        `auc`, `calibration`, `log_loss` (nats) and `normalized_entropy`.

    Raises:
        ValueError: If all labels are the same, or one is not as above.

    Example:
        >>> found = click_quality(np.array([0, 1]), np.array([0.5, 0.25]))
        >>> found["auc"], found["calibration"]
        (0.0, 0.75)
    """
    log_loss = quality(labels, predictions)["log_loss"]
    rate = float(labels.mean())
    if not 0 < rate < 1:
        raise ValueError(
            "`labels` must hold both 0 and 1; received "
            f"{len(labels)} times {rate:.0f}. Use more examples."
        )
    least = quality(labels, np.full(len(labels), rate))["log_loss"]
    return {
        "auc": float(placements(labels, predictions)[labels == 1].mean()),
        "calibration": float(predictions.mean(dtype=np.float64) / rate),
        "log_loss": log_loss,
        "normalized_entropy": log_loss / least,
    }


def placements(labels: np.ndarray, predictions: np.ndarray) -> np.ndarray:
    """Returns the share of the other label's rows that each row is apart from.

    For a row of label 1 the share of rows of label 0 that are predicted lower,
    and the other way; of equal predictions half counts. The mean over either
    label is the area under the ROC curve (DeLong et al. 1988, "Comparing the
    Areas under Two or More Correlated ROC Curves").

    Args:
        labels: 0 and 1, both of them, `[examples]`.
        predictions: Any numbers, `[examples]`.

    Example:
        >>> placements(np.array([0, 1, 1]), np.array([0.3, 0.3, 0.8]))
        array([0.75, 0.5 , 1.  ])
    """
    is_one = labels == 1
    below = _ranks(predictions)
    for side in (is_one, ~is_one):
        below[side] = (below[side] - _ranks(predictions[side])) / (~side).sum()
    return np.where(is_one, below, 1 - below)


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns each value's place, from 1; equal ones share their mean place."""
    _, places, counts = np.unique(
        values, return_inverse=True, return_counts=True
    )
    return (np.cumsum(counts) - (counts - 1) / 2)[places]


def calibration_offset(
    labels: np.ndarray, predictions: np.ndarray
) -> tuple[float, float]:
    """Returns what all logits lack for a right mean prediction, and its error.

    "Calibration in the large" (Steyerberg 2019, "Clinical Prediction Models",
    chapter 15): 0 for a calibrated model, negative for one whose mean
    prediction is too high.

    Args:
        labels: 0 and 1, `[examples]`.
        predictions: Probabilities of 1, `[examples]`.

    Example:
        >>> offset, _ = calibration_offset(np.array([0, 1]), [0.2, 0.2])
        >>> round(offset, 4) == round(float(np.log(4)), 4)
        True
    """
    p = np.clip(np.asarray(predictions, np.float64), 1e-7, 1 - 1e-7)
    logits, offset = np.log(p / (1 - p)), 0.0
    # Labels of one kind only have no finite offset.
    for _ in range(20):
        p = 1 / (1 + np.exp(-np.clip(logits + offset, -30, 30)))
        curvature = max(float((p * (1 - p)).sum()), 1e-9)
        step = float((labels - p).sum()) / curvature
        offset += min(max(step, -1.0), 1.0)
    return offset, curvature**-0.5


def calibration_curve(
    labels: np.ndarray, predictions: np.ndarray, *, num_bins: int = 15
) -> list[tuple[float, float, int]]:
    """Returns mean prediction, mean label and examples of each bin.

    Args:
        labels: 0 and 1, `[examples]`.
        predictions: Probabilities of 1, `[examples]`.
        num_bins: Bins of equal size, by the prediction. Default 15.

    Example:
        >>> calibration_curve(np.array([0, 1]), np.array([0.5, 0.25]))
        [(0.25, 1.0, 1), (0.5, 0.0, 1)]
    """
    order = np.argsort(predictions, kind="stable")
    return [
        (float(predictions[r].mean()), float(labels[r].mean()), len(r))
        for r in np.array_split(order, num_bins)
        if len(r)
    ]


def churn(
    predictions: npt.ArrayLike, other_predictions: npt.ArrayLike
) -> dict[str, float]:
    """Returns how much two models' predictions differ.

    Args:
        predictions: Probabilities of one model.
        other_predictions: Probabilities of the other model, for the same
            examples.

    Returns:
        `churn`, the mean of |p - q| of Anil et al. 2018, for a binary model.
        Multi-class: the mean total variation distance, `sum_c |p_c - q_c| / 2`,
        which is the same number when a binary model is written with two
        classes. And `label_churn`, the share of examples that the two models
        label differently. Both are from 0 to 1.

    Raises:
        ValueError: If shapes differ or values are not probabilities.

    Example:
        >>> churn([0.25, 0.75], [0.5, 0.25])
        {'churn': 0.375, 'label_churn': 0.5}
    """
    first, second = _pair(predictions, other_predictions)
    changed = first.argmax(axis=-1) != second.argmax(axis=-1)
    return {
        "churn": float(np.mean(_distances(first, second))),
        "label_churn": float(np.mean(changed)),
    }


def distances(
    predictions: npt.ArrayLike, other_predictions: npt.ArrayLike
) -> np.ndarray:
    """Returns how far apart two models are on each example, as in `churn`.

    Args:
        predictions: Probabilities of one model.
        other_predictions: Probabilities of the other model, for the same
            examples.

    Returns:
        Float64 `[...]`, or `[examples]` for a binary model.

    Raises:
        ValueError: If shapes differ or values are not probabilities.

    Example:
        >>> distances([0.25, 0.75], [0.5, 0.25])
        array([0.25, 0.5 ])
    """
    return _distances(*_pair(predictions, other_predictions))


def divergence(
    predictions: npt.ArrayLike, other_predictions: npt.ArrayLike
) -> float:
    """Returns the mean KL divergence of two models, at temperature 1.

    Measures how close a student is to its teacher, whatever the temperature.

    Args:
        predictions: Probabilities of one model, as the teacher.
        other_predictions: Probabilities of the other model, for the same
            examples.

    Returns:
        The mean over examples of `sum_c p_c log(p_c / q_c)`, in nats.
        Probabilities q are kept in [1e-7, 1 - 1e-7].

    Raises:
        ValueError: If shapes differ or values are not probabilities.

    Example:
        >>> round(divergence([0.5, 0.5], [0.25, 0.5]), 4)
        0.0719
    """
    p, q = _pair(predictions, other_predictions)
    log_p = np.log(np.maximum(p, np.finfo(np.float64).tiny))
    log_q = np.log(np.clip(q, _EPSILON, 1.0 - _EPSILON))
    return float(np.mean((p * (log_p - log_q)).sum(axis=-1)))


def spread(
    predictions: Sequence[npt.ArrayLike],
    labels: npt.ArrayLike | None = None,
) -> dict[str, float]:
    """Returns how far several retrains of a model are from their mean.

    Args:
        predictions: One array of probabilities per model (a retrain).
        labels: Whole numbers, `[...]` for predictions `[..., classes]`; not
            needed for a binary model.

    Returns:
        `prediction_difference`, the mean over examples and over the M models
        of `|p_m - mean p|`; with several classes the total variation distance
        stands for the difference, as in `churn`. And
        `relative_prediction_difference`, the mean over examples of
        `mean_m |p_m - mean p| / mean p`; with several classes p is the
        probability of the example's label.

    Raises:
        ValueError: If there are fewer than two models, or shapes do not fit.

    Example:
        >>> found = spread([[0.1, 0.4], [0.3, 0.4]])
        >>> {name: round(value, 4) for name, value in found.items()}
        {'prediction_difference': 0.05, 'relative_prediction_difference': 0.25}
    """
    if len(predictions) < 2:
        raise ValueError(
            "A comparison needs the predictions of at least two models; "
            f"received {len(predictions)}. Pass a list with one array each."
        )
    first = predictions[0]
    stacked = np.stack([_pair(other, first)[0] for other in predictions])
    if _is_binary(first):
        labels = np.ones(stacked.shape[1:-1])
    truth = _labels([] if labels is None else labels, stacked[0])
    places = np.broadcast_to(truth, stacked.shape[:-1])[..., np.newaxis]
    chosen = np.take_along_axis(stacked, places, axis=-1)[..., 0]
    mean = chosen.mean(axis=0)
    relative = np.abs(chosen - mean).mean(axis=0)
    relative /= np.maximum(mean, np.finfo(np.float64).tiny)
    distances = _distances(stacked, stacked.mean(axis=0))
    return {
        "prediction_difference": float(np.mean(distances)),
        "relative_prediction_difference": float(np.mean(relative)),
    }


def _distances(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Total variation distances, for each example."""
    return 0.5 * np.abs(one - other).sum(axis=-1)
