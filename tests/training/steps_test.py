"""When callbacks that count steps are due, and what executions end at."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill.training import steps as steps_lib


class _Recorder(steps_lib.SteppedCallback):
    """Notes its own step and the optimizer's at each hook."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        actual = int(self.model.optimizer.iterations.numpy())
        self.seen.append((self.step, actual))


@pytest.mark.parametrize(
    "steps_per_execution", [3, *(tiers.deep(n) for n in (1, 50))]
)
def test_it_counts_what_was_done(steps_per_execution):
    x, y = cases.data(20)
    model = cases.codistill(
        cases.linear(), steps_per_execution=steps_per_execution
    )
    recorder = _Recorder()
    cases.fit(model, x, y, batch_size=2, epochs=3, callbacks=[recorder])
    assert recorder.seen
    for counted, actual in recorder.seen:
        assert counted == actual
    assert recorder.seen[-1] == (30, 30)


def test_batches_whose_gradients_are_accumulated_are_steps_too(tmp_path):
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = cases.codistill(
        cases.linear(),
        cases.peers(tfdistill.Exchange(tmp_path), [1]),
        optimizer=optimizer,
        distillation_weight=lambda step: tf.cast(step, tf.float32),
    )
    x, y = cases.data(20)
    seen, weights = [], []

    class Note(steps_lib.SteppedCallback):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            seen.append(self.step)
            weights.append(self.model.student.get_weights()[0])

    exchange = tfdistill.Exchange(tmp_path, max_to_keep=100)
    exporter = cases.exporter(exchange, 6)
    callbacks = [cases.never(), Note(), exporter]
    cases.fit(model, x, y, batch_size=2, epochs=2, callbacks=callbacks)
    assert seen == list(range(1, 21))
    assert int(model.optimizer.iterations.numpy()) == 6
    step = exchange.latest(0).step
    assert step == 20
    loaded = tf.saved_model.load(exchange.latest(0).path)
    np.testing.assert_array_equal(loaded.model_variables[0], weights[-1])


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (3, list(range(1, 10)), [3, 6, 9]),
        (10, [4, 8, 12, 16, 20], [12, 20]),
        (5, [3, 3, 7, 7, 20], [7, 20]),
    ],
)
def test_multiples_are_due_once(every, steps, expected):
    schedule = steps_lib.EverySteps(every)
    schedule.start(0)
    assert [step for step in steps if schedule.due(step)] == expected


def test_an_offset_comes_first():
    schedule = steps_lib.EverySteps(10, offset_steps=4)
    schedule.start(0)
    assert [s for s in range(1, 30) if schedule.due(s)] == [4, 14, 24]
    for begin, due in ((3, 4), (4, 14), (20, 24)):
        schedule.start(begin)
        found = [s for s in range(begin, 25) if schedule.due(s)]
        assert found[0] == due


@pytest.mark.parametrize("every", [0, 2.5, "3"])
def test_a_bad_interval_is_refused(every):
    with pytest.raises(ValueError, match="`every_steps` must be.*>= 1"):
        steps_lib.EverySteps(every)
