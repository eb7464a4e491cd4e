"""Evaluation and prediction by shares, against Keras' own of the whole."""

import keras
import numpy as np
import parameter_server_cases as cases
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import metric_totals
from tfdistill import share_functions
from tfdistill import worker_data

NUM_EXAMPLES, NUM_SHARES = 22, 3


def _model():
    return cases.remote(
        cases.student(keras.layers.BatchNormalization()),
        metrics=[keras.metrics.AUC(from_logits=True)],
    )


def _dataset():
    return cases.batches(num_examples=NUM_EXAMPLES)


def _options(found, **kwargs):
    return {"read": found.read, "num_shares": NUM_SHARES, **kwargs}


def _travelling():
    return worker_data.TravellingDataset(_dataset())


def _call(function):
    for index in range(NUM_SHARES):
        yield function.function(tf.constant(index, tf.int64))


@pytest.mark.parametrize("num_batches", [None, 2])
def test_shares_add_up_to_what_evaluate_finds(num_batches):
    model = _model()
    model.student.get_layer("table").shards[0].assign_add(tf.ones([8, 4]))
    step, found, _ = cases.step_of(model, trains=False)
    totals = metric_totals.MetricTotals(model)
    function = share_functions.EvaluateFunction(
        _travelling(), step, totals, **_options(found, num_batches=num_batches)
    )
    for added in _call(function):
        totals.add(added.numpy())
    whole = _dataset() if num_batches is None else _dataset().take(num_batches)
    expected = model.evaluate(whole, return_dict=True, verbose=0)
    assert set(function.log_names) == set(expected) == {"loss", "auc"}
    results = {name: totals.results()[name] for name in expected}
    assert results == pytest.approx(expected, rel=1e-5)


def test_a_share_may_be_run_again():
    model = _model()
    step, found, _ = cases.step_of(model, trains=False)
    totals = metric_totals.MetricTotals(model)
    function = share_functions.EvaluateFunction(
        _travelling(), step, totals, **_options(found)
    )
    first, again = list(_call(function)), list(_call(function))
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    # It reads the weights at each call.
    found.trainable[-1].assign_add([5.0])
    assert (next(_call(function)) != first[0]).numpy().any()


def _two_outputs():
    inputs = keras.Input((cases.NUM_FEATURES,))
    outputs = {
        "row": keras.layers.Dense(2)(inputs),
        "number": keras.layers.Dense(1)(inputs)[:, 0],
    }
    model = tfdistill.CodistillModel(keras.Model(inputs, outputs))
    model.compile("sgd", {"row": "mse", "number": "mse"})
    return model


def test_shares_of_predictions_are_whole_batches_in_turn():
    model = _two_outputs()
    x = cases.data(NUM_EXAMPLES)[0]["features"]
    dataset = tf.data.Dataset.from_tensor_slices((x,)).batch(4)
    model.build(x.shape)
    step, found, _ = cases.step_of(model, trains=False)
    function = share_functions.PredictFunction(
        worker_data.TravellingDataset(dataset), step, **_options(found)
    )
    assert set(function.output_spec) == {"row", "number"}
    flat = keras.tree.flatten(model.predict(x, verbose=0))
    shares = list(_call(function))
    assert [rows.numpy().tolist() for rows, _ in shares] == [
        [4, 4],
        [4, 4],
        [4, 2],
    ]
    first = [index for index in range(NUM_EXAMPLES) if index // 4 % 3 == 0]
    cases.assert_same(shares[0][1], [output[first] for output in flat])


def test_a_share_without_a_batch_is_empty():
    model = _model()
    step, found, _ = cases.step_of(model, trains=False)
    function = share_functions.PredictFunction(
        _travelling(), step, **_options(found, num_batches=2)
    )
    rows, (outputs,) = list(_call(function))[2]
    assert (rows.shape, outputs.shape) == ((0,), (0, 1))


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
