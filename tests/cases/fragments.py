"""Mixing by fragments: its groups, and the same in NumPy."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import mixing

_X, _Y = cases.data(16)
_OUTER = {"learning_rate": 0.7, "momentum": 0.6, "nesterov": True}
_CHUNK, _EVERY, _NUM = 4, 2, 2
NUM_EPOCHS = 12


def mixer(peers: Any = (), **kwargs: Any) -> mixing.FragmentMixer:
    """Sends a quarter of the numbers, of half of the variables."""
    options = {
        "rule": mixing.OuterOptimizer(keras.optimizers.SGD(**_OUTER)),
        "every_steps": _EVERY,
        "num_fragments": _NUM,
        "choose": tfdistill.contrib.TopOfChunks(chunk=_CHUNK),
        "peers": list(peers),
        **kwargs,
    }
    return mixing.FragmentMixer(options.pop("rule"), **options)


def train(
    directory: Any,
    group: int,
    *more: Any,
    mixer: Any,
    num_epochs: int = NUM_EPOCHS,
    model: Any = None,
    file_system: Any = None,
) -> tfdistill.CodistillModel:
    """Trains two steps an epoch, on this group's half of the rows."""
    model = model or cases.codistill(cases.deep(0))
    exporter = cases.exporter(
        tfdistill.Exchange(
            pathlib.Path(directory, "exchange"), file_system=file_system
        ),
        1000,
        group=group,
    )
    cases.fit(
        model,
        _X[group::2],
        _Y[group::2],
        batch_size=4,
        epochs=num_epochs,
        callbacks=[exporter, mixer, *more],
    )
    return model


def _as_sent(gradient: np.ndarray) -> np.ndarray:
    """What others get: of each four numbers the largest, in 8 bits."""
    flat = gradient.reshape(-1)
    found = np.zeros_like(flat)
    for start in range(0, flat.size, _CHUNK):
        largest = start + np.abs(flat[start : start + _CHUNK]).argmax()
        found[largest] = flat[largest]
    scale = np.abs(found).max() / np.float32(127)
    return (np.rint(found / scale) * scale).reshape(gradient.shape)


def by_hand() -> list[keras.Model]:
    """Two plain models in turns, mixed in NumPy; `deep` is cut by layers."""
    groups = [cases.deep(0) for _ in range(2)]
    for model in groups:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
    common = groups[0].get_weights()
    buffer = [np.zeros_like(a) for a in common]
    # The largest variable and the smallest, of 20, 15, 5 and 3 numbers.
    fragments, sent = [[0, 3], [2, 1]], None
    for epoch in range(NUM_EPOCHS):
        for group, model in enumerate(groups):
            x, y = _X[group::2], _Y[group::2]
            for half in (slice(4), slice(4, 8)):
                model.train_on_batch(x[half], y[half])
        values = [model.get_weights() for model in groups]
        for i in fragments[epoch % 2] if sent else ():
            mean = (sent[0][i] + sent[1][i]) / 2
            buffer[i] = 0.6 * buffer[i] - 0.7 * mean
            change = 0.6 * buffer[i] - 0.7 * mean
            common[i] = common[i] + change
            for own, c in zip(values, sent, strict=True):
                own[i] = own[i] + change + c[i]
        sent = [
            {i: _as_sent(common[i] - own[i]) for i in fragments[1 - epoch % 2]}
            for own in values
        ]
        for model, own in zip(groups, values, strict=True):
            model.set_weights(own)
    return groups
