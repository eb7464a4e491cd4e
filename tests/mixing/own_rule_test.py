"""A rule that is not the library's own is mixed by as any other is."""

import hashlib

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

_MOST = 0.01


class LimitedPull(tfdistill.mixing.Rule):
    """Moves weights towards the mean by at most so much, and counts mixes."""

    def __init__(self, most):
        self._most = most

    def start(self, weights):
        return [tf.zeros([])]

    def mixed(self, own, mean, state, *, num):
        pulled = [
            o + tf.clip_by_value(m - o, -self._most, self._most)
            for o, m in zip(own, mean, strict=True)
        ]
        return pulled, [state[0] + 1]


def test_a_rule_of_ones_own_needs_one_method(tmp_path):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    first, other = cases.deep(0), cases.deep(1)
    own, theirs = first.get_weights(), other.get_weights()
    digest = hashlib.sha256(b"".join(value.tobytes() for value in own))
    extras = {"initial_weights": digest.hexdigest()}
    cases.publish(exchange, other, group=1, step=2, extras=extras)
    # Its own training changes nothing.
    model = cases.codistill(first, optimizer=keras.optimizers.SGD(0.0))
    mixer = tfdistill.mixing.WeightMixer(
        LimitedPull(_MOST), every_steps=2, peers=[1], grace_secs=60.0
    )
    exporter = tfdistill.callbacks.StudentExporter(
        exchange, every_steps=2, group=0
    )
    x, y = cases.data(12)
    cases.fit(model, x, y, batch_size=4, callbacks=[exporter, mixer])
    assert [float(value) for value in mixer.variables] == [1.0]
    for found, a, b in zip(model.get_weights(), own, theirs, strict=True):
        way = np.clip((b - a) / 2, -_MOST, _MOST)
        np.testing.assert_allclose(found, a + way, atol=1e-6)
