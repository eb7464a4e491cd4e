"""Steps of workers, on a group that is pretended, against one process."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases import embedding as embedding_cases
from tests.cases import servers as cases


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


def _assert_same_in_a_group(monkeypatch, make, dataset):
    """Compares with steps by three; returns the group's model."""
    found = []
    for num_steps in (1, 3):
        model = make(num_steps)
        logs = model.fit(dataset, epochs=2, verbose=0, shuffle=False).history
        found.append((model, logs))
        cases.pretend(monkeypatch)
    (expected, wanted), (model, logs) = found
    cases.assert_same(cases.weights(model), cases.weights(expected), atol=1e-5)
    assert logs.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(logs[name], values, rtol=1e-4, err_msg=name)
    return model


def test_it_trains_as_fit_does(monkeypatch):
    def make(num_steps):
        rate = keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5)
        return cases.model(
            cases.student(*_layers()),
            keras.optimizers.Adam(rate, global_clipnorm=0.1),
            metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)],
            steps_per_execution=num_steps,
        )

    # Batches of 4, 4, 4, 4 and 1.
    dataset = cases.batches(num_examples=17)
    model = _assert_same_in_a_group(monkeypatch, make, dataset)
    assert model.optimizer.iterations.numpy() == 10
    # Each execution takes the learning rate of its time.
    model = cases.model()
    kept = []

    def stop(batch, logs):
        if batch == 2:
            kept.extend(cases.weights(model))
            model.optimizer.learning_rate = 0.0

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    model.fit(dataset, verbose=0, callbacks=callbacks)
    cases.assert_same(cases.weights(model), kept, rtol=0, atol=0)


def test_a_table_that_a_step_uses_twice_is_updated_once(monkeypatch):
    def make(num_steps):
        model = cases.tfdistill.CodistillModel(
            embedding_cases.model(num_shards=2)
        )
        optimizer = keras.optimizers.Adagrad(0.1, global_clipnorm=0.3)
        model.compile(optimizer, "mse", steps_per_execution=num_steps)
        return model

    dataset = tf.data.Dataset.from_tensor_slices(embedding_cases.data())
    _assert_same_in_a_group(monkeypatch, make, dataset.batch(8))
