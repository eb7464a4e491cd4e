"""Handwritten digits: 1,797 real images that come with scikit-learn."""

import importlib.util
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import tfdistill

INPUT_SHAPE = (8, 8)
NUM_CLASSES = 10
_BRIGHTEST = 16.0
_NUM_TEST = 500

Arrays = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Arrays, Arrays]:
    """Returns the images and labels of the training and of the test split.

    The split is always the same, and both parts have the same mix of classes
    (to rounding): it equals scikit-learn's `train_test_split` with
    `random_state=0`. Importing that takes longer than all the rest.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images float32
        `[examples, 8, 8]` in [0, 1], labels int64 `[examples]`.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError(
            'digits needs scikit-learn: pip install "tfdistill[compare]"'
        )
    folder = pathlib.Path(found.origin).parent / "datasets" / "data"
    table = np.loadtxt(folder / "digits.csv.gz", delimiter=",")
    images = (table[:, :-1].reshape(-1, *INPUT_SHAPE) / _BRIGHTEST).astype(
        np.float32
    )
    labels = table[:, -1].astype(np.int64)
    train, test = _split(labels)
    return (images[train], labels[train]), (images[test], labels[test])


def _split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of the training and of the test split."""
    rng = np.random.RandomState(0)
    counts = np.bincount(labels)
    num_train = _shares(counts, len(labels) - _NUM_TEST, rng)
    _shares(counts - num_train, _NUM_TEST, rng)  # It draws, too.
    train: list[int] = []
    test: list[int] = []
    for label, size in enumerate(num_train):
        rows = rng.permutation(np.flatnonzero(labels == label))
        train.extend(rows[:size])
        test.extend(rows[size:])
    return rng.permutation(train), rng.permutation(test)


def _shares(
    counts: np.ndarray, number: int, rng: np.random.RandomState
) -> np.ndarray:
    """Returns how many of each class are among a number of examples."""
    exact = counts / counts.sum() * number
    found = np.floor(exact)
    rest = exact - found
    for value in np.unique(rest)[::-1]:
        left = int(number - found.sum())
        if not left:
            break
        (equal,) = np.where(rest == value)
        found[rng.choice(equal, min(len(equal), left), replace=False)] += 1
    return found.astype(int)


def workload(
    learning_rate: float = 2e-3,
    batch_size: int = 64,
    num_steps: int = 1000,
    evaluate_every_steps: int = 100,
    hidden_sizes: Sequence[int] = (128, 64),
    burn_in_steps: int = 100,
    weight: float = 1.0,
    temperature: float = 1.0,
    every_steps: int = 25,
    refresh_every_steps: int = 5,
) -> tfdistill.Workload:
    """Returns a run on scikit-learn's digits, under a minute on 2 cores.

    Two groups share out 1,297 images of 8 x 8 pixels; 500 more are for
    validation.
    """
    return tfdistill.Workload(
        model=lambda: build_model(hidden_sizes=hidden_sizes),
        data=load(),
        schema=make_schema,
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        optimizer=lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
            from_logits=True, temperature=temperature
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
    )


def make_schema() -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups."""
    return {
        "labels": list(range(NUM_CLASSES)),
        "preprocessing": {"shape": INPUT_SHAPE, "divided_by": _BRIGHTEST},
    }


def build_model(
    *,
    hidden_sizes: Sequence[int] = (128, 64),
) -> keras.Model:
    """Returns a small fully connected classifier.

    Args:
        hidden_sizes: Units of each hidden ReLU layer. Default (128, 64).

    Returns:
        A model from images `[batch, 8, 8]` to float32 logits `[batch, 10]`.
    """
    inputs = keras.Input(INPUT_SHAPE, name="image")
    x = keras.layers.Flatten()(inputs)
    for size in hidden_sizes:
        x = keras.layers.Dense(size, activation="relu")(x)
    # float32 even under a mixed policy: losses want exact logits.
    logits = keras.layers.Dense(NUM_CLASSES, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="digits")
