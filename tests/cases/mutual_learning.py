"""Deep Mutual Learning in one process: what groups that swap predictions equal.

Zhang et al. 2018, with the update of all models at once: each learns from what
the others predicted before the step. Linear models and plain SGD, in NumPy.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.labels import attached
from tfdistill.predictions import mailbox

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
    teachers = tfdistill.teachers.PeerPredictions(
        tfdistill.Exchange(cluster.exchange),
        peers=cluster.peers,
        wait_secs=wait_secs,
        **kwargs,
    )
    return cases.codistill(
        cases.linear(cluster.group),
        teachers,
        optimizer=keras.optimizers.SGD(RATE),
    )


def _batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    first = step * BATCH_SIZE % len(_X)
    return _X[first:][:BATCH_SIZE], _Y[first:][:BATCH_SIZE]


def _weights(group: int) -> list[np.ndarray]:
    return [w.astype("float64") for w in cases.linear(group).get_weights()]


def _updated(
    weights: list[np.ndarray], step: int, others: list[np.ndarray]
) -> list[np.ndarray]:
    """A model's weights after a step in which others said so."""
    x, y = _batch(step)
    own = cases.softmax(x @ weights[0] + weights[1])
    slope = own - np.eye(cases.NUM_CLASSES)[y]
    if others:
        slope = slope + own - np.mean(others, axis=0)
    slope = slope / BATCH_SIZE
    return [weights[0] - RATE * x.T @ slope, weights[1] - RATE * slope.sum(0)]


def expected(
    num_groups: int, *, num_steps: int = NUM_STEPS, alone: int = 0
) -> list[list[np.ndarray]]:
    """The weights of all models after some steps.

    In the first `alone` of these, nobody learns from anybody.
    """
    weights = [_weights(group) for group in range(num_groups)]
    for step in range(num_steps):
        x, _ = _batch(step)
        said = [cases.softmax(x @ w + b) for w, b in weights]
        weights = [
            _updated(
                own,
                step,
                [p for g, p in enumerate(said) if g != group and step >= alone],
            )
            for group, own in enumerate(weights)
        ]
    return weights


@contextlib.contextmanager
def numpy_peers(
    cluster: tfdistill.Cluster, *, num_replicas: int = 1, **kwargs: Any
) -> Iterator[list[list[np.ndarray]]]:
    """The other groups, as models in NumPy with mailboxes.

    The list has their weights when the block has ended.
    """
    found: list[Any] = [None] * len(cluster.peers)
    boxes = [
        mailbox.Mailbox(
            tfdistill.Exchange(cluster.exchange),
            group=group,
            worker=0,
            replicas=tuple(range(num_replicas)),
            host="127.0.0.1",
            peers=[g for g in range(cluster.num_groups) if g != group],
            wait_secs=600.0,
        )
        for group in cluster.peers
    ]

    def train(index: int) -> None:
        found[index] = _train(
            boxes[index], cluster.peers[index], num_replicas, **kwargs
        )

    threads = [
        threading.Thread(target=train, args=[i]) for i in range(len(boxes))
    ]
    for box, thread in zip(boxes, threads, strict=True):
        box.start()
        thread.start()
    try:
        yield found
    finally:
        for box, thread in zip(boxes, threads, strict=True):
            thread.join(cases.WAIT_SECS)
            box.stop()


def _train(
    box: mailbox.Mailbox,
    group: int,
    num_replicas: int,
    *,
    is_whole: bool = True,
    alone: int = 0,
    factor: float = 1.0,
) -> list[np.ndarray]:
    weights = _weights(group)
    for step in range(alone):
        weights = _updated(weights, step, [])
    for step in range(alone, alone + NUM_STEPS):
        parts = np.split(_batch(step)[0], num_replicas)
        # As replicas step: all send before any waits.
        sent = [
            box.send(
                step=step,
                replica=replica,
                batch=attached.fingerprint(x).numpy().tobytes(),
                classes=[cases.NUM_CLASSES],
                arrays=_kept((x @ weights[0] + weights[1]) * factor, is_whole),
            )
            for replica, x in enumerate(parts)
        ]
        answers = [
            np.concatenate([_said(arrays) for arrays in of_peer])
            for of_peer in zip(*map(box.answers, sent), strict=True)
        ]
        weights = _updated(weights, step, answers)
    return weights


def _kept(logits: np.ndarray, is_whole: bool) -> list[np.ndarray]:
    if is_whole:
        return [logits.astype("float32")]
    classes = np.argsort(-logits).astype("int32")
    log_p = np.log(cases.softmax(logits)).astype("float32")
    return [classes, np.take_along_axis(log_p, classes, -1)]


def _said(arrays: tuple[np.ndarray, ...] | None) -> np.ndarray:
    if arrays is None:
        raise RuntimeError("a group did not answer.")
    if len(arrays) == 1:
        return cases.softmax(arrays[0].astype("float64"))
    classes, log_p = arrays
    p = np.zeros(log_p.shape)
    np.put_along_axis(p, classes, np.exp(log_p.astype("float64")), -1)
    return p
