"""Steps as functions of values, against plain `fit` of the same model."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import embedding as embedding_cases
from tests.cases import servers as cases
from tfdistill.parameter_server import metric_totals
from tfdistill.parameter_server import worker
from tfdistill.parameter_server import worker_data

NUM_EPOCHS = 2


def _train(model, dataset, *, on_step=None):
    """Trains by `RemoteStep`; returns the last step's logs."""
    step, found, _ = cases.step_of(model)
    states = [tf.zeros(v.shape, v.dtype) for v in found.metrics]

    @tf.function(autograph=False)
    def run(data, index):
        _, logs = step.train(data, step=index, metrics=states)
        return logs

    for index, data in enumerate(dataset.repeat(NUM_EPOCHS)):
        if on_step:
            on_step(index)
        logs = run(data, tf.constant(index, tf.int64))
    return logs


def _decaying(rate):
    return keras.optimizers.schedules.ExponentialDecay(rate, 3, 0.5)


def _layers():
    """With a loss, with statistics of its batches, with a random state."""
    dense = keras.layers.Dense(
        4,
        use_bias=False,
        kernel_initializer=keras.initializers.GlorotUniform(seed=2),
        kernel_regularizer=keras.regularizers.L2(0.1),
    )
    return (
        dense,
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=1),
    )


def test_it_trains_as_fit_does():
    def optimizer():
        return keras.optimizers.Adam(_decaying(0.05), global_clipnorm=0.1)

    expected = cases.model(cases.student(*_layers()), optimizer())
    untrained = cases.weights(expected)
    expected.fit(cases.batches(), epochs=NUM_EPOCHS, verbose=0)
    model = cases.remote(cases.student(*_layers()), optimizer())
    before = [v.numpy() for v in model.metrics_variables]
    logs = _train(model, cases.batches())
    cases.assert_same(cases.weights(model), cases.weights(expected), atol=1e-5)
    assert np.abs(cases.weights(model)[0] - untrained[0]).max() > 1e-3
    # Values come and go: nothing of a step's own is left in a variable.
    assert model.optimizer.iterations.numpy() == 0
    cases.assert_same([v.numpy() for v in model.metrics_variables], before)
    assert logs["_examples"] == 4


def test_a_table_that_a_step_uses_twice_is_updated_once():
    def model(kind):
        made = kind(embedding_cases.model(num_shards=2))
        made.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=0.3), "mse")
        return made

    dataset = tf.data.Dataset.from_tensor_slices(embedding_cases.data())
    dataset = dataset.batch(8)
    expected, found = model(tfdistill.CodistillModel), model(cases.OnServers)
    found.trainer.build(dataset.element_spec)
    expected.fit(dataset, epochs=NUM_EPOCHS, verbose=0)
    _train(found, dataset)
    cases.assert_same(cases.weights(found), cases.weights(expected))


def test_each_execution_takes_the_learning_rate_of_its_time():
    def stop(index):
        if index == 6:
            kept.extend(cases.weights(model))
            model.optimizer.learning_rate = 0.0

    kept = []
    model = cases.remote()
    _train(model, cases.batches(), on_step=stop)
    for one, other in zip(cases.weights(model), kept, strict=True):
        np.testing.assert_array_equal(one, other)


NUM_EXAMPLES, NUM_SHARES = 22, 3


def _shared_model():
    return cases.remote(
        cases.student(keras.layers.BatchNormalization()), metrics=_metrics()
    )


def _metrics():
    return [keras.metrics.AUC(from_logits=True, name="auc")]


def _dataset():
    return cases.batches(num_examples=NUM_EXAMPLES)


def _call(function):
    for index in range(NUM_SHARES):
        yield function.function(tf.constant(index, tf.int64))


def test_shares_add_up_to_what_evaluate_finds():
    """And one may be run again."""
    model = _shared_model()
    model.student.get_layer("table").shards[0].assign_add(tf.ones([8, 4]))
    step, found, _ = cases.step_of(model)
    totals = metric_totals.MetricTotals(model)
    function = worker.EvaluateFunction(
        worker_data.TravellingDataset(_dataset()),
        step,
        totals,
        num_shares=NUM_SHARES,
        num_batches=4,
    )
    first, again = list(_call(function)), list(_call(function))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
        totals.add(one.numpy())
    plain = cases.model(model.student, metrics=_metrics())
    expected = plain.evaluate(_dataset().take(4), return_dict=True, verbose=0)
    assert set(function.log_names) == set(expected) == {"loss", "auc"}
    results = {name: totals.results()[name] for name in expected}
    assert results == pytest.approx(expected, rel=1e-5)
    # It reads the weights at each call.
    found.trainable[-1].assign_add([5.0])
    assert (next(_call(function)) != first[0]).numpy().any()


@pytest.fixture(autouse=True)
def _one_worker(monkeypatch):
    cases.Coordinator(monkeypatch)


def test_data_that_end_are_counted_as_they_are():
    expected, model = (
        make(
            optimizer=keras.optimizers.Adam(0.05),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
        )
        for make in (cases.model, cases.remote)
    )
    # Batches of 4, 4, 4, 4 and 1.
    dataset = cases.batches(num_examples=17)
    logs = expected.fit(dataset, verbose=0).history
    step, *_ = cases.step_of(model)
    totals = metric_totals.MetricTotals(model)
    train = worker.TrainFunction(
        step, totals, rider=None, num_steps=3, endless=False
    )
    iterator = iter(dataset)
    results = [
        train.result(train.function(iterator, tf.constant(first, tf.int64), ()))
        for first in (0, 3, 5)
    ]
    assert [r.num_steps for r in results] == [3, 2, 0]
    assert [r.num_examples for r in results] == [12, 5, 0]
    assert not results[2].added.any() and not results[2].logs
    assert train.function.experimental_get_tracing_count() == 1
    for result in results:
        totals.add(result.added)
    found = totals.results()
    assert found == pytest.approx({name: logs[name][0] for name in found})
    # That of the last step done.
    assert results[1].logs["distillation_weight"] == 0
    cases.assert_same(cases.weights(model), cases.weights(expected), atol=1e-5)
