"""Versions that hold a running mean of the weights."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.cluster import replicas

_X, _Y = cases.data(48)
_DECAY = 0.75


class _Values(keras.callbacks.Callback):
    """The student's trained weights before training and after each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self):
        student = self.model.student
        self.seen.append([v.numpy() for v in student.trainable_variables])

    def on_train_begin(self, logs=None):
        if not self.seen:
            self._note()

    def on_train_batch_end(self, batch, logs=None):
        self._note()


def _expected(seen):
    mean = seen[0]
    for values in seen[1:]:
        pairs = zip(mean, values, strict=True)
        mean = [_DECAY * m + (1 - _DECAY) * v for m, v in pairs]
    return mean


def _exporter(exchange=None, **kwargs):
    return tfdistill.callbacks.StudentExporter(
        exchange or tfdistill.Exchange(None),
        every_steps=10**9,
        group=0,
        **{"ema_decay": _DECAY, **kwargs},
    )


def _student():
    """One with batch statistics, a counter and a weight that is frozen."""
    model = keras.Sequential(
        [
            keras.Input((cases.NUM_FEATURES,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.1, seed=1),
            keras.layers.Dense(5),
            keras.layers.Dense(cases.NUM_CLASSES),
        ]
    )
    cases.randomize(model, 0)
    model.layers[2].trainable = False
    return model


def _fit(model, *callbacks, **kwargs):
    arguments = {"batch_size": 8, "callbacks": list(callbacks), **kwargs}
    cases.fit(model, _X, _Y, **arguments)


def _assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def _mean(model):
    return [v.numpy() for v in model.codistillation.mean.variables]


def test_a_version_holds_the_mean_and_the_student_its_own_weights(tmp_path):
    exchange = tfdistill.Exchange(tmp_path)
    model, values = cases.codistill(_student()), _Values()
    _fit(model, _exporter(exchange), values, epochs=2)
    mean = _expected(values.seen)
    version = exchange.latest(0)
    loaded = tf.saved_model.load(version.path).model_variables
    trained = map(id, model.student.trainable_variables)
    wanted = dict(zip(trained, mean, strict=True))
    assert len(loaded) == len(model.student.variables)
    for found, variable in zip(loaded, model.student.variables, strict=True):
        value = wanted.get(id(variable), variable.numpy())
        np.testing.assert_allclose(found, value, rtol=1e-5)
        if id(variable) in wanted:
            assert not np.allclose(found, variable.numpy(), rtol=1e-3)
    assert version.manifest.extras["ema_decay"] == _DECAY
    # What others do with these versions does not change the training.
    plain = cases.codistill(_student())
    _fit(plain, epochs=2)
    _assert_close(model.get_weights(), plain.get_weights())


@pytest.mark.parametrize("jit_compile", [False, True])
def test_several_steps_an_execution_move_it_at_each(jit_compile):
    values, model = _Values(), cases.codistill(cases.deep())
    _fit(model, _exporter(), values)
    several = cases.codistill(
        cases.deep(), steps_per_execution=4, jit_compile=jit_compile
    )
    _fit(several, _exporter())
    _assert_close(_mean(several), _expected(values.seen))


def test_only_updates_of_the_weights_move_it():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    model = cases.codistill(cases.linear(), optimizer=optimizer)
    values = _Values()
    _fit(model, _exporter(), values)
    assert len(values.seen) == 7
    _assert_close(_mean(model), _expected(values.seen[::3]))


def test_replicas_have_the_mean_of_one_process(two_replicas):
    values = _Values()
    _fit(cases.codistill(cases.deep()), values, epochs=2)
    with two_replicas.scope():
        model = cases.codistill(cases.deep())
    _fit(model, _exporter(), epochs=2)
    expected = _expected(values.seen)
    means = map(
        two_replicas.experimental_local_results,
        model.codistillation.mean.variables,
    )
    for copies in zip(*means, strict=True):
        _assert_close(copies, expected)


def test_tables_have_a_mean(two_replicas):
    def made():
        ids = keras.Input((2,), dtype="int64")
        table = tfdistill.layers.ShardedEmbedding(6, 3, num_shards=2, seed=1)
        flat = keras.layers.Flatten()(table(ids))
        head = keras.layers.Dense(3, kernel_initializer="ones")
        return cases.codistill(keras.Model(ids, head(flat)))

    class Table(keras.callbacks.Callback):
        seen: list = []

        def on_train_batch_begin(self, batch, logs=None):
            if not self.seen:
                self._note()

        def on_train_batch_end(self, batch, logs=None):
            self._note()

        def _note(self):
            self.seen.append([self.model.graph.variables[0].value.numpy()])

    ids, y = np.arange(12).reshape(6, 2) % 6, np.arange(6) % 3
    note = Table()
    with two_replicas.scope():
        model = made()
    cases.fit(model, ids, y, batch_size=2, callbacks=[_exporter(), note])
    found = model.codistillation.mean.values(model.graph.variables)
    table = model.graph.variables[0]
    assert len(found) == 3 and tuple(found[id(table)].shape) == (6, 3)
    _assert_close([found[id(table)]], _expected(note.seen))


def test_a_resumed_training_has_the_same_mean(tmp_path):
    whole = cases.codistill(cases.linear())
    _fit(whole, _exporter(), epochs=3)

    def run(epochs):
        model = cases.codistill(cases.linear())
        backup = tfdistill.callbacks.Backup(tmp_path, every_steps=6)
        _fit(model, _exporter(), backup, epochs=epochs)
        return model, backup

    run(1)
    resumed, backup = run(3)
    assert backup.resumed_step == 6
    for found, wanted in zip(_mean(resumed), _mean(whole), strict=True):
        np.testing.assert_array_equal(found, wanted)
    # Without the mean there is a backup of another training.
    with pytest.raises(ValueError, match="StudentExporter/0"):
        _fit(
            cases.codistill(cases.linear()),
            tfdistill.callbacks.Backup(tmp_path),
            epochs=4,
        )


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="`ema_decay` must be None, or >= 0"):
        _exporter(ema_decay=1.0)
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    model = cases.codistill(cases.linear(), optimizer=optimizer)
    with pytest.raises(ValueError, match="use_ema=True.*Leave one"):
        _fit(model, _exporter())
    on_servers = mock.patch.object(replicas, "on_servers", lambda _: True)
    with on_servers, pytest.raises(ValueError, match="parameter servers"):
        _exporter().set_model(cases.codistill(cases.linear()))
