"""Weights of losses that are learned, against equation 10 of the paper."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import training as cases
from tfdistill.training import uncertainty

_LOSSES = {
    name: keras.losses.BinaryCrossentropy(from_logits=True)
    for name in ("click", "sale")
}


def _weight(log_variance=0.0):
    made = uncertainty.LearnedWeight(name="weight", is_regularized=True)
    made.variables[0].assign(log_variance)
    return made


def test_a_loss_is_multiplied_and_the_variance_costs_half_of_its_logarithm():
    weight = _weight(np.log(4.0))
    assert float(keras.ops.multiply(tf.constant(2.0), weight)) == 0.5
    assert float(weight.cost) == pytest.approx(np.log(2.0))
    assert float(weight.losses[0]) == pytest.approx(np.log(2.0))


def test_the_best_variance_is_twice_the_loss():
    weight, loss = _weight(), 3.0
    for _ in range(300):
        with tf.GradientTape() as tape:
            total = weight.value * loss + weight.cost
        log_variance = weight.variables[0]
        gradient = tape.gradient(total, log_variance.value)
        log_variance.assign_sub(0.2 * gradient)
    assert float(weight.value) == pytest.approx(1 / (2 * loss), rel=1e-3)


def _fitted(student, weights, **fit):
    keras.utils.set_random_seed(1)
    model = tfdistill.DistributedModel(student)
    model.compile(keras.optimizers.SGD(0.1), _LOSSES, loss_weights=weights)
    x, y, _ = cases.clicks_and_sales()
    history = model.fit(x, y, batch_size=43, verbose=0, **fit)
    return model, history.history


def test_the_first_step_is_that_of_weights_of_one_and_moves_them():
    student = cases.two_tasks()
    start = student.get_weights()
    _, plain = _fitted(student, {"click": 1.0, "sale": 1.0})
    after = student.get_weights()
    student.set_weights(start)
    model, learned = _fitted(student, "uncertainty", epochs=2)
    assert learned["loss"][0] == pytest.approx(plain["loss"][0], rel=1e-6)
    for name in _LOSSES:
        # What is logged of a loss is not weighted; its weight is that of
        # before the step: s moves by 0.1 * (loss - 1 / 2).
        loss = learned[f"{name}_loss"][0]
        assert loss == pytest.approx(plain[f"{name}_loss"][0], rel=1e-6)
        first, second = learned[f"{name}_loss_weight"]
        assert first == 1.0
        assert second == pytest.approx(np.exp(-0.1 * (loss - 0.5)), rel=1e-5)
    student.set_weights(start)
    _fitted(student, "uncertainty")
    for one, other in zip(student.get_weights(), after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    assert len(model.trainable_variables) == len(student.variables) + 2


def test_a_list_of_losses_goes_by_the_names_of_layers():
    below = cases.two_tasks()
    x, y, _ = cases.clicks_and_sales()
    outputs = [below.output[name] for name in ("sale", "click")]
    model = tfdistill.DistributedModel(keras.Model(below.input, outputs))
    model.compile("sgd", list(_LOSSES.values()), loss_weights="uncertainty")
    found = model.fit(x, [y["sale"], y["click"]], verbose=0).history
    assert {"sale_loss_weight", "click_loss_weight"} <= found.keys()


def test_an_output_without_a_loss_has_no_weight():
    losses = {"click": _LOSSES["click"], "sale": None}
    for given in (losses, list(losses.values())):
        found = uncertainty.by_output(
            given, list(losses), lambda name: f"of {name}", argument="loss"
        )
        flat = found.values() if isinstance(found, dict) else found
        assert list(flat) == ["of click", None]


def test_compiled_again_it_keeps_what_it_has_learned():
    model, _ = _fitted(cases.two_tasks(), "uncertainty", epochs=3)
    model.compile("sgd", _LOSSES, loss_weights="uncertainty")
    x, y, _ = cases.clicks_and_sales()
    found = model.fit(x, y, verbose=0).history
    assert found["click_loss_weight"][0] != 1.0
    model.compile("sgd", _LOSSES)
    found = model.fit(x, y, batch_size=43, verbose=0).history
    # Nor is there a cost of what is no longer learned.
    assert found.keys() == {"loss", "click_loss", "sale_loss"}
    parts = found["click_loss"][0] + found["sale_loss"][0]
    assert found["loss"][0] == pytest.approx(parts, rel=1e-4)


@pytest.mark.parametrize(
    "student, loss, words",
    [
        (cases.dense, "mse", "need a `loss` by output; received"),
        (lambda: cases.dense(cases.Penalized), {}, "`compute_loss` of its own"),
    ],
    ids=["one loss", "own loss"],
)
def test_what_has_no_losses_by_output_is_refused(student, loss, words):
    model = tfdistill.DistributedModel(student())
    with pytest.raises(ValueError, match=words):
        model.compile("sgd", loss, loss_weights="uncertainty")
