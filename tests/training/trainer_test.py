"""What replicas have each, what Keras makes late, and what is refused."""

import itertools
import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import servers as server_cases
from tests.cases import tiers
from tfdistill.training import trainer


def _student():
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dense(3),
        ]
    )


def _local(variable, strategy):
    values = strategy.experimental_local_results(variable.value)
    return [value.numpy() for value in values]


class _Before(keras.callbacks.Callback):
    """What each replica has when the last step has ended."""

    def on_train_batch_end(self, batch, logs=None):
        strategy = self.model.distribute_strategy
        found = self.model.student.layers[0].non_trainable_variables
        self.local = [_local(v, strategy) for v in found]


def test_replicas_get_the_mean_of_their_own_and_it_is_exported(
    two_replicas, exchange
):
    before = _Before()
    x, y = cases.data(16)
    x[8:] += 5.0  # The replicas see different rows.
    with two_replicas.scope():
        model = cases.codistill(_student())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    cases.fit(model, data, epochs=2, callbacks=[before])
    assert not np.allclose(*before.local[0])
    averaged = model.student.layers[0].non_trainable_variables
    for variable, (one, other) in zip(averaged, before.local, strict=True):
        for value in _local(variable, two_replicas):
            np.testing.assert_allclose(value, (one + other) / 2, rtol=1e-6)
    exporter = cases.exporter(exchange)
    cases.fit(model, data, callbacks=[exporter])
    np.testing.assert_array_equal(*_local(averaged[0], two_replicas))
    loaded = tf.saved_model.load(exchange.latest(0).path)
    np.testing.assert_allclose(
        loaded.serve(x), model.student(x, training=False), rtol=1e-5
    )


def test_a_replica_without_rows_contributes_nothing(two_replicas):
    def normalized():
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(5, kernel_regularizer="l2"),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(3),
            ]
        )

    def state(model):
        layer = model.layers[1]
        own = [_local(v, two_replicas) for v in layer.non_trainable_variables]
        return model.get_weights(), own

    x, y = cases.data(3)
    with two_replicas.scope():
        model = cases.codistill(normalized())
    states = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: states.append(
            state(model.student)
        )
    )
    # A row for each replica, then one for the first alone.
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    cases.fit(model, dataset, callbacks=[note])
    (weights, before), (found, after) = states
    plain = normalized()
    plain.set_weights(weights)
    plain.compile("sgd", model.loss.inner)
    plain.optimizer.learning_rate = 0.1
    plain.train_on_batch(x[2:], y[2:])
    cases.assert_close(found, plain, rtol=1e-5, atol=1e-6)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one[1], other[1])


class _OnlyInTraining(keras.layers.Layer):
    """Draws without a seed, and has a layer that only training calls."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x, training=False):
        if training:
            return self.inner(x) * keras.random.uniform(())
        return x + keras.random.uniform(())


@pytest.mark.parametrize("draws_before", [True, tiers.deep(False)])
@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
def test_what_keras_makes_when_it_is_first_used(two_replicas, draws_before):
    x = np.random.default_rng(0).normal(size=(16, 5)).astype("float32")
    y = x[:, :1]

    def trained(wrap, strategy):
        keras.utils.set_random_seed(1)
        keras.utils.clear_session(free_memory=False)
        if draws_before:
            keras.random.uniform(())
        with strategy.scope():
            layers = [_OnlyInTraining(), keras.layers.Dense(1)]
            model = wrap(keras.Sequential([keras.layers.Dense(3), *layers]))
            model.compile("sgd", "mse")
        fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, y, validation_data=(x, y), **fit).history
        predicted = model.predict(x, batch_size=8, verbose=0)
        return history["loss"], history["val_loss"], predicted[:, 0]

    expected = trained(lambda model: model, tf.distribute.get_strategy())
    found = trained(tfdistill.DistributedModel, two_replicas)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_one_batch_at_a_time_is_as_in_keras(two_replicas):
    x = np.random.default_rng(0).normal(size=(14, 4)).astype("float32")
    weights = np.arange(14.0)

    def trained(wrap, strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = wrap(keras.Sequential([keras.layers.Dense(1)]))
            model.compile("sgd", "mse", metrics=["mae"])
        logs = [
            model.train_on_batch(x, x[:, :1]),
            model.train_on_batch(x, x[:, :1], sample_weight=weights),
            model.test_on_batch(x, x[:, :1]),
        ]
        return *map(float, np.ravel(logs)), *model.predict_on_batch(x)[:, 0]

    expected = trained(lambda model: model, tf.distribute.get_strategy())
    found = trained(tfdistill.DistributedModel, two_replicas)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_state_of_each_row_is_refused_by_the_layer_s_name(two_replicas):
    with two_replicas.scope():
        recurrent = keras.layers.LSTM(2, stateful=True, name="memory")
        layers = [keras.Input((3, 4), batch_size=8), recurrent]
        model = tfdistill.DistributedModel(keras.Sequential(layers))
        model.compile("sgd", "mse")
    x = np.ones([8, 3, 4], "float32")
    with pytest.raises(ValueError, match="the layer 'memory'. Leave"):
        model.fit(x, x[:, 0, :2], batch_size=8, verbose=0)


class Remembers(keras.Model):
    """Makes variables from values, only when it is first called."""

    def __init__(self):
        super().__init__()
        self.memory = keras.layers.LSTM(2, stateful=True, name="memory")
        self.top = keras.layers.Dense(1)

    def build(self, shape):
        self.scale = keras.Variable(np.full(2, 0.5, "float32"))

    def call(self, x):
        return self.top(self.memory(x) * self.scale)


def test_a_model_is_built_by_its_first_step_on_one_device(tmp_path):
    x = np.random.default_rng(0).normal(size=(16, 3, 4)).astype("float32")
    fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}

    def trained(wrap, **given):
        keras.utils.set_random_seed(1)
        model = wrap(Remembers())
        model.compile("sgd", "mse")
        return model.fit(x, x[:, 0, :1], **fit, **given).history["loss"]

    expected = trained(lambda model: model)
    assert trained(tfdistill.CodistillModel) == pytest.approx(expected)
    exporter = tfdistill.callbacks.StudentExporter(
        tfdistill.Exchange(tmp_path), every_steps=1
    )
    with pytest.raises(ValueError, match="must not keep .*'memory'. Leave"):
        trained(tfdistill.CodistillModel, callbacks=[exporter])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda: tf.constant(["a"]), "an EagerTensor of string"),
        (lambda: tf.ragged.constant([[1.0]]), "a RaggedTensor of float32"),
        (lambda: tf.constant(1.0), "one number for the whole batch"),
        (lambda: None, "None"),
    ],
)
def test_predictions_that_workers_cannot_gather(monkeypatch, value, kind):
    model = tfdistill.DistributedModel(keras.Sequential())
    monkeypatch.setattr(trainer.replicas, "num_workers", lambda strategy: 2)
    said = f"received {kind} for the output 'a'. Return such"
    with pytest.raises(ValueError, match=said):
        model.trainer.sendable({"a": value()})


class _Optional(keras.layers.Layer):
    def call(self, x, more=None):
        return x if more is None else x + more


@pytest.mark.parametrize(
    "place",
    ["device", *map(tiers.deep, ("replicas", "servers"))],
)
def test_data_may_hold_none(two_replicas, monkeypatch, place):
    """As Keras has it: for an optional input, and for the weights."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    # Its last batch is smaller than the others.
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(5)
    data = data.map(lambda x, y: ({"x": x, "more": None}, y, None))

    def trained(wrap, strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            inputs = {
                "x": keras.Input((3,), name="x"),
                "more": keras.Input((3,), optional=True, name="more"),
            }
            hidden = _Optional()(inputs["x"], inputs["more"])
            model = wrap(keras.Model(inputs, keras.layers.Dense(1)(hidden)))
            model.compile("sgd", "mse", metrics=["mae"])
        fit = {"epochs": 2, "shuffle": False, "verbose": 0}
        arrays = {"x": x, "more": None}, x[:, :1]
        given = data if place == "servers" else arrays
        history = model.fit(data, validation_data=given, **fit)
        logs = np.transpose([history.history[key] for key in ("mae", "loss")])
        values = model.evaluate(data, verbose=0), *logs
        return np.concatenate([*values, model.predict(data, verbose=0)[:, 0]])

    one = tf.distribute.get_strategy()
    expected = trained(lambda model: model, one)
    if place == "servers":
        server_cases.pretend(monkeypatch)
    strategy = two_replicas if place == "replicas" else one
    found = trained(tfdistill.DistributedModel, strategy)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    (first,) = tfdistill.data.checked(data).take(1)
    assert first[0]["more"] is first[2] is None


class _Slices(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.arrays = x, y

    def __len__(self):
        return 4

    def __getitem__(self, index):
        # Of which TensorFlow shares the memory: it is at a multiple of 64.
        return tuple(each[16 * index :][:16] for each in self.arrays)


@pytest.mark.deep
def test_arrays_that_python_code_gives_stay_as_they_are(two_replicas):
    memory = np.zeros((65, 32), "float32")
    begin = -memory.ctypes.data % 64 // 4
    y = memory.reshape(-1)[begin:][: 64 * 16].reshape(64, 16)
    y[:] = np.random.default_rng(0).normal(size=y.shape)
    x, before = y[:, :4].copy(), y.copy()

    def trained(wrap, strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = wrap(keras.Sequential([keras.layers.Dense(16)]))
            model.compile("sgd", "mse")
        batches = _Slices(x, y)
        generator = (batches[i % 4] for i in itertools.count())
        fit = {"steps_per_epoch": 4, "epochs": 4, "shuffle": False}
        history = model.fit(
            generator, validation_data=batches, verbose=0, **fit
        ).history
        return [history["loss"], history["val_loss"]]

    expected = trained(lambda model: model, tf.distribute.get_strategy())
    found = trained(tfdistill.DistributedModel, two_replicas)
    np.testing.assert_array_equal(y, before)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("outside", "message"),
    [
        ("student", "The layer 'dense' was created outside .* '.*kernel'"),
        ("layer", "The layer 'noise' was created outside .* 'seed_.*'"),
        ("optimizer", "The optimizer was created outside .* 'adam/iteration'"),
        ("exported", "TFSMLayer must be frozen.*'loaded'.*`trainable=False`"),
    ],
)
def test_what_was_made_outside_of_the_scope_is_refused(
    two_replicas, outside, message, tmp_path
):
    student, optimizer = cases.linear(), keras.optimizers.Adam(0.1)
    if outside == "exported":
        student.export(tmp_path, verbose=False)
        loaded = keras.layers.TFSMLayer(str(tmp_path), name="loaded")
        student = keras.Sequential([keras.Input((4,)), loaded])
    noise = keras.layers.GaussianNoise(0.1, name="noise")
    with two_replicas.scope():
        if outside == "layer":
            student = keras.Sequential([keras.Input((4,)), noise])
            student.add(keras.layers.Dense(3))
        elif outside == "optimizer":
            student = cases.linear()
        model = cases.codistill(
            student, optimizer=optimizer if outside == "optimizer" else None
        )
    with pytest.raises(ValueError, match=message):
        cases.fit(model, *cases.data())


@pytest.mark.parametrize("job", ["worker", "ps"])
def test_a_model_outside_of_a_group_s_scope_is_refused(monkeypatch, job):
    jobs = {"chief": ["a:1"], "worker": ["b:1"], job: ["c:1"]}
    task = {"type": "chief", "index": 0}
    config = json.dumps({"cluster": jobs, "task": task})
    monkeypatch.setenv("TF_CONFIG", config)
    model = cases.codistill(cases.linear())
    with pytest.raises(ValueError, match="must be created in the scope"):
        cases.fit(model, *cases.data())


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [1, tiers.deep(4)])
@pytest.mark.parametrize("replicas", [1, tiers.deep(2)])
def test_data_of_unknown_length_count_no_step_at_their_end(
    two_replicas, replicas, steps
):
    """Nor do they move what else a step moves: bias corrections, dropout."""
    strategy = two_replicas if replicas == 2 else tf.distribute.get_strategy()
    found = []
    for keeps in (lambda dataset: dataset, lambda d: d.filter(lambda *_: True)):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5, seed=1)
            parts = [keras.Input((4,)), dropout, keras.layers.Dense(3)]
            model = cases.codistill(
                keras.Sequential(parts),
                optimizer=keras.optimizers.Adam(0.1),
                steps_per_execution=steps,
            )
        data = tf.data.Dataset.from_tensor_slices(cases.data(24)).batch(4)
        model.fit(keeps(data), epochs=3, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 18
        state = dropout.seed_generator.state.numpy()
        found.append([*model.get_weights(), state])
    cases.assert_close(*found)


@pytest.mark.parametrize("every_steps", [1, tiers.deep(1000)])
def test_versions_of_averaged_weights_are_what_fit_leaves(
    tmp_path, every_steps
):
    exchange = tfdistill.Exchange(tmp_path, max_to_keep=100)
    optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    model = cases.codistill(cases.linear(), optimizer=optimizer)
    exporter = cases.exporter(exchange, every_steps)
    wait = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(0.05)
    )
    cases.fit(model, *cases.data(), batch_size=2, callbacks=[exporter, wait])
    version = exchange.latest(0)
    assert version.step == 8
    loaded = tf.saved_model.load(version.path)
    cases.assert_close(loaded.model_variables, model.student)
