"""Rows fetched ahead: the training must be that of rows fetched in time."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import servers as cases
from tests.cases import tiers
from tests.cases import training as training_cases
from tfdistill.contrib import rows_ahead as rows_ahead_lib
from tfdistill.embedding import layer as embedding_layer


@pytest.fixture(autouse=True)
def _on_servers(monkeypatch):
    cases.pretend(monkeypatch)


def _ahead(num_batches):
    return rows_ahead_lib.RowsAhead(num_batches) if num_batches else None


def _fit(optimizer, *, rows_ahead, built=None):
    """Trains by 3 and 2 steps; returns weights and losses."""
    if built is None:
        built = cases.student(
            keras.layers.Dense(
                4, kernel_initializer=keras.initializers.GlorotUniform(seed=2)
            ),
            keras.layers.BatchNormalization(),
        )
    model = cases.model(
        built,
        optimizer,
        kind=cases.OnServers,
        steps_per_execution=3,
        rows_ahead=_ahead(rows_ahead),
    )
    history = model.fit(
        cases.batches().repeat(), steps_per_epoch=5, verbose=0, shuffle=False
    )
    return cases.weights(model), history.history["loss"]


_OPTIMIZERS = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
}


@functools.cache
def _in_time(optimizer):
    """What training comes to if no row is fetched ahead."""
    return _fit(_OPTIMIZERS[optimizer](), rows_ahead=0)


@pytest.mark.parametrize(
    ("optimizer", "rows_ahead"), [("adam", 2), tiers.deep("adagrad", 1)]
)
@pytest.mark.slow("two trainings on servers, each with two graphs of steps")
def test_one_worker_trains_the_same_to_the_bit(optimizer, rows_ahead):
    expected, losses = _in_time(optimizer)
    found, found_losses = _fit(_OPTIMIZERS[optimizer](), rows_ahead=rows_ahead)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_allclose(found_losses, losses, rtol=1e-6)


def test_steps_read_what_was_fetched_before_the_last_updates(monkeypatch):
    monkeypatch.setattr(rows_ahead_lib._Ahead, "updated", lambda *_: None)
    found, _ = _fit(_OPTIMIZERS["adam"](), rows_ahead=1)
    assert np.abs(found[0] - _in_time("adam")[0][0]).max() > 1e-4


@pytest.mark.deep
@pytest.mark.parametrize("rows_ahead", [tiers.deep(0), 1])
def test_a_frozen_table_stays_as_it_is(rows_ahead):
    student = cases.student()
    student.get_layer("table").trainable = False
    before = cases.weights(cases.model(student))
    after, _ = _fit(
        keras.optimizers.Adagrad(0.1), rows_ahead=rows_ahead, built=student
    )
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[1] - before[1]).max() > 1e-3


class IdsOfVectors(keras.Model):
    """Looks up ids that follow from other vectors, as far as it is trained."""

    def __init__(self):
        super().__init__()
        self.table = embedding_layer.ShardedEmbedding(50, 4, name="table")
        self.dense = keras.layers.Dense(1)

    def build(self, _):
        self.table.build()
        self.dense.build((None, 4))

    def call(self, inputs, training=None):
        vectors = self.table(inputs["ids"][:, 0])
        ids = keras.ops.cast(keras.ops.abs(vectors[:, 0]) * 10, "int64")
        return self.dense(self.table(ids))


class LookedUpAgain(cases.OnServers):
    """Looks up more in a step than in a call."""

    def train_step(self, data):
        self.student.get_layer("table")(data[0]["ids"])
        return super().train_step(data)


def test_what_cannot_be_known_ahead_is_refused():
    optimizer = keras.optimizers.Adagrad(0.1)
    with pytest.raises(ValueError, match="data that end"):
        cases.model(kind=cases.OnServers, rows_ahead=_ahead(1)).fit(
            cases.batches(), verbose=0
        )
    with pytest.raises(ValueError, match="depend on trained variables"):
        _fit(optimizer, rows_ahead=1, built=IdsOfVectors())
    for student, data, match in (
        (
            training_cases.dynamic_student(),
            training_cases.clicks(),
            "DynamicEmbedding",
        ),
        (
            training_cases.bag_student(),
            training_cases.bags(),
            "combine_on_servers",
        ),
    ):
        model = cases.model(
            student,
            kind=cases.OnServers,
            steps_per_execution=2,
            rows_ahead=_ahead(1),
        )
        with pytest.raises(ValueError, match=match):
            model.fit(_repeated(data), steps_per_epoch=2, verbose=0)
    with pytest.raises(ValueError, match="this step looks up 'table' again"):
        model = cases.model(
            kind=LookedUpAgain, steps_per_execution=2, rows_ahead=_ahead(1)
        )
        model.fit(cases.batches().repeat(), steps_per_epoch=2, verbose=0)
    with pytest.raises(ValueError, match=r"received 2. Pass RowsAhead\(2\)"):
        cases.model().compile("adagrad", "mse", rows_ahead=2)
    with pytest.raises(ValueError, match="`num_batches` must be >= 1"):
        rows_ahead_lib.RowsAhead(0)


def _repeated(data):
    return tf.data.Dataset.from_tensor_slices(data).batch(4).repeat()
