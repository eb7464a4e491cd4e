"""Weights of losses that are learned, against equation 10 of the paper."""

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import training as cases
from tfdistill.training import uncertainty

_LOSSES = {
    name: keras.losses.BinaryCrossentropy(from_logits=True)
    for name in ("click", "sale")
}


def _student(as_list=False):
    """A layer for each of two losses."""
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    heads = {name: keras.layers.Dense(1, name=name)(x) for name in _LOSSES}
    return keras.Model(x, list(heads.values()) if as_list else heads)


def _data():
    x, y, _ = cases.clicks_and_sales()
    return x["x"], y


def _fit(model, **kwargs):
    return model.fit(*_data(), batch_size=43, verbose=0, **kwargs).history


def test_weights_begin_at_one_are_learned_and_kept():
    student = _student()
    start = student.get_weights()
    model = tfdistill.DistributedModel(student)
    model.compile(keras.optimizers.SGD(0.1), _LOSSES)
    plain = _fit(model)
    assert plain.keys() == {"loss", "click_loss", "sale_loss"}
    parts = plain["click_loss"][0] + plain["sale_loss"][0]
    assert plain["loss"][0] == pytest.approx(parts, rel=1e-6)
    after = student.get_weights()
    student.set_weights(start)
    learning = tfdistill.DistributedModel(student)
    options = {"loss_weights": "uncertainty"}
    learning.compile(keras.optimizers.SGD(0.1), _LOSSES, **options)
    found = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: found.append(student.get_weights())
    )
    learned = _fit(learning, epochs=2, callbacks=[note])
    # The first step is that of weights of one.
    assert learned["loss"][0] == pytest.approx(plain["loss"][0], rel=1e-6)
    for one, other in zip(found[0], after, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
    for name in _LOSSES:
        # What is logged of a loss is not weighted; its weight is that of
        # before the step: s moves by 0.1 * (loss - 1 / 2).
        loss = learned[f"{name}_loss"][0]
        assert loss == pytest.approx(plain[f"{name}_loss"][0], rel=1e-6)
        first, second = learned[f"{name}_loss_weight"]
        assert first == 1.0
        assert second == pytest.approx(np.exp(-0.1 * (loss - 0.5)), rel=1e-5)
    assert len(learning.trainable_variables) == len(student.variables) + 2
    # Compiled again it keeps what it has learned, unless it learns no longer.
    learning.compile("sgd", _LOSSES, **options)
    assert _fit(learning)["click_loss_weight"][0] != 1.0
    learning.compile("sgd", _LOSSES)
    assert _fit(learning).keys() == plain.keys()


def test_a_list_of_losses_goes_by_the_names_of_layers():
    x, y = _data()
    model = tfdistill.DistributedModel(_student(as_list=True))
    model.compile("sgd", list(_LOSSES.values()), loss_weights="uncertainty")
    found = model.fit(x, [y[name] for name in _LOSSES], verbose=0).history
    assert {"sale_loss_weight", "click_loss_weight"} <= found.keys()


def test_an_output_without_a_loss_has_no_weight():
    losses = {"click": _LOSSES["click"], "sale": None}
    for given in (losses, list(losses.values())):
        found = uncertainty.by_output(given, list(losses), {}, argument="loss")
        flat = found.values() if isinstance(found, dict) else found
        assert [each and each.name for each in flat] == [
            "click_loss_weight",
            None,
        ]


@pytest.mark.parametrize(
    "student, loss, words",
    [
        (cases.dense, "mse", "need a `loss` by output; received"),
        (lambda: cases.dense(cases.Penalized), {}, "its own `compute_loss`"),
    ],
    ids=["one loss", "own loss"],
)
def test_what_has_no_losses_by_output_is_refused(student, loss, words):
    model = tfdistill.DistributedModel(student())
    with pytest.raises(ValueError, match=words):
        model.compile("sgd", loss, loss_weights="uncertainty")
