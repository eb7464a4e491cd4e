"""Figures for models of clicks: how well they rank, and how well calibrated.

Plain NumPy on whole arrays: labels 0 or 1 and predicted probabilities, both
`[examples]` or `[examples, 1]`.
"""

import numpy as np
import numpy.typing as npt

from tfdistill import metrics


def log_loss(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Returns the mean of minus the log of what was predicted, in nats."""
    return metrics.quality(labels, predictions)["log_loss"]


def auc(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Returns the area under the ROC curve, exactly.

    That is the chance that a clicked example is ranked above one without a
    click; a tie counts one half (Hanley and McNeil 1982).

    Args:
        labels: 0 or 1, with at least one of each.
        predictions: Probabilities.

    Returns:
        A number from 0 to 1; 0.5 for a model that knows nothing.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> auc([0, 1, 0, 1], [0.1, 0.4, 0.4, 0.9])
        0.875
    """
    truth, probabilities = _checked(labels, predictions)
    num_clicks = int(truth.sum())
    num_others = len(truth) - num_clicks
    _check_both_classes(truth)
    _, places, counts = np.unique(
        probabilities, return_inverse=True, return_counts=True
    )
    # The mean rank of equal predictions, from 1.
    ranks = np.cumsum(counts) - (counts - 1) / 2
    above = ranks[places][truth == 1].sum() - num_clicks * (num_clicks + 1) / 2
    return float(above / (num_clicks * num_others))


def normalized_entropy(
    labels: npt.ArrayLike, predictions: npt.ArrayLike
) -> float:
    """Returns the log loss over that of always predicting the mean label.

    Comparable between data of different click rates (He et al. 2014,
    "Practical Lessons from Predicting Clicks on Ads at Facebook", section 3).

    Args:
        labels: 0 or 1, with at least one of each.
        predictions: Probabilities.

    Returns:
        A number >= 0; below 1 for a model that is better than the mean.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> normalized_entropy([0, 1], [0.5, 0.5])
        1.0
    """
    truth, probabilities = _checked(labels, predictions)
    _check_both_classes(truth)
    mean = np.full(len(truth), truth.mean())
    return log_loss(truth, probabilities) / log_loss(truth, mean)


def calibration(labels: npt.ArrayLike, predictions: npt.ArrayLike) -> float:
    """Returns the mean prediction over the mean label (He et al. 2014).

    Args:
        labels: 0 or 1, with at least one 1.
        predictions: Probabilities.

    Returns:
        A number >= 0; above 1 if more clicks are predicted than there are.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> calibration([0, 1], [0.5, 0.25])
        0.75
    """
    truth, probabilities = _checked(labels, predictions)
    if not truth.any():
        raise ValueError(
            "`labels` must hold a 1; received zeros only. Use more examples."
        )
    return float(probabilities.mean() / truth.mean())


def report(
    labels: npt.ArrayLike, predictions: npt.ArrayLike
) -> dict[str, float]:
    """Returns all figures of this module by name.

    Args:
        labels: 0 or 1, with at least one of each.
        predictions: Probabilities.

    Raises:
        ValueError: If shapes or values are not as above.

    Example:
        >>> sorted(report([0, 1], [0.25, 0.75]))
        ['auc', 'calibration', 'log_loss', 'normalized_entropy']
    """
    measures = (auc, calibration, log_loss, normalized_entropy)
    return {
        measure.__name__: measure(labels, predictions) for measure in measures
    }


def _checked(
    labels: npt.ArrayLike, predictions: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 `[examples]` twice."""
    # Its checks say what is wrong with either.
    metrics.quality(labels, predictions)
    shape = np.shape(predictions)
    if len(shape) > 1 and shape != (shape[0], 1):
        raise ValueError(
            "`predictions` must be the probabilities of a click, [examples] or "
            f"[examples, 1]; received shape {shape}. Of two classes, pass the "
            "second's."
        )
    return (
        np.asarray(labels, np.float64).reshape(-1),
        np.asarray(predictions).astype(np.float64).reshape(-1),
    )


def _check_both_classes(truth: np.ndarray) -> None:
    if truth.min() == truth.max():
        raise ValueError(
            f"`labels` must hold both 0 and 1; received {len(truth)} times "
            f"{truth[0]:.0f}. Use more examples."
        )
