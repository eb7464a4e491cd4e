"""Fit, evaluate and predict on servers, with a coordinator of this process."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops

import tfdistill
from tests.cases import embedding as embedding_cases
from tests.cases import servers as cases
from tests.cases import tiers
from tests.cases import training as training_cases
from tfdistill.cluster import signs
from tfdistill.parameter_server import trainer
from tfdistill.training import auto_steps
from tfdistill.training import fit_arguments


def _dataset():
    return tf.data.Dataset.range(6).batch(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_split": 0.1}, "`validation_split` is only supported"),
        ({"y": np.ones(3)}, "`y`, .* must be left out"),
        ({"x": None}, "`x` must be data that .* received NoneType"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        alone = types.SimpleNamespace(
            distribute_strategy=tf.distribute.get_strategy()
        )
        trainer.ServerTrainer(alone).fit({"x": _dataset(), **arguments}, None)


FIT = {"epochs": 2, "steps_per_epoch": 7, "verbose": 0}


def _model(*more, **kwargs):
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.9)
    return cases.model(
        optimizer=keras.optimizers.Adam(rate, global_clipnorm=0.1),
        metrics=[
            keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy"),
            *more,
        ],
        **kwargs,
    )


def _validation():
    return cases.batches(5, num_examples=23)


def test_a_model_that_was_never_compiled_predicts(monkeypatch):
    expected = _model().model.predict(_validation(), verbose=0)
    cases.pretend(monkeypatch, 2)
    model = tfdistill.DistributedModel(_model().model)
    found = model.predict(_validation(), verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_layer_of_an_exported_model_must_be_frozen(monkeypatch, tmp_path):
    layers = [keras.Input((4,)), keras.layers.Dense(3)]
    exported = keras.Sequential(layers)
    exported.export(tmp_path, verbose=False)
    x, y = np.ones((6, 4), "float32"), np.ones((6, 1), "float32")

    def train(trainable):
        keras.utils.set_random_seed(0)
        loaded = keras.layers.TFSMLayer(str(tmp_path), trainable=trainable)
        model = keras.Sequential([loaded, keras.layers.Dense(1)])
        model = tfdistill.DistributedModel(model)
        model.compile("sgd", "mse")
        history = model.fit(x, y, shuffle=False, verbose=0).history
        return [*history["loss"], *model.get_weights()]

    expected = train(False)
    cases.pretend(monkeypatch)
    for one, other in zip(train(False), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    with pytest.raises(ValueError, match="TFSMLayer must be frozen"):
        train(True)
    loaded = keras.layers.TFSMLayer(str(tmp_path))
    model = tfdistill.DistributedModel(keras.Sequential([loaded]))
    np.testing.assert_allclose(model.predict(x, verbose=0), exported(x))


def _layers():
    """With a loss, with statistics of its batches, with a random state."""
    dense = keras.layers.Dense(
        4,
        use_bias=False,
        kernel_initializer=keras.initializers.GlorotUniform(seed=2),
        kernel_regularizer=keras.regularizers.L2(0.1),
    )
    norm = keras.layers.BatchNormalization()
    return dense, norm, keras.layers.Dropout(0.5, seed=1)


def test_two_workers_in_turn_train_as_one_process(monkeypatch):
    train = cases.batches().repeat()
    validation = {"validation_data": _validation(), "validation_steps": 4}
    plain = _model(training_cases.Extremes(), built=cases.student(*_layers()))
    expected = plain.fit(train, **validation, **FIT).history
    answers = plain.predict(_validation(), verbose=0)
    metrics = plain.evaluate(_validation(), verbose=0)

    cases.pretend(monkeypatch, 2)
    model = _model(training_cases.Extremes(), built=cases.student(*_layers()))
    history = model.fit(train, **validation, **FIT).history
    cases.assert_same(cases.weights(model), cases.weights(plain), rtol=1e-4)
    assert model.optimizer.iterations.numpy() == 14
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            history[name], values, rtol=1e-4, err_msg=name
        )
    np.testing.assert_allclose(
        model.predict(_validation()), answers, rtol=1e-4, atol=1e-5
    )
    assert model.evaluate(_validation()) == pytest.approx(metrics, rel=1e-4)
    with pytest.raises(ValueError, match="at least one batch"):
        model.predict(_validation().skip(9))


def test_a_table_that_a_step_uses_twice_is_updated_once(monkeypatch):
    def train():
        model = cases.tfdistill.CodistillModel(
            embedding_cases.model(num_shards=2)
        )
        optimizer = keras.optimizers.Adagrad(0.1, global_clipnorm=0.3)
        model.compile(optimizer, "mse", steps_per_execution=3)
        data = tf.data.Dataset.from_tensor_slices(embedding_cases.data())
        model.fit(data.batch(8), epochs=2, verbose=0, shuffle=False)
        return cases.weights(model)

    expected = train()
    cases.pretend(monkeypatch)
    cases.assert_same(train(), expected, atol=1e-5)


def test_each_execution_takes_the_learning_rate_of_its_time(monkeypatch):
    cases.pretend(monkeypatch)
    model, kept = cases.model(), []

    def stop(batch, logs):
        if batch == 2:
            kept.extend(cases.weights(model))
            model.optimizer.learning_rate = 0.0

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(cases.batches(), verbose=0, callbacks=callbacks)
    cases.assert_same(cases.weights(model), kept, rtol=0, atol=0)


def test_an_execution_may_have_many_steps(monkeypatch):
    """TensorFlow takes many `get_next` in a graph for a mistake."""
    cases.pretend(monkeypatch)
    monkeypatch.setattr(iterator_ops, "GET_NEXT_CALL_ERROR_THRESHOLD", 3)
    built = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = cases.model(built=built, steps_per_execution=4)
    data = tf.data.Dataset.from_tensor_slices(
        (np.ones([8, 2]), np.ones([8, 1]))
    )
    data = data.batch(4).repeat()
    history = model.fit(data, steps_per_epoch=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.optimizer.iterations.numpy() == 4


def test_class_weights_without_labels_are_refused():
    data = types.SimpleNamespace()
    with pytest.raises(ValueError, match="of the type SimpleNamespace"):
        fit_arguments.weigh({"x": data, "class_weight": {0: 1.0}})


@pytest.mark.parametrize(
    "labels",
    [
        lambda y: y,
        tiers.deep(lambda y: np.eye(3, dtype="float32")[y], id="one_hot"),
    ],
)
def test_a_split_and_class_weights_are_those_of_keras(monkeypatch, labels):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 4)).astype("float32")
    y = labels(rng.integers(0, 3, 30))
    kind = "categorical" if y.ndim > 1 else "sparse_categorical"

    def train(wrap):
        keras.utils.set_random_seed(0)
        layers = [keras.Input((4,)), keras.layers.Dense(3, "softmax")]
        model = keras.Sequential(layers)
        model = wrap(model)
        model.compile("sgd", f"{kind}_crossentropy")
        arguments = {"validation_split": 0.3, "shuffle": False}
        weights = {0: 2.0, 2: 0.5}
        history = model.fit(
            *(x, y), class_weight=weights, batch_size=7, epochs=2, **arguments
        )
        return history.history, model.get_weights()

    expected, weights = train(lambda model: model)
    cases.pretend(monkeypatch)
    history, actual = train(tfdistill.DistributedModel)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for one, other in zip(actual, weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


class OfAllKinds(keras.Model):
    def __init__(self, *, with_none=False):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.with_none = with_none

    def call(self, x):
        if self.with_none:
            return {"a": x, "b": [x, None]}
        return {
            "text": tf.strings.as_string(x * self.scale),
            "ragged": tf.RaggedTensor.from_tensor(x, padding=3.0),
            "sparse": tf.sparse.from_dense(x),
            "mean": tf.reduce_mean(x),
            "widths": tf.zeros([tf.shape(x)[0], tf.cast(x[0, 0], tf.int32)]),
        }


def test_predictions_of_all_kinds_are_as_in_keras(monkeypatch):
    """Without a `compile`, too."""
    x = np.arange(10, dtype="float32").reshape(5, 2)
    data = tf.data.Dataset.from_tensor_slices(x).batch(2)
    expected = OfAllKinds().predict(data, verbose=0)
    cases.pretend(monkeypatch)
    found = tfdistill.DistributedModel(OfAllKinds()).predict(data)
    assert found["text"].tolist() == expected["text"].tolist()
    assert found["mean"].tolist() == expected["mean"].tolist()
    for name in ("ragged", "widths"):
        assert found[name].to_list() == expected[name].to_list()
    dense = [tf.sparse.to_dense(each["sparse"]) for each in (found, expected)]
    assert dense[0].numpy().tolist() == dense[1].numpy().tolist() == x.tolist()
    model = _model()  # Compiled, and never trained.
    expected = model.student.predict(_validation(), verbose=0)
    cases.assert_same(model.predict(_validation()), expected)
    assert model.fit(_validation(), epochs=2, verbose=0).epoch == [0, 1]
    model = tfdistill.DistributedModel(OfAllKinds(with_none=True))
    with pytest.raises(ValueError, match="None for the output 'b_1'. Leave"):
        model.predict(data)


def test_a_table_of_words_that_workers_lack_is_named(monkeypatch):
    cases.pretend(monkeypatch)
    lookup = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")
    layers = [keras.Input((1,), dtype="string"), lookup]
    model = tfdistill.DistributedModel(
        keras.Sequential([*layers, keras.layers.Embedding(3, 1)])
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="received the layer 'words'"):
        model.fit(np.array([["a"], ["c"]], object), np.ones([2, 1, 1]))


def test_what_looks_up_words_is_evaluated_as_in_keras(monkeypatch):
    """Such as a model for raw text around one that has been trained."""

    def made():
        keras.utils.set_random_seed(0)
        lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
        layers = [keras.Input((1,), dtype="string"), lookup]
        model = keras.Sequential([*layers, keras.layers.Embedding(3, 1)])
        model.compile("sgd", "mse", metrics=["mae"])
        return model

    x = tf.constant([["a"], ["c"], ["b"], ["b"], ["a"]])
    data = tf.data.Dataset.from_tensor_slices((x, tf.ones([5, 1, 1]))).batch(2)
    expected = made().evaluate(data, verbose=0)
    cases.pretend(monkeypatch)
    model = tfdistill.DistributedModel(made())
    model.compile("sgd", "mse", metrics=["mae"])
    cases.assert_same(model.evaluate(data, verbose=0), expected)


class _Assigns(keras.layers.Layer):
    """Counts its calls and limits a weight; and draws without a seed."""

    def build(self, shape):
        self.calls = self.add_weight(
            (2,), "zeros", dtype="int32", trainable=False
        )
        self.scale = self.add_weight(shape[-1:], "ones")
        self.drawn = self.add_weight((), "zeros", trainable=False)

    def call(self, x, training=False):
        self.calls.assign_add([1, int(training)])
        if training:
            self.scale.assign(self.scale / keras.ops.norm(self.scale))
        self.drawn.assign(self.drawn + keras.random.uniform(()))
        return x * self.scale


@pytest.mark.parametrize("repeats", [False, tiers.deep(True)])
def test_what_a_call_assigns_is_kept_as_keras_keeps_it(monkeypatch, repeats):
    """In training, evaluation and prediction; also what is trained."""
    x, y = np.random.default_rng(0).normal(size=[2, 12, 4]).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, y[:, :1])).batch(4)

    def train():
        keras.utils.set_random_seed(0)
        keras.random.uniform(())  # Keras' own generator is made.
        layers = [
            keras.layers.SpectralNormalization(keras.layers.Dense(4)),
            _Assigns(),
            keras.layers.Dense(1),
        ]
        model = tfdistill.DistributedModel(
            keras.Sequential([keras.Input((4,)), *layers])
        )
        num_steps = 3 if repeats else 2
        model.compile("sgd", "mse", steps_per_execution=num_steps)
        history = model.fit(
            data.repeat() if repeats else data,
            epochs=2,
            steps_per_epoch=3 if repeats else None,
            validation_data=data,
            verbose=0,
        )
        model.predict(data, verbose=0)
        calls = layers[1].calls.numpy().tolist()
        return calls, model.get_weights(), history.history["val_loss"]

    _, expected, expected_loss = train()
    cases.pretend(monkeypatch)
    calls, weights, loss = train()
    assert calls == [6 + 6 + 3, 6]
    cases.assert_same(weights, expected)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)


class _Note(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_begin(self, logs=None):
        self.told.append("train")

    def on_epoch_end(self, epoch, logs=None):
        self.told.append((epoch, sorted(logs)))

    def on_test_begin(self, logs=None):
        self.told.append("test")

    def on_train_end(self, logs=None):
        self.told.append("end")


def test_fit_goes_on_and_tells_its_callbacks(monkeypatch):
    cases.pretend(monkeypatch)
    model, note = _model(steps_per_execution=3), _Note()
    arguments = {**FIT, "epochs": 4, "callbacks": [note]}
    model.fit(
        cases.batches(),
        **{**arguments, "epochs": 2, "steps_per_epoch": None},
        validation_data=_validation(),
        validation_freq=2,
    )
    own = ["accuracy", "loss", "task_loss", "distillation_loss"]
    own = sorted([*own, "distillation_weight", "teacher_staleness"])
    with_validation = sorted([*own, "val_accuracy", "val_loss"])
    assert note.told == ["train", (0, own), "test", (1, with_validation), "end"]
    assert model.optimizer.iterations.numpy() == 12
    history = model.fit(cases.batches().repeat(), initial_epoch=2, **arguments)
    assert history.epoch == [2, 3]
    assert model.optimizer.iterations.numpy() == 26


@pytest.mark.parametrize(
    ("given", "by_batches", "grows"),
    [
        (None, False, True),
        tiers.deep(None, True, False),
        tiers.deep("auto", True, False),
        tiers.deep(1, False, False),
    ],
)
def test_executions_grow_by_themselves_but_for_batches(
    monkeypatch, given, by_batches, grows
):
    monkeypatch.setattr(auto_steps, "_LEAST_SECS", 0.0)
    monkeypatch.setattr(auto_steps, "_LEAST_GAIN", 0.0)
    said: list[str] = []
    monkeypatch.setattr(
        signs.Reporter, "say", lambda _, each: said.append(each)
    )
    cases.pretend(monkeypatch)
    model, batches = _model(steps_per_execution=given), []
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=(lambda batch, logs: batches.append(batch))
        if by_batches
        else None
    )
    model.fit(
        cases.batches().repeat(),
        steps_per_epoch=40,
        verbose=0,
        callbacks=[callback],
    )
    assert (model.trainer.num_steps > 1) == grows
    # Or a launcher would take the time of another trace for a hang.
    assert (signs.NEW_GRAPH in said) == grows
    if by_batches:
        assert (batches == list(range(40))) == (not grows)


def test_data_that_end_early_are_reported(monkeypatch):
    """The second worker has none at all."""
    cases.pretend(monkeypatch, 2)
    model = _model(steps_per_execution=2)
    data = _of_unknown_size(cases.batches(num_examples=3))
    with pytest.warns(UserWarning, match="ended after step 1 of 9 of epoch 1"):
        model.fit(data, steps_per_epoch=9, verbose=0)
    assert model.optimizer.iterations.numpy() == 1


def test_steps_that_a_worker_had_no_data_for_are_made_by_another(monkeypatch):
    """Each has three batches, and so one for its second execution of two."""
    cases.pretend(monkeypatch, 2)
    built = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = cases.model(built, "sgd", steps_per_execution=2)
    data = tf.data.Dataset.from_tensor_slices((np.ones([6, 2]), np.ones(6)))
    model.fit(data.batch(1), steps_per_epoch=6, verbose=0)
    assert model.optimizer.iterations.numpy() == 6


class _StopsAtOnce(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


def test_stopping_counts_what_was_in_flight(monkeypatch):
    cases.pretend(monkeypatch)
    model = _model(steps_per_execution=3)
    history = model.fit(
        cases.batches().repeat(),
        epochs=2,
        steps_per_epoch=99,
        verbose=0,
        callbacks=[_StopsAtOnce()],
    )
    # One was done, and another in flight.
    assert model.optimizer.iterations.numpy() == 6
    assert history.epoch == [0]


def _of_unknown_size(dataset):
    """Data that do not say how many they are."""
    return dataset.filter(lambda *_: True)


class _Broken(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise KeyError("of the callback")


def test_what_a_callback_raises_leaves_nothing_in_flight(monkeypatch):
    coordinator = cases.pretend(monkeypatch)
    model = _model()
    with pytest.raises(KeyError, match="of the callback"):
        model.fit(cases.batches().repeat(), callbacks=[_Broken()], **FIT)
    assert coordinator.num_joins == 1
    assert model.fit(cases.batches().repeat(), **FIT).epoch == [0, 1]


@pytest.mark.deep
def test_evaluation_is_traced_once_for_its_data_until_it_is_compiled_anew(
    monkeypatch,
):
    class Traced(cases.tfdistill.CodistillModel):
        num_traces = 0

        def test_step(self, data):
            self.num_traces += 1
            return super().test_step(data)

    cases.pretend(monkeypatch, num_workers=2)
    model, dataset = _model(kind=Traced), _validation()
    first = model.evaluate(dataset, return_dict=True)
    num_traces = model.num_traces
    assert model.evaluate(dataset, return_dict=True) == first
    assert model.num_traces == num_traces
    model.evaluate(dataset, steps=2)
    assert model.num_traces > num_traces
    model.compile("sgd", "mse", metrics=["mae"])
    assert set(model.evaluate(dataset, return_dict=True)) == {"loss", "mae"}


@pytest.mark.parametrize("repeats", [tiers.deep(True), False])
def test_workers_report_rows_to_compare_teachers_by(
    monkeypatch, tmp_path, repeats
):
    """Arrays among the logs, also of a last batch that is smaller."""
    cases.pretend(monkeypatch)
    path = tmp_path / "teacher.keras"
    cases.student(seed=1).save(path)
    model = cases.model(
        optimizer=keras.optimizers.Adagrad(0.0),
        teachers=tfdistill.teachers.FixedTeacher(path),
        steps_per_execution=2,
    )
    data = cases.batches(5, num_examples=23)
    loader = tfdistill.callbacks.TeacherLoader(every_steps=5)
    history = model.fit(
        data.repeat() if repeats else data,
        steps_per_epoch=5 if repeats else None,
        epochs=2,
        verbose=0,
        callbacks=[loader],
    ).history
    x, y = cases.data(23)
    x, y = {name: values[20:] for name, values in x.items()}, y[20:]
    known = {"teacher": cases.student(seed=1), "own": cases.student()}
    (status,) = model.teachers.status()
    for name, student in known.items():
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        expected = float(loss(y, student(x)))
        assert status[f"{name}_loss"] == pytest.approx(expected, rel=1e-4)
    loss = status["teacher_loss"]
    np.testing.assert_allclose(history["teacher_loss"], [np.nan, loss])
