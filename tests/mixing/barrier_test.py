"""Groups that average their weights until a barrier lies between them."""

import logging
import math
import time

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tests.mixing import mixer_test as mixing_cases
from tfdistill import mixing
from tfdistill import schedules
from tfdistill.mixing import barrier as barrier_lib
from tfdistill.teachers import gates

_X, _Y = cases.data(16)


def _two_units(signs):
    """Says `x` by two hidden units; a permutation of them says the same."""
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


def _binary_loss(logits, labels):
    return np.mean(np.logaddexp(0, np.where(labels > 0, -logits, logits)))


def _watch(model, inputs, labels, **kwargs):
    model.compile(
        "sgd",
        keras.losses.BinaryCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
    )
    cases.prepare(model, inputs, labels)
    canary = tfdistill.Canary(inputs, labels=labels)
    barrier = schedules.MergeBarrier(canary=canary, **kwargs)
    return barrier_lib.BarrierWatch.of(barrier, model)


@pytest.mark.parametrize("margin", [0.0, 10.0])
def test_the_barrier_is_that_of_the_losses(margin):
    """Of a model and its twin with the two hidden units exchanged."""
    inputs = np.array([[-2.0], [-1.0], [1.0], [3.0]], "float32")
    labels = np.array([0, 0, 1, 1])
    model = tfdistill.CodistillModel(_two_units([1, -1]))
    watch = _watch(model, inputs, labels, margin=margin)
    twin = _two_units([-1, 1]).get_weights()
    # Each alone says 4 x; the mean of both says 0.
    mine = _binary_loss(4 * inputs[:, 0], labels)
    expected = [math.log(2), mine, mine]
    watch.take([twin])
    watch.examine()
    assert watch.num_compared == 1
    assert (watch.losses is None) == (margin == 10.0)
    if watch.losses:
        np.testing.assert_allclose(watch.losses, expected, rtol=1e-5)
    # Nothing more to look at, and nothing between equal versions.
    watch.losses = None
    watch.examine()
    watch.take([model.student.get_weights()] * 2)
    watch.examine()
    assert watch.num_compared == 2 and watch.losses is None


def test_where_the_loss_is_convex_there_is_no_barrier():
    model = tfdistill.CodistillModel(cases.linear(0, classes=1))
    watch = _watch(model, _X, _Y % 2)
    for seed in range(1, 9):
        watch.take([cases.linear(seed, classes=1).get_weights()])
        watch.examine()
    assert watch.num_compared == 8 and watch.losses is None


def test_a_mean_that_is_not_finite_is_a_barrier():
    model = tfdistill.CodistillModel(_two_units([1, -1]))
    watch = _watch(model, _X[:, :1], _Y % 2)

    class Faulty(gates.Canary):
        num_asked = 0

        def ask(self, *args):
            self.num_asked += 1
            if self.num_asked == 3:
                raise ValueError("NaN")
            return super().ask(*args)

    canary = Faulty(_X[:, :1], labels=_Y % 2)
    canary.settle(True, has_classes=True)
    watch._canary = canary
    watch.take([_two_units([1, -1]).get_weights()])
    watch.examine()
    assert watch.losses[0] == math.inf


class _Compared(keras.callbacks.Callback):
    """Gives the reading threads their time; notes what the teachers count."""

    def __init__(self, mixer):
        super().__init__()
        self._mixer, self.weights = mixer, []
        # Those before a resume.
        self._num_before: int | None = None

    def on_train_batch_begin(self, batch, logs=None):
        if self._num_before is None:
            self._num_before = self._mixer.num_mixes

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(float(logs["distillation_weight"]))
        mixer, watch = self._mixer, self._mixer._watch
        readers = [t.reader for t in self.model.teachers._teachers]
        if not mixer._is_over:
            readers += mixer._readers.values()
        deadline = time.monotonic() + cases.WAIT_SECS
        while (
            any(r.announced >= 0 and not r.state for r in readers)
            or watch.num_compared < mixer.num_mixes - self._num_before
        ):
            assert time.monotonic() < deadline
            time.sleep(0.002)


def _barrier(data, **kwargs):
    x, y = data
    canary = tfdistill.Canary(x, labels=y)
    return schedules.MergeBarrier(0.5, canary=canary, **kwargs)


def test_groups_that_begin_alike_are_averaged_to_the_end(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    barriers, mixers = [], []

    def train(group):
        barrier = _barrier(cases.data(32, seed=5))
        mixer = mixing_cases._mixer(
            exchange,
            peers=[1 - group],
            quorum="all",
            grace_secs=60.0,
            until=barrier,
        )
        barriers.append(barrier)
        mixers.append(mixer)
        compared = _Compared(mixer)
        model = cases.codistill(
            cases.deep(0),
            cases.teacher_set(exchange, [1 - group]),
            distillation_weight=barrier,
        )
        cases.fit(
            model,
            _X[group::2],
            _Y[group::2],
            batch_size=4,
            epochs=3,
            callbacks=[
                mixing_cases._exporter(exchange, group=group),
                mixer,
                tfdistill.TeacherLoader(every_steps=1),
                compared,
            ],
        )
        assert compared.weights == [0] * 6

    mixing_cases._together(lambda: train(0), lambda: train(1))
    assert [m.num_mixes for m in mixers] == [6, 6]
    assert [m._watch.num_compared for m in mixers] == [6, 6]
    assert not any(b.is_open for b in barriers)


_CLICKS = (
    np.array([[-2.0], [-1.0], [1.0], [3.0]], "float32"),
    np.array([0, 0, 1, 1]),
)


def _publish(exchange, student, step, **extras):
    digest = mixing_cases._digest(_two_units([1, -1]))
    cases.publish(
        exchange,
        student,
        step=step,
        spec=cases.input_spec(1),
        extras={"initial_weights": digest, **extras},
    )


def _trained(exchange, *callbacks, epochs, steps=2):
    """A group that hardly moves, beside versions of another."""
    barrier = _barrier(_CLICKS)
    mixer = mixing_cases._mixer(
        exchange, mixing.ModelAveraging(0.01), until=barrier
    )
    compared = _Compared(mixer)
    model = tfdistill.CodistillModel(
        _two_units([1, -1]), teachers=cases.teacher_set(exchange)
    )
    model.compile(
        keras.optimizers.SGD(1e-6),
        keras.losses.BinaryCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(),
        distillation_weight=barrier,
    )
    x, y = _CLICKS
    cases.fit(
        model,
        x,
        y[:, np.newaxis],
        batch_size=4 // steps,
        epochs=epochs,
        callbacks=[
            mixing_cases._exporter(exchange),
            mixer,
            tfdistill.TeacherLoader(every_steps=1),
            compared,
            *callbacks,
        ],
    )
    return barrier, mixer, compared


def test_groups_far_apart_distil_from_the_next_mix_on(tmp_path, caplog):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    _publish(exchange, _two_units([-1, 1]), 1)
    backup = tfdistill.Backup(tmp_path / "backup", every_steps=6)
    with caplog.at_level(logging.WARNING, logger="tfdistill.mixing"):
        barrier, mixer, compared = _trained(exchange, backup, epochs=3)
    # Mixed at step 2, when the version was read; compared; opened at step 3.
    assert (mixer.num_mixes, barrier.is_open) == (1, True)
    assert compared.weights == [0, 0, 0, 0.5, 0.5, 0.5]
    assert barrier.losses[0] > barrier.losses[1] + 0.5
    lines = [r.getMessage() for r in caplog.records]
    (line,) = [line for line in lines if "weights are not mixed" in line]
    assert line.startswith("Step 3:") and "0.69" in line
    extras = exchange.latest(0).manifest.extras
    assert extras["merge_barrier_open"] is True
    # It stays open, also in the process that resumes.
    backup = tfdistill.Backup(tmp_path / "backup", every_steps=6)
    again, mixer, compared = _trained(exchange, backup, epochs=5)
    assert backup.resumed_step == 6 and mixer.num_mixes == 1
    assert again.is_open and again.losses == pytest.approx(barrier.losses)
    assert len(compared.weights) == 4 and compared.weights[-1] == 0.5


def test_what_was_opened_is_repeated_at_the_same_step(tmp_path):
    """By a training that was stopped, and resumes before that."""
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    _publish(exchange, _two_units([-1, 1]), 1)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 5:
                raise InterruptedError

    def run(*more):
        backup = tfdistill.Backup(tmp_path / "backup", every_steps=2)
        return backup, *_trained(exchange, backup, *more, epochs=3)

    class Once(tfdistill.Backup):
        """One that is written at step 2 alone."""

        def _take(self, *args, **kwargs):
            if self.step == 2:
                super()._take(*args, **kwargs)

    with pytest.raises(InterruptedError):
        once = Once(tmp_path / "backup", every_steps=2)
        _trained(exchange, once, Stop(), epochs=3)
    backup, barrier, mixer, compared = run()
    assert backup.resumed_step == 2
    assert barrier.is_open and mixer.num_mixes == 1
    assert barrier.losses[0] == pytest.approx(math.log(2))
    assert compared.weights[0] == 0 and compared.weights[-1] == 0.5


def test_a_group_follows_another_that_mixes_no_more(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    near = _two_units([1, -1])
    _publish(exchange, near, 1, merge_barrier_open=True)
    barrier, mixer, compared = _trained(exchange, epochs=2)
    assert (mixer.num_mixes, barrier.is_open) == (0, True)
    assert barrier.losses is None and compared.weights[-1] == 0.5


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ValueError, match="`until` must be a .*MergeBarrier"):
        mixing_cases._mixer(tfdistill.Exchange(None), until=1.0)
    with pytest.raises(ValueError, match="`margin` must be a finite number"):
        schedules.MergeBarrier(canary=None, margin=-1)
    model = cases.codistill(cases.linear())
    cases.prepare(model, _X, _Y)
    for canary in (None, tfdistill.Canary(_X)):
        barrier = schedules.MergeBarrier(canary=canary)
        with pytest.raises(ValueError, match="must have labels"):
            barrier_lib.BarrierWatch.of(barrier, model)
