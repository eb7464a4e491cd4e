"""Tests of batches that follow the speeds of groups."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill.contrib import batch_scaler as batch_scaler
from tfdistill.training import steps

EVERY = 5
NO_EXCHANGE = tfdistill.Exchange(None)


def test_sizes_settle_where_all_groups_update_equally_often():
    speeds = np.array([1e3, 2e3, 4e3])
    rng, sizes, found = np.random.default_rng(0), [64] * 3, []
    for _ in range(60):
        # A step has costs of its own.
        measured = sizes / (0.002 + sizes / speeds)
        measured *= np.exp(0.02 * rng.normal(size=3))
        sizes = [
            batch_scaler.next_size(size, np.roll(measured, -g), start=64)
            for g, size in enumerate(sizes)
        ]
        found.append(sizes)
    rates = 1 / (0.002 + sizes / speeds)
    assert max(rates) / min(rates) < 1.15
    assert sum(sizes) == pytest.approx(64 * 3, rel=0.1)
    late = np.array(found[30:])
    assert (late.max(axis=0) / late.min(axis=0)).max() < 1.15


class Version:
    """What is looked at of a version."""

    def __init__(self, step, **extras):
        self.step, self.manifest, self.extras = step, self, extras


def test_speeds_are_without_waits_and_of_peers_that_publish(monkeypatch):
    now = [0.0]
    scaler = batch_scaler.BatchScaler(
        NO_EXCHANGE, batch_size=8, every_steps=EVERY, clock=lambda: now[0]
    )
    mixer = steps.Mixer()
    mixer.waits = types.SimpleNamespace(total_secs=0.0)
    scaler.meet([mixer])
    versions = {
        1: Version(5, examples_per_second=3.0),
        2: Version(5, examples_per_second="fast"),
        3: None,
    }
    monkeypatch.setattr(NO_EXCHANGE, "latest", versions.get)
    scaler._peers, scaler._measured = (1, 2, 3), (0, 0.0)
    scaler._look()
    scaler.step, now[0], mixer.waits.total_secs = 5, 30.0, 20.0
    assert scaler._speeds(5) == [4.0, 3.0]
    assert scaler.manifest_extras() == {"examples_per_second": 4.0}
    scaler.step, now[0] = 21, 50.0
    assert scaler._speeds(10)[1:] == []
    versions[1] = Version(2, examples_per_second=3.0)  # Resumed.
    scaler._look()
    now[0] = 60.0
    assert scaler._speeds(15)[1:] == [3.0]


def test_bounds_and_units_hold():
    def next_size(size, speed, **kwargs):
        return batch_scaler.next_size(size, [1.0, speed], start=64, **kwargs)

    assert next_size(20, 99.0) == 16
    assert next_size(64, 0.01) == 96  # A half more at a time,
    assert next_size(64, 9.0) == 43  # and a third less.
    assert next_size(64, 1.4, multiple_of=16) == 64
    assert next_size(64, 1.8, multiple_of=16) == 48


class Network(keras.Model):
    """A linear model that counts how often it is traced."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return self.dense(x)


def rows():
    """The n-th row holds n."""

    def row(number):
        x = tf.cast([number], tf.float32)
        return x, x / 100

    return tf.data.Dataset.range(10_000).map(row).repeat()


class Watch(keras.callbacks.Callback):
    """Notes what each step saw."""

    def __init__(self, scaler, stop_at=None):
        super().__init__()
        self.scaler, self.stop_at = scaler, stop_at
        self.examples, self.sizes, self.rates = [], [], []
        self.num_calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.sizes.append(self.scaler.batch_size)
        rate = self.model.optimizer.learning_rate
        self.rates.append(float(keras.ops.convert_to_numpy(rate)))

    def on_train_batch_end(self, batch, logs=None):
        self.examples.append(int(self.model.trainer.last.examples))
        self.num_calls.append(self.model.student.num_calls)
        if self.stop_at == batch + 1:
            self.model.stop_training = True


SIZES = [8] * 10 + [12] * 5 + [8] * 5 + [4] * 10


@pytest.fixture
def decisions(monkeypatch):
    """Has groups take 12, then 8, then 4 examples."""
    following = {8: iter([12, 4, 4, 4]), 12: iter([8])}
    monkeypatch.setattr(
        batch_scaler,
        "next_size",
        lambda size, *args, **kwargs: (
            next(following[size], size) if size in following else size
        ),
    )
    # As if there was a peer.
    monkeypatch.setattr(
        batch_scaler.BatchScaler, "_speeds", lambda self, done: [1.0, 1.0]
    )


def trained(strategy, *, backup=None, stop_at=None, schedule=None, **kwargs):
    """Runs 30 steps; returns the model and its `Watch`."""
    options = {"batch_size": 8, "every_steps": EVERY, **kwargs}
    scaler = batch_scaler.BatchScaler(NO_EXCHANGE, **options)
    rate = scaler.scaled(schedule or 1e-5)
    with strategy.scope():
        network = Network()
        model = tfdistill.CodistillModel(network)
        model.compile(keras.optimizers.SGD(rate), "mse")

    def batches(worker):
        part = rows().shard(
            worker.num_input_pipelines, worker.input_pipeline_id
        )
        return scaler.batched(part, worker).prefetch(2)

    watch = Watch(scaler, stop_at)
    callbacks = [scaler, watch]
    if backup:
        callbacks.append(tfdistill.callbacks.Backup(backup, every_steps=4))
    model.fit(
        batches, steps_per_epoch=30, epochs=1, callbacks=callbacks, verbose=0
    )
    return model, watch


def by_hand(schedule=lambda step: 1e-5):
    """Weights and rates after descent on these batches, rates in step."""
    weight = bias = 0.0
    first, found = 0, []
    for step, size in enumerate(SIZES):
        rate = float(schedule(step)) * size / 8
        x = np.arange(first, first + size, dtype="float64")
        error = weight * x + bias - x / 100
        weight -= rate * 2 * np.mean(error * x)
        bias -= rate * 2 * np.mean(error)
        first += size
        found.append(rate)
    return weight, bias, found


def weights(model):
    return [float(np.squeeze(weight)) for weight in model.student.get_weights()]


def test_a_size_changes_at_its_step_and_no_example_is_lost(
    decisions, two_replicas
):
    model, watch = trained(two_replicas)
    assert watch.sizes == watch.examples == SIZES
    weight, bias, rates = by_hand()
    np.testing.assert_allclose(watch.rates, rates, rtol=1e-5)
    np.testing.assert_allclose(weights(model), [weight, bias], rtol=1e-4)
    # Nothing is traced again for another size.
    assert len(set(watch.num_calls)) == 1


def test_a_schedule_follows_too_and_so_does_a_resumed_one(
    decisions, tmp_path, start_again
):
    schedule = keras.optimizers.schedules.CosineDecay(1e-5, 40)
    strategy = tf.distribute.get_strategy()
    _, first = trained(strategy, backup=tmp_path, stop_at=17, schedule=schedule)
    start_again()
    model, rest = trained(strategy, backup=tmp_path, schedule=schedule)
    weight, bias, rates = by_hand(schedule)
    np.testing.assert_allclose(first.rates + rest.rates, rates, rtol=1e-5)
    np.testing.assert_allclose(weights(model), [weight, bias], rtol=1e-4)
    # A copy that was loaded has the rates of the first size.
    config = keras.optimizers.serialize(model.optimizer)
    copy = keras.optimizers.deserialize(config)
    assert float(copy.learning_rate) == pytest.approx(1e-5)


def test_reading_too_far_ahead_is_an_error():
    scaler = batch_scaler.BatchScaler(NO_EXCHANGE, batch_size=8, every_steps=5)
    batches = iter(scaler.batched(rows()))
    assert [len(next(batches)[0]) for _ in range(10)] == [8] * 10
    with pytest.raises(tf.errors.InvalidArgumentError, match="less than"):
        next(batches)
