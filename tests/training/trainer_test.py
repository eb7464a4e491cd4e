""""""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
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


def _trained(strategy):
    x, y = cases.data(16)
    x[8:] += 5.0  # The replicas see different rows.
    with strategy.scope():
        model = cases.codistill(_student())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    cases.fit(model, data, epochs=2, callbacks=[])
    return model, data


def test_replicas_get_the_mean_of_their_own(two_replicas):
    model, _ = _trained(two_replicas)
    mean, variance = model.student.layers[0].non_trainable_variables
    before = [_local(v, two_replicas) for v in (mean, variance)]
    assert not np.allclose(before[0][0], before[0][1])
    model.codistillation.average_statistics(two_replicas)
    for variable, (one, other) in zip((mean, variance), before, strict=True):
        for value in _local(variable, two_replicas):
            np.testing.assert_allclose(value, (one + other) / 2, rtol=1e-6)


def test_trained_and_counting_variables_are_left_alone(two_replicas):
    with two_replicas.scope():
        student = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(3),
            ]
        )
    before = [v.numpy() for v in student.variables]
    trainer.BatchStatistics(student, two_replicas).average()
    for variable, value in zip(student.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_one_device_keeps_its_own():
    student = _student()
    cases.randomize(student, 1)
    before = [v.numpy() for v in student.variables]
    strategy = tf.distribute.get_strategy()
    trainer.BatchStatistics(student, strategy).average()
    for variable, value in zip(student.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_exports_and_evaluations_see_the_mean(two_replicas, tmp_path):
    model, data = _trained(two_replicas)
    exchange = tfdistill.Exchange(tmp_path)
    exporter = tfdistill.StudentExporter(exchange, every_steps=1, group=0)
    cases.fit(model, data, callbacks=[exporter])
    mean = model.student.layers[0].non_trainable_variables[0]
    one, other = _local(mean, two_replicas)
    np.testing.assert_array_equal(one, other)
    x = np.concatenate([b for b, _ in data.as_numpy_iterator()])
    loaded = tf.saved_model.load(exchange.latest(0).path)
    np.testing.assert_allclose(
        loaded.serve(x), model.student(x, training=False), rtol=1e-5
    )
    cases.fit(model, data, callbacks=[])
    assert not np.allclose(*_local(mean, two_replicas))
    model.evaluate(data, verbose=0)
    np.testing.assert_array_equal(*_local(mean, two_replicas))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
