"""Peers that send what they predict of the same batch, in the same step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import mutual_learning
from tests.cases import tiers
from tests.cases import waits
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.labels import forms

_X, _Y = cases.data(32)


def _cluster(tmp_path, num_groups=2):
    return tfdistill.Cluster(num_groups=num_groups, exchange=str(tmp_path))


def _model(cluster, strategy=None, **kwargs):
    strategy = strategy or tf.distribute.get_strategy()
    strategy_lib._CLUSTERS[strategy] = cluster
    with strategy.scope():
        return mutual_learning.model(cluster, **kwargs)


def _fit(model, **kwargs):
    return model.fit(
        mutual_learning.data(),
        **{
            "steps_per_epoch": mutual_learning.NUM_STEPS,
            "verbose": 0,
            "callbacks": [cases.never()],
            **kwargs,
        },
    )


@pytest.mark.parametrize(
    ("num_groups", "form"), [tiers.deep(2, None), (3, forms.Form(top_k=3))]
)
def test_groups_learn_as_models_in_one_process(tmp_path, num_groups, form):
    cluster = _cluster(tmp_path, num_groups)
    model = _model(cluster, encoding=form)
    # Several steps in an execution, several executions in a training.
    model.steps_per_execution = 5
    expected = mutual_learning.expected(num_groups)
    with mutual_learning.numpy_peers(cluster, is_whole=form is None) as peers:
        _fit(model, steps_per_epoch=10, epochs=2)
    # Top classes are log-probabilities, which float32 rounds otherwise.
    atol = 1e-6 if form is None else 1e-5
    found = [model.get_weights(), *peers]
    cases.assert_close(found, expected, rtol=0, atol=atol)
    for teacher in model.teachers.status():
        assert (teacher["num_answers"], teacher["num_missed"]) == (20, 0)
        assert (teacher["health"], teacher["step"]) == ("good", 19)
        assert teacher["num_quarantined"] == 0
        assert 0 < teacher["last_bytes"] == teacher["bytes"] / 20


@pytest.mark.deep
def test_two_replicas_learn_from_their_counterparts(tmp_path, two_replicas):
    cluster = _cluster(tmp_path)
    model = _model(cluster, two_replicas)
    with mutual_learning.numpy_peers(cluster, num_replicas=2):
        _fit(model)
    cases.assert_close(model, mutual_learning.expected(2)[0], atol=1e-6)
    (teacher,) = model.teachers.status()
    assert (teacher["num_answers"], teacher["num_missed"]) == (40, 0)


def test_a_peer_that_is_gone_and_back_teaches_while_it_is_there(tmp_path):
    cluster = _cluster(tmp_path)
    model = _model(cluster, wait_secs=0.01)
    # Of whole passes: the second one begins where the first has ended.
    _fit(model, steps_per_epoch=16)
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["num_missed"]) == ("absent", 16)
    assert "address is not known" in teacher["reason"]
    cases.assert_close(
        model, mutual_learning.expected(2, num_steps=16, alone=16)[0], atol=1e-6
    )
    # The same training goes on, and the peer is there: nobody waits for it
    # before it is found.
    mailbox = model.teachers._given[0].mailbox
    mailbox._wait_secs = 60.0

    def meet(logs):
        waits.until(lambda: not mailbox.peer(1).is_silent)

    met = keras.callbacks.LambdaCallback(on_train_begin=meet)
    with mutual_learning.numpy_peers(cluster, alone=16):
        _fit(model, callbacks=[cases.never(), met])
    cases.assert_close(
        model, mutual_learning.expected(2, num_steps=36, alone=16)[0], atol=1e-6
    )
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["age_steps"]) == ("good", 0)
    # It lives, and is too far behind to be of use.
    mailbox.peer(1).last_asked += 17
    (teacher,) = model.teachers.status()
    assert (teacher["health"], teacher["age_steps"]) == ("absent", None)
    assert "its last answer was for step 35" in teacher["reason"]


def test_rows_that_are_not_finite_are_left_out_alone(tmp_path):
    cluster = _cluster(tmp_path)
    model, alone = _model(cluster), cases.codistill(cases.linear())
    with mutual_learning.numpy_peers(cluster, factor=np.nan):
        _fit(model)
    _fit(alone, callbacks=[])
    cases.assert_close(model, alone, rtol=1e-6)
    (teacher,) = model.teachers.status()
    assert teacher["num_quarantined"] == 20
    assert teacher["refused"] == {"finite": 20}
    assert "must be finite" in teacher["quarantined"][19]


def test_xla_cannot_compile_what_the_groups_send_each_other(tmp_path):
    model = _model(_cluster(tmp_path))
    assert not model.jit_compile
    with pytest.raises(ValueError, match="XLA cannot compile"):
        model.compile(
            "sgd",
            "mse",
            distillation_loss=model.teachers.loss,
            jit_compile=True,
        )
