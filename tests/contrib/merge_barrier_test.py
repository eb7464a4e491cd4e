"""Groups that average their weights until a barrier lies between them."""

import logging
import math

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import waits
from tests.mixing import mixer_test as mixing_cases
from tfdistill import mixing
from tfdistill.contrib import merge_barrier

_X, _Y = cases.data(16)
_CLICKS = (
    np.array([[-2.0], [-1.0], [1.0], [3.0]], "float32"),
    np.array([[0.0], [0.0], [1.0], [1.0]], "float32"),
)


def _two_units(signs):
    """Says 4 x by two hidden units; a permutation of them says the same."""
    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(2, activation="relu", use_bias=False),
            keras.layers.Dense(1, use_bias=False),
        ]
    )
    signs = np.array(signs, "float32")
    model.set_weights([signs[np.newaxis], 4 * signs[:, np.newaxis]])
    return model


class _Compared(keras.callbacks.Callback):
    """Gives the reading threads their time; notes what the teachers count."""

    def __init__(self, barrier):
        super().__init__()
        self._barrier, self.weights = barrier, []
        # Those before a resume.
        self._num_before = None

    def on_train_batch_begin(self, batch, logs=None):
        if self._num_before is None:
            self._num_before = self._barrier.num_mixes

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(float(logs["distillation_weight"]))
        barrier = self._barrier
        followers = [] if barrier.is_over else barrier._followers.values()
        # Versions of before teach once it is open.
        taught = [t.follower for t in self.model.teachers if barrier.is_over]
        waits.until(
            lambda: (
                all(f.announced < 0 or f.state for f in followers)
                and all(f.current >= 0 or f.staged for f in taught)
                and barrier.num_compared >= barrier.num_mixes - self._num_before
            )
        )


def _publish(exchange, student, **extras):
    digest = mixing_cases._digest(_two_units([1, -1]))
    cases.publish(
        exchange,
        student,
        step=1,
        spec=cases.input_spec(1),
        extras={"initial_weights": digest, **extras},
    )


def _trained(exchange, *callbacks, epochs, margin=0.0):
    """A group that hardly moves, beside versions of another."""
    barrier = merge_barrier.MergeBarrier(
        mixing.ModelAveraging(0.01),
        every_steps=1,
        peers=[1],
        held_out=_CLICKS,
        margin=margin,
        weight=0.5,
    )
    compared = _Compared(barrier)
    model = cases.codistill(
        _two_units([1, -1]),
        cases.peers(exchange),
        optimizer=keras.optimizers.SGD(1e-6),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
        distillation_weight=barrier,
    )
    cases.fit(
        model,
        *_CLICKS,
        batch_size=2,
        epochs=epochs,
        callbacks=[
            cases.exporter(exchange),
            barrier,
            tfdistill.callbacks.TeacherLoader(every_steps=1),
            compared,
            *callbacks,
        ],
    )
    return barrier, compared


@pytest.mark.deep
def test_groups_far_apart_distil_from_the_next_mix_on(
    tmp_path, exchange, caplog, start_again
):
    _publish(exchange, _two_units([-1, 1]))
    backup = tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=6)
    with caplog.at_level(logging.WARNING, logger="tfdistill.contrib"):
        barrier, compared = _trained(exchange, backup, epochs=3)
    # Mixed at step 2, when the version was read; compared; opened at step 3.
    assert (barrier.num_mixes, barrier.is_over) == (1, True)
    # From then on, the version of before may teach once it is read.
    assert compared.weights[:3] == [0] * 3 and compared.weights[-1] == 0.5
    # Each alone says 4 x; the mean of both says 0.
    x, y = _CLICKS
    alone = np.mean(np.logaddexp(0, np.where(y > 0, -4 * x, 4 * x)))
    assert barrier.barrier == pytest.approx(math.log(2) - alone, rel=1e-4)
    assert "Step 3: from now on weights are not mixed" in caplog.text
    extras = exchange.latest(0).manifest.extras
    assert extras["merge_barrier_open"] is True
    # It stays open, also in the process that resumes.
    start_again()
    backup = tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=6)
    again, compared = _trained(exchange, backup, epochs=5)
    assert backup.resumed_step == 6 and again.num_mixes == 1
    assert again.is_over and again.barrier == pytest.approx(barrier.barrier)
    assert len(compared.weights) == 4 and compared.weights[-1] == 0.5


def test_a_margin_keeps_it_closed(exchange):
    _publish(exchange, _two_units([-1, 1]))
    barrier, compared = _trained(exchange, epochs=3, margin=10.0)
    assert (barrier.num_compared, barrier.is_over) == (1, False)
    assert compared.weights == [0] * 6


@pytest.mark.deep
def test_what_was_opened_is_repeated_at_the_same_step(
    tmp_path, exchange, caplog
):
    """By a training that was stopped, and resumes before that."""
    _publish(exchange, _two_units([-1, 1]))

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:
                raise KeyboardInterrupt

    class Once(tfdistill.callbacks.Backup):
        """One that is written at step 2 alone."""

        def _take(self, *args, **kwargs):
            if self.step == 2:
                super()._take(*args, **kwargs)

    with pytest.raises(KeyboardInterrupt):
        once = Once(tmp_path / "backup", every_steps=2)
        _trained(exchange, once, Stop(), epochs=3)
    backup = tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=2)
    caplog.clear()
    barrier, compared = _trained(exchange, backup, epochs=3)
    assert backup.resumed_step == 2
    assert barrier.is_over and barrier.num_mixes == 1
    assert "Step 3: from now on weights are not mixed" in caplog.text
    assert compared.weights[0] == 0 and compared.weights[-1] == 0.5


def test_a_group_follows_another_that_mixes_no_more(exchange):
    _publish(exchange, _two_units([1, -1]), merge_barrier_open=True)
    barrier, compared = _trained(exchange, epochs=2)
    assert (barrier.num_mixes, barrier.is_over) == (0, True)
    assert barrier.barrier is None and compared.weights[-1] == 0.5
