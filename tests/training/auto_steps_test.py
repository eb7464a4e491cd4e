"""How many steps an execution gets, by clocks that are made up."""

import keras
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.training import auto_steps


def _found(secs, *, most=64, longest_secs=0.1, num_executions=2000):
    """What it settles on if executions of n steps take `secs(n)`."""
    time = 0.0
    found = auto_steps.AutoSteps(
        tf.distribute.get_strategy(),
        most=most,
        longest_secs=longest_secs,
        num_unsteady=2,
        clock=lambda: time,
    )
    found.set_model(tfdistill.DistributedModel(cases.linear()))
    found.model.compile("sgd", "mse")
    found.set_params({"steps": 10**9})
    found.on_train_begin()
    found.on_epoch_begin(0)
    done = 0
    for _ in range(num_executions):
        time += secs(found.count)
        done += found.count
        found.on_train_batch_end(done - 1)
    return found.count


@pytest.mark.parametrize(
    ("secs", "count"),
    [
        # What an execution costs by itself, and each of its steps.
        (lambda n: 1e-3 + 1e-6 * n, 64),
        (lambda n: 1e-3 + 4e-3 * n, 16),
        # The last that was tried stays, unless it is slower.
        (lambda n: 1e-5 + 1e-3 * n, 4),
        # Too long for callbacks, whatever is gained.
        (lambda n: 0.03 + 1e-6 * n, 1),
        # More steps are slower, as of a graph that is not in the caches.
        (lambda n: 1e-3 * n**1.2, 1),
    ],
)
def test_it_grows_while_steps_a_second_do(secs, count):
    assert _found(secs) == count


class _EachBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class _Says(_EachBatch):
    def __init__(self):
        super().__init__()
        self.seen = []

    def next_due(self, step):
        return (step // 151 + 1) * 151  # Steps go on in a second `fit`.

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch + 1)
        if batch + 1 == 151:
            self.model.stop_training = True


def _written(directory, num_steps):
    """What callbacks do in two trainings of 190 steps, and when."""
    model = tfdistill.DistributedModel(cases.linear())
    model.compile("sgd", "mse", steps_per_execution=num_steps)
    saved = []

    def save(*args, **kwargs):
        saved.append(int(model.optimizer.iterations))

    model.save = save
    says = _Says()
    data = tf.data.Dataset.from_tensors((tf.ones([2, 4]), tf.ones([2, 3])))
    callbacks = [
        keras.callbacks.ModelCheckpoint(directory / "a.keras", save_freq=100),
        keras.callbacks.TensorBoard(directory, update_freq=50),
        says,
    ]
    for _ in range(2):
        cases.fit(
            model, data.repeat(), steps_per_epoch=190, callbacks=callbacks
        )
    written = sorted(
        event.step
        for file in (directory / "train").glob("events.*")
        for event in tf.compat.v1.train.summary_iterator(str(file))
        for value in event.summary.value
        if value.tag == "batch_loss"
    )
    return saved, written, says.seen


def test_keras_callbacks_act_at_the_same_batches(tmp_path, monkeypatch):
    # It grows as soon as it can.
    monkeypatch.setattr(auto_steps, "_LEAST_SECS", 0.0)
    monkeypatch.setattr(auto_steps, "_LEAST_GAIN", 0.0)
    single, found = (_written(tmp_path / str(n), n) for n in (1, "auto"))
    assert found[:2] == single[:2]
    assert found[:2] == ([100, 200, 300], [50, 50, 100, 100, 150, 150])
    # Two trainings end where the user's own callback says.
    assert single[2] == [*range(1, 152)] * 2
    assert len(found[2]) < 150
    assert found[2].count(151) == 2
    assert max(found[2]) == 151
