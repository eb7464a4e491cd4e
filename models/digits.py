"""Handwritten digits: 1,797 real images that come with scikit-learn."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn import datasets
from sklearn import model_selection

from models import group_batches
from tfdistill import data as tfdistill_data

__all__ = ["build_model", "load", "make_datasets", "make_schema"]

INPUT_SHAPE = (8, 8)
NUM_CLASSES = 10
_BRIGHTEST = 16.0

Arrays = tuple[np.ndarray, np.ndarray]


def load(*, num_test: int = 500, split_seed: int = 0) -> tuple[Arrays, Arrays]:
    """Returns the images and labels of the training and of the test split.

    Both splits have the same mix of classes (to rounding).

    Args:
        num_test: Images in the test split; the rest is for training.
        split_seed: Chooses the split. Keep it fixed between runs that are to
            be compared: it is not the seed of a run.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images float32
        `[examples, 8, 8]` in [0, 1], labels int64 `[examples]`.

    Raises:
        ValueError: If a split would hold fewer images than classes.
    """
    digits = datasets.load_digits()
    num_images = len(digits.target)
    if not NUM_CLASSES <= num_test <= num_images - NUM_CLASSES:
        raise ValueError(
            f"`num_test` must be from {NUM_CLASSES} to "
            f"{num_images - NUM_CLASSES}; received {num_test}."
        )
    x_train, x_test, y_train, y_test = model_selection.train_test_split(
        (digits.images / _BRIGHTEST).astype(np.float32),
        digits.target.astype(np.int64),
        test_size=num_test,
        random_state=split_seed,
        stratify=digits.target,
    )
    return (x_train, y_train), (x_test, y_test)


def make_datasets(
    cluster: tfdistill_data.GroupIdentity,
    *,
    global_batch_size: int,
    data: str = "disjoint",
    seed: int = 0,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    For the arguments see `models`. Elements are (images float32 `[batch, 8,
    8]`, labels int64 `[batch]`).
    """
    train, test = load()
    images, labels = tfdistill_data.shard_arrays(train, cluster, mode=data)
    batches = group_batches.shuffled_indices(
        len(labels),
        cluster,
        global_batch_size=global_batch_size,
        seed=seed,
        examples="images",
    )
    images, labels = tf.constant(images), tf.constant(labels)

    def gather(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(images, indices), tf.gather(labels, indices)

    train_batches = batches.map(gather).prefetch(tf.data.AUTOTUNE)
    validation = tf.data.Dataset.from_tensor_slices(test)
    return train_batches, validation.batch(global_batch_size)


def make_schema(**arguments: Any) -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups."""
    return {
        "labels": list(range(NUM_CLASSES)),
        "preprocessing": {"shape": INPUT_SHAPE, "divided_by": _BRIGHTEST},
    }


def build_model(
    *,
    hidden_sizes: Sequence[int] = (128, 64),
    dropout: float = 0.0,
    name: str = "digits",
) -> keras.Model:
    """Returns a small fully connected classifier.

    Args:
        hidden_sizes: Units of each hidden ReLU layer. Default (128, 64).
        dropout: Rate after each hidden layer, in [0, 1). Default 0.
        name: Name of the model.

    Returns:
        A model from images `[batch, 8, 8]` to float32 logits `[batch, 10]`.
    """
    inputs = keras.Input(INPUT_SHAPE, name="image")
    x = keras.layers.Flatten()(inputs)
    for size in hidden_sizes:
        x = keras.layers.Dense(size, activation="relu")(x)
        if dropout:
            x = keras.layers.Dropout(dropout)(x)
    # float32 even under a mixed policy: losses want exact logits.
    logits = keras.layers.Dense(NUM_CLASSES, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name=name)
