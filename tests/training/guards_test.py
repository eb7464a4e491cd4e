"""Tests of what fit, evaluate and predict report, and when."""

import pathlib
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import waits
from tfdistill.cluster import signs
from tfdistill.training import guards

X, Y = np.ones((12, 3), "float32"), np.ones((12, 1), "float32")


def _listener(path):
    """A callback that notes what the task was last said to be at."""
    said = []

    def note(where):
        def call(*args, **kwargs):
            said.append((where, signs.read_progress(path).phase))

        return call

    return said, keras.callbacks.LambdaCallback(
        on_epoch_end=note("epoch end"),
        on_train_batch_begin=note("begin"),
        on_train_batch_end=note("end"),
        on_test_batch_begin=note("test begin"),
        on_test_batch_end=note("test end"),
    )


@pytest.fixture
def ready_path(tmp_path, monkeypatch):
    path = tmp_path / "0_worker_0"
    monkeypatch.setenv(signs.VARIABLE, str(path))
    signs.own.cache_clear()
    yield path
    signs.own.cache_clear()


@pytest.fixture
def model():
    result = tfdistill.CodistillModel(
        keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    )
    result.compile("sgd", "mse")
    return result


def test_each_phase_of_a_training_is_told(model, ready_path):
    said, listener = _listener(ready_path)
    model.fit(
        X,
        Y,
        batch_size=4,
        epochs=2,
        verbose=0,
        validation_data=(X, Y),
        validation_batch_size=6,
        callbacks=[listener],
    )
    steps = [("begin", signs.FIRST_STEP), ("end", signs.CALLBACKS)]
    steps += [("begin", signs.STEP), ("end", signs.CALLBACKS)] * 2
    evaluation = [
        ("test begin", signs.FIRST_EVALUATION_STEP),
        ("test end", signs.CALLBACKS),
        ("test begin", signs.EVALUATION_STEP),
        ("test end", signs.CALLBACKS),
    ]
    end = [("epoch end", signs.EPOCH_END)]
    assert said == (steps + evaluation + end) * 2
    # After it the user's own code may take any time.
    assert signs.read_progress(ready_path).phase == signs.IDLE


def test_a_training_that_raises_is_not_left_in_a_step(model, ready_path):
    def fail(batch, logs):
        raise KeyError("own code")

    callback = keras.callbacks.LambdaCallback(on_train_batch_begin=fail)
    with pytest.raises(KeyError):
        model.fit(X, Y, verbose=0, callbacks=[callback])
    assert signs.read_progress(ready_path).phase == signs.IDLE


def _hides_nan(x):
    """As ReLU does on some processors."""
    return tf.where(x > 0, x, 0.0)


@pytest.fixture(scope="module")
def hiding():
    """A model whose loss stays finite, and its first weights."""
    student = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4, activation=_hides_nan, name="hidden"),
            keras.layers.Dense(1),
        ]
    )
    model = tfdistill.CodistillModel(student)
    model.compile("sgd", "mse")
    return model, model.get_weights()


@pytest.mark.parametrize("where", ["epoch", "export", "backup"])
def test_weights_that_are_not_finite_end_the_training(
    tmp_path, exchange, where, hiding
):
    model, weights = hiding
    model.set_weights(weights)
    model.optimizer.iterations.assign(0)
    x = X.copy()
    x[5, 1] = np.nan
    other = {
        "epoch": keras.callbacks.Callback(),
        "export": tfdistill.callbacks.StudentExporter(
            exchange, every_steps=1, group=0
        ),
        "backup": tfdistill.callbacks.Backup(
            tmp_path / "backup", every_steps=1
        ),
    }[where]
    losses, is_late = [], where == "epoch"

    def note(batch, logs):
        losses.append(float(logs["loss"]))
        if not is_late:  # The threads that write are given time to look.
            time.sleep(0.05)

    at = "at the end of epoch 1" if is_late else r"at step \d+"
    with pytest.raises(
        RuntimeError, match=rf"weights must be finite.*hidden/kernel {at}"
    ):
        model.fit(
            np.tile(x, (40, 1)),
            np.tile(Y, (40, 1)),
            batch_size=6,
            verbose=0,
            callbacks=[
                other,
                keras.callbacks.LambdaCallback(on_train_batch_end=note),
            ],
        )
    # The loss hides it.
    assert np.isfinite(losses).all()
    assert (len(losses) == 80) == is_late


def _most_bytes() -> int:
    """Returns the most memory that this process has had since it was reset."""
    status = pathlib.Path("/proc/self/status").read_text("utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def test_a_large_table_is_looked_at_without_a_copy():
    """A server may have no room for one."""
    table = tfdistill.layers.ShardedEmbedding(2**21, 16, name="table")
    table.build()
    shard = table.shards[0].value
    # Since then TensorFlow copies the variable for whoever reads it.
    shard.scatter_sub(tf.IndexedSlices(tf.ones([1, 16]), [7]))
    model = keras.Sequential([table])
    model.distribute_strategy = tf.distribute.get_strategy()
    pathlib.Path("/proc/self/clear_refs").write_text("5", "utf-8")
    before = _most_bytes()
    assert guards.first_not_finite(model) is None
    num_bytes = 2**21 * 16 * 4
    assert _most_bytes() - before < num_bytes / 2
    shard.scatter_sub(tf.IndexedSlices([[float("nan")] * 16], [2**21 - 1]))
    assert guards.first_not_finite(model) == table.shards[0].path


@pytest.fixture
def watchdog(monkeypatch):
    """Makes a watchdog with that limit, and where it notes exit codes."""

    def make(limit_secs, ended, **options):
        monkeypatch.setenv("TFDISTILL_STALL_TIMEOUT_SECS", str(limit_secs))
        here = tf.distribute.get_strategy()
        made = guards.StepWatchdog(here, end=ended.append, **options)
        made.on_train_begin()
        return made

    return make


class _Rooted(keras.layers.Layer):
    """Its gradient is infinite, its output is not."""

    def call(self, x):
        return x + tf.sqrt(x - tf.stop_gradient(x))


def test_steps_that_a_loss_scale_leaves_out_are_told():
    layers = [keras.Input((4,)), keras.layers.Dense(1), _Rooted()]
    model = tfdistill.DistributedModel(keras.Sequential(layers))
    sgd = keras.optimizers.SGD()
    model.compile(keras.optimizers.LossScaleOptimizer(sgd, 8.0), "mse")
    before = model.get_weights()
    with pytest.warns(
        UserWarning, match="has fallen to 0.25 from 8: gradients"
    ):
        model.fit(np.ones([5, 4]), np.ones([5, 1]), batch_size=1, verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], before[0])


def test_silence_ends_the_process_with_an_explanation(watchdog, capfd):
    ended = []
    made = watchdog(0.1, ended)
    assert waits.until(lambda: ended)
    made.on_train_end()
    assert ended == [75]
    printed = capfd.readouterr().err
    assert "tfdistill: no step was finished in 0 s" in printed
    # Where each thread stands, to see what hangs.
    assert "test_silence_ends_the_process" in printed


def test_progress_keeps_it_quiet(watchdog, clock):
    ended = []
    made = watchdog(0.2, ended, clock=clock)
    for _ in range(30):
        clock.now += 0.15
        made.on_train_batch_end(0)
        time.sleep(0.01)
    assert not ended
    clock.now += 0.3
    assert waits.until(lambda: ended)
    made.on_train_end()
