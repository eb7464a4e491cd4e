"""Steps as functions of values, against plain `fit` of the same model."""

import embedding_cases
import keras
import numpy as np
import parameter_server_cases as cases
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import remote_variables

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


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.Adam(_decaying(0.05), global_clipnorm=0.1),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
        lambda: keras.optimizers.Ftrl(0.1),
    ],
    ids=["adagrad", "adam", "momentum", "ftrl"],
)
def test_it_trains_as_fit_does(optimizer):
    expected = cases.model(optimizer=optimizer())
    untrained = cases.weights(expected)
    expected.fit(cases.batches(), epochs=NUM_EPOCHS, verbose=0)
    model = cases.remote(optimizer=optimizer())
    before = [v.numpy() for v in model.metrics_variables]
    logs = _train(model, cases.batches())
    cases.assert_same(cases.weights(model), cases.weights(expected))
    for one, other in zip(cases.weights(model), untrained, strict=True):
        assert np.abs(one - other).max() > 1e-3
    # Values come and go: nothing of a step's own is left in a variable.
    assert model.optimizer.iterations.numpy() == 0
    cases.assert_same([v.numpy() for v in model.metrics_variables], before)
    assert logs["_examples"] == 4


_LAYERS = {
    "regularizer": lambda: keras.layers.Dense(
        4,
        kernel_initializer=keras.initializers.GlorotUniform(seed=2),
        kernel_regularizer=keras.regularizers.L2(0.1),
    ),
    "batch normalization": lambda: keras.layers.BatchNormalization(),
    "dropout": lambda: keras.layers.Dropout(0.5, seed=1),
}


@pytest.mark.parametrize("name", _LAYERS)
def test_layers_with_losses_and_state_train_as_in_fit(name):
    expected = cases.model(cases.student(_LAYERS[name]()))
    found = cases.remote(cases.student(_LAYERS[name]()))
    plain = cases.remote()
    expected.fit(cases.batches(), epochs=NUM_EPOCHS, verbose=0)
    _train(found, cases.batches())
    cases.assert_same(cases.weights(found), cases.weights(expected))
    # The layer does make a difference.
    _train(plain, cases.batches())
    table, other = cases.weights(found)[0], cases.weights(plain)[0]
    assert np.abs(table - other).max() > 1e-3


def test_moving_statistics_and_seeds_are_written_back():
    layers = (
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5, seed=1),
    )
    model = cases.remote(cases.student(*layers))
    found = remote_variables.RemoteVariables(model)
    before = [v.numpy() for v in found.others]
    assert len(before) == 3
    _train(model, cases.batches())
    for variable, value in zip(found.others, before, strict=True):
        assert (variable.numpy() != value).any(), variable.path


def test_variables_are_sorted_by_how_workers_come_by_them():
    model = cases.remote(
        cases.student(keras.layers.BatchNormalization()),
        metrics=[keras.metrics.BinaryAccuracy()],
    )
    found = remote_variables.RemoteVariables(model)
    layer = model.student.get_layer("table")
    assert [s.path for s in found.shards] == [s.path for s in layer.shards]
    assert [v.name for v in found.trainable] == [
        "gamma",
        "beta",
        "kernel",
        "bias",
    ]
    assert [v.name for v in found.others] == ["moving_mean", "moving_variance"]
    assert len(found.metrics) == 8
    assert [v.name for v in found.optimizer[:1]] == ["learning_rate"]
    assert found.iterations is model.optimizer.iterations
    expected = [v.numpy() for v in [*found.trainable, *found.others]]
    cases.assert_same(found.read(), expected)


def test_a_table_that_a_step_uses_twice_is_updated_once():
    def model():
        made = tfdistill.CodistillModel(embedding_cases.model(num_shards=2))
        made.compile(keras.optimizers.Adagrad(0.1, global_clipnorm=0.3), "mse")
        return made

    dataset = tf.data.Dataset.from_tensor_slices(embedding_cases.data())
    dataset = dataset.batch(8)
    expected, found = model(), model()
    found.build_for(dataset.element_spec)
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


def test_variables_with_constraints_are_refused():
    layer = keras.layers.Dense(4, kernel_constraint="non_neg")
    model = cases.remote(cases.student(layer))
    with pytest.raises(ValueError, match="no constraint.*kernel"):
        cases.step_of(model)


def test_a_step_for_evaluation_does_not_train():
    model = cases.remote()
    step, *_ = cases.step_of(model, trains=False)
    with pytest.raises(RuntimeError, match="without an update"):
        step.train(next(iter(cases.batches())), step=0, metrics=[])


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
