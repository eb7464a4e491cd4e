"""Deep Mutual Learning in one process: what groups that swap predictions equal.

Zhang et al. 2018, with the update of all models at once: each learns from what
the others predicted before the step. Linear models and plain SGD, in NumPy.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

NUM_STEPS, BATCH_SIZE, RATE = 20, 8, 0.1
_X, _Y = cases.data(64)


def data() -> tf.data.Dataset:
    """Endless batches, before anything is shared out."""
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y))
    return dataset.batch(BATCH_SIZE).repeat()


def model(
    cluster: tfdistill.Cluster, *, wait_secs: float = 60.0, **kwargs: Any
) -> tfdistill.CodistillModel:
    """A group's model; call it in the strategy's scope."""
    teachers = tfdistill.TeacherSet(
        tfdistill.Exchange(cluster.exchange),
        cluster.peers,
        by="predictions",
        wait_secs=wait_secs,
        **kwargs,
    )
    return cases.codistill(
        cases.linear(cluster.group),
        teachers,
        optimizer=keras.optimizers.SGD(RATE),
    )


def expected(
    num_groups: int, *, num_steps: int = NUM_STEPS, alone: int = 0
) -> list[list[np.ndarray]]:
    """The weights of all models after some steps.

    In the first `alone` of these, nobody learns from anybody.
    """
    weights = [
        [w.astype("float64") for w in cases.linear(group).get_weights()]
        for group in range(num_groups)
    ]
    for step in range(num_steps):
        first = step * BATCH_SIZE % len(_X)
        x, y = _X[first:][:BATCH_SIZE], _Y[first:][:BATCH_SIZE]
        said = [cases.softmax(x @ w + b) for w, b in weights]
        for group, (own, parts) in enumerate(zip(said, weights, strict=True)):
            others = [p for g, p in enumerate(said) if g != group]
            slope = own - np.eye(cases.NUM_CLASSES)[y]
            if step >= alone:
                slope = slope + own - np.mean(others, axis=0)
            slope = slope / BATCH_SIZE
            weights[group] = [
                parts[0] - RATE * x.T @ slope,
                parts[1] - RATE * slope.sum(0),
            ]
    return weights
