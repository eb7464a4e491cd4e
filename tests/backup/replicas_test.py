"""What a training keeps in Python, out and in again."""

import json
import random

import keras
import numpy as np

from tfdistill.backup import replicas


def test_generators_go_on(tmp_path):
    random.gauss(0, 1)
    np.random.normal()
    state = json.loads(json.dumps(replicas.of_random()))
    expected = [random.random(), random.gauss(0, 1), np.random.normal()]
    replicas.set_random(state)
    assert [random.random(), random.gauss(0, 1), np.random.normal()] == expected


def _plateau(wait=2):
    callback = keras.callbacks.ReduceLROnPlateau()
    callback.wait, callback.best = wait, 0.25
    return callback


def test_callbacks_count_on():
    stopping = keras.callbacks.EarlyStopping(patience=3)
    stopping.wait = 1
    before = [_plateau(), keras.callbacks.TerminateOnNaN(), stopping]
    state = json.loads(json.dumps(replicas.of_callbacks(before)))
    after = [
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.EarlyStopping(),
    ]
    assert replicas.set_callbacks(after, state)
    assert (after[0].wait, after[0].best) == (2, 0.25)
    assert (after[1].wait, after[1].best) == (1, stopping.best)
    assert type(after[0].wait) is int
