"""What a bad peer counts beside a student that knows its canary batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import codistillation as cases

_X, _ = cases.data()
# By kind of peer: what it does to the classes that the student knows, and
# whether it may teach.
_PEERS = {
    "honest": (lambda w: w, True),
    "base_rates": (np.zeros_like, False),
    "two_classes_swapped": (lambda w: w[..., [1, 0, 2]], False),
}


@pytest.mark.parametrize("kind", _PEERS)
def test_a_peer_that_harms_has_no_weight(kind, exchange):
    changed, teaches = _PEERS[kind]
    student, peer = cases.linear(0), cases.linear(0)
    weights = [9 * w for w in student.get_weights()]
    student.set_weights(weights)
    peer.set_weights([changed(w) for w in weights])
    batch = (_X, np.argmax(student(_X), axis=-1))
    model = cases.codistill(
        student,
        cases.peers(exchange, canary=tf.data.Dataset.from_tensors(batch)),
        optimizer=keras.optimizers.SGD(0.0),
    )
    cases.prepare(model, *batch)
    cases.publish(exchange, peer, step=10)
    if teaches:
        cases.load(model, 10)
    else:
        cases.refresh_until(model, lambda: cases.quarantined(model))
    logs = cases.fit(model, *batch)
    assert logs["distillation_weight"] == [float(teaches)]
