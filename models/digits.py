"""Handwritten digits: 1,797 real images that come with scikit-learn."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from sklearn import datasets
from sklearn import model_selection

import tfdistill

INPUT_SHAPE = (8, 8)
NUM_CLASSES = 10
_BRIGHTEST = 16.0
_NUM_TEST = 500

Arrays = tuple[np.ndarray, np.ndarray]


def load() -> tuple[Arrays, Arrays]:
    """Returns the images and labels of the training and of the test split.

    The split is always the same, and both parts have the same mix of classes
    (to rounding).

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images float32
        `[examples, 8, 8]` in [0, 1], labels int64 `[examples]`.
    """
    digits = datasets.load_digits()
    x_train, x_test, y_train, y_test = model_selection.train_test_split(
        (digits.images / _BRIGHTEST).astype(np.float32),
        digits.target.astype(np.int64),
        test_size=_NUM_TEST,
        random_state=0,
        stratify=digits.target,
    )
    return (x_train, y_train), (x_test, y_test)


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
