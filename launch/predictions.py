"""What a student predicts for the validation data, as it is kept on disk.

Every figure of a report can be made again from these files. Imports neither
TensorFlow nor Keras.
"""

import itertools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from models import click_metrics
from tfdistill import metrics as metrics_lib

FILE = "predictions.npz"


class Distributions:
    """The probability of each class, or of a click."""

    def __init__(self, *, probabilities: np.ndarray, labels: np.ndarray):
        """Keeps `[examples, classes]`, or of clicks `[examples]`."""
        self.probabilities = probabilities
        self.labels = labels

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns what the file holds, by name."""
        return {"probabilities": self.probabilities, "labels": self.labels}

    def figures(self) -> dict[str, float]:
        """Returns log loss and accuracy; of clicks those of `click_metrics`."""
        pair = (self.labels, self.probabilities)
        if self.probabilities.ndim == 1:
            return click_metrics.report(*pair)
        return metrics_lib.quality(*pair)

    def churn(self, other: "Distributions") -> dict[str, float]:
        """Returns mean absolute churn and label churn."""
        _check_labels([self, other])
        return metrics_lib.churn(self.probabilities, other.probabilities)

    @classmethod
    def mean(cls, members: Sequence["Distributions"]) -> "Distributions":
        """Returns the predictions of an ensemble: the mean probabilities."""
        _check_labels(members)
        stacked = np.stack([member.probabilities for member in members])
        return cls(probabilities=stacked.mean(axis=0), labels=members[0].labels)

    @classmethod
    def spread(cls, retrains: Sequence["Distributions"]) -> dict[str, float]:
        """Returns the prediction difference, absolute and relative."""
        found = [retrain.probabilities for retrain in retrains]
        return metrics_lib.spread(found, retrains[0].labels)


class LabelProbabilities:
    """The probability of the true label only, and the likeliest label.

    For vocabularies too large to keep a probability of each word.
    """

    def __init__(
        self,
        *,
        label_probabilities: np.ndarray,
        predicted_labels: np.ndarray | None,
        labels: np.ndarray,
    ):
        """Keeps the arrays, all `[examples]`.

        An ensemble has no `predicted_labels`: its likeliest label is not known
        from those of its members.
        """
        self.label_probabilities = label_probabilities
        self.predicted_labels = predicted_labels
        self.labels = labels

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns what the file holds, by name."""
        found = {
            "label_probabilities": self.label_probabilities,
            "labels": self.labels,
        }
        if self.predicted_labels is not None:
            found["predicted_labels"] = self.predicted_labels
        return found

    def figures(self) -> dict[str, float]:
        """Returns log loss (nats per label), perplexity and accuracy.

        An ensemble has no accuracy.
        """
        ones = np.ones(len(self.labels), np.int64)
        nats = metrics_lib.quality(ones, self.label_probabilities)["log_loss"]
        found = {"log_loss": nats, "perplexity": float(np.exp(nats))}
        if self.predicted_labels is not None:
            right = self.predicted_labels == self.labels
            found["accuracy"] = float(np.mean(right))
        return found

    def churn(self, other: "LabelProbabilities") -> dict[str, float]:
        """Returns the mean difference of the label's probability, and more.

        Label churn is left out if one of the two is an ensemble.
        """
        _check_labels([self, other])
        first, second = self.label_probabilities, other.label_probabilities
        found = {"churn": metrics_lib.churn(first, second)["churn"]}
        if self.predicted_labels is None or other.predicted_labels is None:
            return found
        differ = self.predicted_labels != other.predicted_labels
        return {**found, "label_churn": float(np.mean(differ))}

    @classmethod
    def mean(
        cls, members: Sequence["LabelProbabilities"]
    ) -> "LabelProbabilities":
        """Returns the predictions of an ensemble: the mean probabilities."""
        _check_labels(members)
        stacked = np.stack([member.label_probabilities for member in members])
        return cls(
            label_probabilities=stacked.mean(axis=0),
            predicted_labels=None,
            labels=members[0].labels,
        )

    @classmethod
    def spread(
        cls, retrains: Sequence["LabelProbabilities"]
    ) -> dict[str, float]:
        """Returns the prediction difference, absolute and relative."""
        found = [retrain.label_probabilities for retrain in retrains]
        return metrics_lib.spread(found)


def read(directory: str | os.PathLike[str]) -> Any:
    """Returns the predictions that a directory holds."""
    with np.load(os.path.join(directory, FILE)) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    if "probabilities" in found:
        return Distributions(**found)
    found.setdefault("predicted_labels", None)
    return LabelProbabilities(**found)


def between(found: Sequence[Any]) -> dict[str, float]:
    """Returns how far several models are apart: the mean over their pairs.

    By measure, for predictions of the same examples; none for a single model.
    """
    pairs = [
        one.churn(other) for one, other in itertools.combinations(found, 2)
    ]
    return {
        name: float(np.mean([pair[name] for pair in pairs]))
        for name in (pairs[0] if pairs else ())
    }


def concatenate(parts: Sequence[Any]) -> Any:
    """Returns one model's predictions for all examples of several parts."""
    arrays = [part.arrays() for part in parts]
    return type(parts[0])(
        **{
            name: np.concatenate([array[name] for array in arrays])
            for name in arrays[0]
        }
    )


def _check_labels(members: Sequence[Any]) -> None:
    for other in members[1:]:
        if not np.array_equal(members[0].labels, other.labels):
            raise ValueError(
                "Models are compared on the same examples in the same order; "
                "received predictions with different labels. Keep the split "
                "and the files of the validation data fixed between runs."
            )
