"""What a student predicts for the validation data, as it is kept on disk.

Every figure of a report can be made again from these files. Imports neither
TensorFlow nor Keras.
"""

import io
import itertools
import os
import pathlib
from collections.abc import Sequence
from typing import Any
from typing import Self

import numpy as np

from tfdistill import metrics as metrics_lib
from tfdistill.system import run_files

FILE = "predictions.npz"
# Where `HeldOutPredictions` writes, in a group's directory.
DIRECTORY = "held_out"


class Predictions:
    """Arrays `[examples, ...]` by name, as the file holds them."""

    # Name of the array that several models are compared by.
    _compared = ""

    def __init__(self, **arrays: np.ndarray) -> None:
        self._arrays = arrays
        self.labels = arrays["labels"]

    @property
    def compared(self) -> np.ndarray:
        """What models are compared by: probabilities, or numbers."""
        return self._arrays[self._compared]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns what the file holds, by name."""
        return dict(self._arrays)

    def kept(self, rows: np.ndarray) -> Self:
        """Returns the same for some examples only, by a bool for each."""
        return type(self)(**{n: a[rows] for n, a in self._arrays.items()})

    @classmethod
    def mean(cls, members: Sequence[Self]) -> Self:
        """Returns the predictions of an ensemble: the means of its members'."""
        _check_labels(members)
        stacked = np.stack([member.compared for member in members])
        arrays = {cls._compared: stacked.mean(axis=0)}
        return cls(**arrays, labels=members[0].labels)


class Distributions(Predictions):
    """The probability of each class, or of a click.

    `probabilities` are `[examples, classes]`, or of clicks `[examples]`.
    """

    _compared = "probabilities"

    @property
    def probabilities(self) -> np.ndarray:
        """The probabilities of each class, or of a click."""
        return self.compared

    def figures(self) -> dict[str, float]:
        """Returns log loss and accuracy; of clicks `click_quality`."""
        pair = (self.labels, self.probabilities)
        if self.probabilities.ndim == 1:
            return metrics_lib.click_quality(*pair)
        return metrics_lib.quality(*pair)

    def churn(self, other: "Distributions") -> dict[str, float]:
        """Returns mean absolute churn and label churn."""
        _check_labels([self, other])
        return metrics_lib.churn(self.compared, other.compared)

    @classmethod
    def spread(cls, retrains: Sequence[Self]) -> dict[str, float]:
        """Returns the prediction difference, absolute and relative."""
        found = [retrain.compared for retrain in retrains]
        return metrics_lib.spread(found, retrains[0].labels)


class LabelProbabilities(Predictions):
    """The probability of the true label only, and the likeliest label.

    For vocabularies too large to keep a probability of each word. All arrays
    are `[examples]`. An ensemble has no `predicted_labels`: its members'
    likeliest labels do not determine its own.
    """

    _compared = "label_probabilities"

    def figures(self) -> dict[str, float]:
        """Returns log loss (nats per label), perplexity and accuracy.

        An ensemble has no accuracy.
        """
        ones = np.ones(len(self.labels), np.int64)
        nats = metrics_lib.quality(ones, self.compared)["log_loss"]
        found = {"log_loss": nats, "perplexity": float(np.exp(nats))}
        predicted = self._arrays.get("predicted_labels")
        if predicted is not None:
            found["accuracy"] = float(np.mean(predicted == self.labels))
        return found

    def churn(self, other: "LabelProbabilities") -> dict[str, float]:
        """Returns the mean difference of the label's probability, and more.

        Label churn is left out if one of the two is an ensemble.
        """
        _check_labels([self, other])
        churn = metrics_lib.churn(self.compared, other.compared)
        found = {"churn": churn["churn"]}
        one, two = (x._arrays.get("predicted_labels") for x in (self, other))
        if one is not None and two is not None:
            found["label_churn"] = float(np.mean(one != two))
        return found

    @classmethod
    def spread(cls, retrains: Sequence[Self]) -> dict[str, float]:
        """Returns the prediction difference, absolute and relative."""
        return metrics_lib.spread([one.compared for one in retrains])


class Values(Predictions):
    """Numbers `[examples]`, as regressions predict them.

    Figures have no unit, whatever the labels' is: errors are shares of the
    labels' variance, and distances of their standard deviation.
    """

    _compared = "values"

    def figures(self) -> dict[str, float]:
        """Returns the unexplained variance, 1 - R2, and the absolute error."""
        errors = self.compared - self.labels
        return {
            "unexplained_variance": float(np.mean(errors**2))
            / float(np.var(self.labels)),
            "absolute_error": float(np.mean(np.abs(errors))) / self._unit,
        }

    def churn(self, other: "Values") -> dict[str, float]:
        """Returns the mean absolute difference."""
        _check_labels([self, other])
        apart = np.abs(self.compared - other.compared)
        return {"churn": float(np.mean(apart)) / self._unit}

    @classmethod
    def spread(cls, retrains: Sequence[Self]) -> dict[str, float]:
        """Returns the prediction difference: how far they are from the mean."""
        stacked = np.stack([retrain.compared for retrain in retrains])
        apart = np.abs(stacked - stacked.mean(axis=0))
        unit = retrains[0]._unit
        return {"prediction_difference": float(np.mean(apart)) / unit}

    @property
    def _unit(self) -> float:
        return float(np.std(self.labels))


_KINDS = Distributions, LabelProbabilities, Values


def save(path: pathlib.Path, predicted: Predictions) -> None:
    """Writes what a model predicts; `FILE` of a directory is what `read` reads.

    Refuses what is not finite: training has diverged.
    """
    arrays = predicted.arrays()
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise RuntimeError(
            "The student predicts NaN: its training has diverged. Lower "
            "learning_rate, or clip the gradients."
        )
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    run_files.write(path, [file.getvalue()])


def read(directory: str | os.PathLike[str]) -> Any:
    """Returns the predictions that a directory holds."""
    with np.load(os.path.join(directory, FILE)) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    (kind,) = (each for each in _KINDS if each._compared in found)
    return kind(**found)


def between(found: Sequence[Any]) -> dict[str, float]:
    """Returns how far several models are apart: the mean over their pairs.

    By measure, for predictions of the same examples; none for a single model.
    """
    return means(
        [one.churn(other) for one, other in itertools.combinations(found, 2)]
    )


def means(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each figure; none without any."""
    return {
        name: float(np.mean([one[name] for one in found]))
        for name in (found[0] if found else ())
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
