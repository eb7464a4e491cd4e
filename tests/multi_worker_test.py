"""Training on two replicas of one process, against plain Keras on one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import tiers
from tests.cases import training as training_cases
from tfdistill.training import guards

# Each takes several paths at once; the others are deep.
EVERY_RUN = {"momentum_clipped", "synchronized_normalization"}
TO_THE_BIT = {"momentum_clipped"}


def _one_device():
    return tf.distribute.get_strategy()


def _is_as_on_one_device(name, strategy):
    case = training_cases.CASES[name]
    actual = training_cases.run(case, strategy)
    expected = training_cases.reference(name)
    training_cases.assert_equal(actual, expected, case.tolerance)


@pytest.mark.parametrize(
    "name", tiers.but_for(EVERY_RUN, training_cases.PLACES["two_replicas"])
)
@pytest.mark.slow("a reference, and two replicas, are traced")
def test_two_replicas_train_as_keras_on_one_device(name, two_replicas):
    _is_as_on_one_device(name, two_replicas)


@pytest.mark.parametrize(
    "name", tiers.but_for(TO_THE_BIT, training_cases.PLACES["one_device"])
)
def test_one_device_is_keras_to_the_bit(name):
    actual = training_cases.run(training_cases.CASES[name], _one_device())
    for key, value in training_cases.reference(name).items():
        np.testing.assert_array_equal(actual[key], value, err_msg=key)


@pytest.mark.deep
def test_mixed_float16_scales_and_unscales_once(two_replicas):
    def optimizer():
        # From a scale at which nothing overflows: what a replica's own rows
        # add up to may stay in range where the whole batch does not.
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=64
        )

    case = training_cases.Case(policy="mixed_float16", optimizer=optimizer)
    results = [
        training_cases.run(case, _one_device(), is_reference=True),
        training_cases.run(case, two_replicas),
    ]
    training_cases.assert_equal(*results[::-1], tolerance=5e-3)


@pytest.mark.deep
def test_run_eagerly_gives_the_same(two_replicas):
    x, y = training_cases.regression(18)

    def train(strategy, run_eagerly):
        keras.utils.set_random_seed(2)
        with strategy.scope():
            model = training_cases.dense(training_cases.shared)
            model.compile("sgd", "mse", run_eagerly=run_eagerly)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        return model.get_weights()

    expected = train(_one_device(), False)
    for actual in (train(two_replicas, True), train(two_replicas, False)):
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_stop_in_mid_epoch_is_heeded(two_replicas):
    class StopAt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    with two_replicas.scope():
        model = training_cases.dense(training_cases.shared)
        model.compile("sgd", "mse")
    x, y = training_cases.regression(64)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[StopAt()])
    assert model.optimizer.iterations.numpy() == 2


class _Resolver:
    def __init__(self, task_type, task_id, jobs):
        self.task_type = task_type
        self.task_id = task_id
        self._jobs = jobs

    def cluster_spec(self):
        return tf.train.ClusterSpec(self._jobs)


class _Strategy:
    def __init__(self, *task):
        self.cluster_resolver = _Resolver(*task)


TWO = {"worker": ["a:1", "b:1"]}


def test_writers_run_on_the_chief_only(tmp_path):
    class OwnWriter(keras.callbacks.Callback):
        chief_only = True

    class Logger(keras.callbacks.CSVLogger):
        pass

    class Everywhere(keras.callbacks.CSVLogger):
        chief_only = False

    # As a tracker's package would define it, and a user's own class of it.
    tracker = type(
        "Metrics", (keras.callbacks.Callback,), {"__module__": "wandb.keras.x"}
    )
    own_tracker = type("Own", (tracker,), {"__module__": "__main__"})

    writers = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        Logger(tmp_path / "own.csv"),
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
        keras.callbacks.TensorBoard(tmp_path),
        OwnWriter(),
        tracker(),
        own_tracker(),
    ]
    others = [
        Everywhere(tmp_path / "each.csv"),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.ReduceLROnPlateau(),
        keras.callbacks.LambdaCallback(),
    ]
    chief, worker = _Strategy("worker", 0, TWO), _Strategy("worker", 1, TWO)
    assert guards.select(writers + others, chief) == writers + others
    assert guards.select(writers + others, worker) == others
