"""What a workload is trained for, and by which figures it is judged."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any
from typing import Protocol

import keras
import numpy as np

from launch import predictions as predictions_lib
from launch import smoothing


class Objective(Protocol):
    """One kind of prediction."""

    def loss(self) -> keras.losses.Loss:
        """Returns the task's loss, of logits."""

    def smoothed_loss(
        self, weight: float, *, counts: np.ndarray | None, num_outputs: int
    ) -> keras.losses.Loss:
        """Returns the task's loss with smoothed labels.

        Args:
            weight: Share of the smoothing distribution in the target.
            counts: How often each label comes, for smoothing by those; None
                for smoothing by the uniform distribution.
            num_outputs: Of the student.
        """

    def metrics(self) -> list[Any]:
        """Returns what `fit` logs beside the loss; one is `log_loss`."""

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the `launch.predictions` of logits `[examples, ...]`."""


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
        prior = smoothing.distribution(
            none if counts is None else counts, num_outputs
        )
        return smoothing.SmoothedClasses(prior=prior, weight=weight)

    def metrics(self) -> list[Any]:
        """Returns accuracy, and the loss without regularization."""
        kind = keras.metrics.SparseCategoricalCrossentropy
        return ["accuracy", kind(from_logits=True, name="log_loss")]

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns the softmax, `[examples, classes]`."""
        return predictions_lib.Distributions(
            probabilities=softmax(logits), labels=labels
        )


class Tokens(Classes):
    """The next token of a text, at every place of a sequence."""

    def predictions(self, logits: np.ndarray, labels: np.ndarray) -> Any:
        """Returns what is kept of a softmax over a vocabulary."""
        flat = logits.reshape(-1, logits.shape[-1])
        chosen = softmax(flat)[np.arange(len(flat)), labels.reshape(-1)]
        return predictions_lib.LabelProbabilities(
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
        prior = 0.5 if counts is None else smoothing.distribution(counts, 2)[1]
        return smoothing.SmoothedClicks(prior=float(prior), weight=weight)

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
        # exp of a negative number alone: it cannot overflow.
        small = np.exp(-np.abs(flat))
        return predictions_lib.Distributions(
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
}


def of(data_name: str) -> Objective:
    """Returns the objective of a data set of `models`."""
    return OBJECTIVES[data_name]()
