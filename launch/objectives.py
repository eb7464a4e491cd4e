"""What a workload is trained for, and by which figures it is judged."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol

import keras
import numpy as np

from tfdistill import click_metrics
from tfdistill import metrics


class Objective(Protocol):
    """One kind of prediction."""

    def loss(self) -> keras.losses.Loss:
        """Returns the task's loss, of logits."""

    def metrics(self) -> list[Any]:
        """Returns what `fit` logs beside the loss."""

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns float64 probabilities for logits `[examples, ...]`."""

    def figures(
        self, labels: np.ndarray, probabilities: np.ndarray
    ) -> dict[str, float]:
        """Returns the figures of one group's predictions by name."""


class Classes:
    """One of several classes."""

    def loss(self) -> keras.losses.Loss:
        """Returns the cross-entropy of integer labels."""
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def metrics(self) -> list[Any]:
        """Returns the accuracy."""
        return ["accuracy"]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns the softmax, `[examples, classes]`."""
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return shifted / shifted.sum(axis=-1, keepdims=True)

    def figures(
        self, labels: np.ndarray, probabilities: np.ndarray
    ) -> dict[str, float]:
        """Returns accuracy and log loss."""
        return {
            "accuracy": metrics.accuracy(labels, probabilities),
            "log_loss": metrics.log_loss(labels, probabilities),
        }


class Clicks:
    """A click, or none."""

    def loss(self) -> keras.losses.Loss:
        """Returns the binary cross-entropy."""
        return keras.losses.BinaryCrossentropy(from_logits=True)

    def metrics(self) -> list[Any]:
        """Returns the area under the ROC curve."""
        return [keras.metrics.AUC(from_logits=True, name="auc")]

    def probabilities(self, logits: np.ndarray) -> np.ndarray:
        """Returns the logistic function, `[examples]`."""
        flat = logits.reshape(-1)
        # exp of a negative number alone: it cannot overflow.
        small = np.exp(-np.abs(flat))
        return np.where(flat >= 0, 1.0, small) / (1.0 + small)

    def figures(
        self, labels: np.ndarray, probabilities: np.ndarray
    ) -> dict[str, float]:
        """Returns log loss, AUC, normalized entropy and calibration."""
        return click_metrics.report(labels, probabilities)


# The objective of each data set.
OBJECTIVES: Mapping[str, Callable[[], Objective]] = {
    "cifar10": Classes,
    "criteo": Clicks,
    "digits": Classes,
}


def of(data_name: str) -> Objective:
    """Returns the objective of a data set of `models`."""
    return OBJECTIVES[data_name]()
