"""Inputs from elsewhere: those that resume, and those that are told of."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import tiers
from tfdistill.backup import callback

service_lib = tf.data.experimental.service
_SIZE, _BATCH, _BACKUP_STEP = 20, 4, 7
X, Y = cases.data(_SIZE)


class Stopped(BaseException):
    """Ends a training as a fault would."""


@pytest.fixture
def service():
    """The address of a tf.data service with one worker, in this process."""
    dispatcher = service_lib.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    worker = service_lib.WorkerServer(
        service_lib.WorkerConfig(dispatcher_address=address)
    )
    yield dispatcher.target
    worker._stop()
    dispatcher._stop()


def _of_service(target):
    distribute = service_lib.distribute(
        processing_mode=service_lib.ShardingPolicy.OFF, service=target
    )
    # Keras would warn at the end of data whose size it does not know.
    data = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(_BATCH)
    return data.apply(distribute)


def _of_grain():
    import grain

    source = grain.MapDataset.source(range(_SIZE)).seed(7).shuffle()
    return source.map(lambda i: (X[i], Y[i])).repeat().batch(_BATCH)


def _plain():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(_BATCH)


def _shuffled(seed=None):
    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    return rows.shuffle(_SIZE, seed=seed).batch(_BATCH).prefetch(1)


class Batches(keras.utils.PyDataset):
    """Batches in a fixed order."""

    def __len__(self):
        return _SIZE // _BATCH

    def __getitem__(self, index):
        rows = slice(index * _BATCH, (index + 1) * _BATCH)
        return X[rows], Y[rows]


def _fit(x, directory, *, stops=False, **more):
    """The weights after two epochs of five steps, and where they resumed.

    If it stops, it does so after a backup in the second epoch.
    """
    keras.utils.set_random_seed(5)
    model = cases.codistill(
        cases.linear(), optimizer=keras.optimizers.Adam(0.05)
    )
    # One only: the next would be left out while this one is written.
    backup = tfdistill.callbacks.Backup(directory, every_steps=_BACKUP_STEP)

    def stop(batch, logs):
        if stops and int(model.optimizer.iterations.numpy()) > _BACKUP_STEP:
            raise Stopped

    watch = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    try:
        model.fit(x, epochs=2, verbose=0, callbacks=[backup, watch], **more)
    except Stopped:
        pass
    return model.student.get_weights(), backup.resumed_step


def _check_resumes(make, tmp_path, **more):
    whole, _ = _fit(make(), tmp_path / "whole", **more)
    _fit(make(), tmp_path / "cut", stops=True, **more)
    resumed, step = _fit(make(), tmp_path / "cut", **more)
    assert step == _BACKUP_STEP
    for found, wanted in zip(resumed, whole, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.deep
def test_a_data_service_of_one_worker_resumes(tmp_path, service):
    _check_resumes(lambda: _of_service(service), tmp_path, steps_per_epoch=5)


@pytest.mark.parametrize(
    ("make", "seeds", "warns"),
    [
        (lambda: _shuffled(seed=3), (None, None), False),
        (_shuffled, (None, None), True),
        (lambda: None, (None, 5), True),
        tiers.deep(_shuffled, (4, 4), False),
        tiers.deep(_shuffled, (4, 5), True),
        tiers.deep(lambda: _shuffled(seed=3), (4, 5), True),
        tiers.deep(_plain, (None, 5), False),
        tiers.deep(lambda: None, (4, 4), False),
    ],
)
def test_a_resume_warns_of_another_order_only(
    make, seeds, warns, tmp_path, caplog, monkeypatch
):
    """None are arrays, which Keras shuffles."""
    monkeypatch.setattr(keras.utils, "set_random_seed", lambda seed: None)
    for seed, stops in zip(seeds, (True, False), strict=True):
        tf.random.set_seed(seed)
        data = make()
        data = {"x": data} if data else {"x": X, "y": Y, "batch_size": _BATCH}
        *_, step = _fit(**data, directory=tmp_path, stops=stops)
    assert step == _BACKUP_STEP
    assert ("are shuffled without a seed" in caplog.text) == warns


def test_grain_resumes(tmp_path):
    grain = pytest.importorskip("grain")
    # By itself, it would read hundreds of batches ahead.
    reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    _check_resumes(
        lambda: _of_grain().to_iter_dataset(reading),
        tmp_path,
        steps_per_epoch=5,
        shuffle=False,
    )


def test_a_shuffled_pydataset_is_told_of(tmp_path, caplog):
    _check_resumes(Batches, tmp_path, shuffle=False)
    assert "PyDataset" not in caplog.text
    callback._check_order({"x": Batches()})
    assert "shuffles the batches of a PyDataset again" in caplog.text
