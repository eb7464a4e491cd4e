"""Checks of predicted probabilities, and of the labels that belong to them.

Plain NumPy on whole arrays.
"""

import numpy as np
import numpy.typing as npt

# Softmax in bfloat16 gives rows that miss one by some thousandths.
_ROW_SUM_TOLERANCE = 1e-2


def checked_pair(
    first: npt.ArrayLike, second: npt.ArrayLike
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two models' probabilities, for the same examples and classes.

    Raises:
        ValueError: If shapes differ or values are not probabilities.
    """
    one = checked(first, "predictions")
    other = checked(second, "other_predictions")
    if one.shape != other.shape:
        raise ValueError(
            "Both models must predict the same examples and classes; received "
            f"shapes {one.shape} and {other.shape}."
        )
    return one, other


def checked(predictions: npt.ArrayLike, name: str) -> np.ndarray:
    """Returns probabilities in one form.

    Args:
        predictions: Probabilities `[..., classes]`, or of "yes" `[examples]`
            or `[examples, 1]`.
        name: What a message calls them.

    Returns:
        float64 `[examples]` (binary) or `[..., classes]`.

    Raises:
        ValueError: If values are not probabilities, or there are none.
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

    Args:
        labels: Whole numbers, one for each row of the predictions.
        predictions: What `checked` has returned.

    Raises:
        ValueError: If shapes do not fit, or a label is no class.
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
