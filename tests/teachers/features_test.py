"""Hidden layers compared: the formula, projections, what is refused."""

import keras
import numpy as np
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import losses

_X, _Y = cases.data()


def _network(width, seed, *, name="hidden"):
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Dense(width, activation="tanh", name=name)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="top")(hidden))
    cases.randomize(model, seed)
    return model


def _hidden(model, x):
    layer = model.get_layer("hidden")
    return keras.ops.tanh(x @ layer.kernel + layer.bias).numpy()


def _taught(student, teacher, *, of=None, projection=False, **kwargs):
    return cases.codistill(
        student,
        tfdistill.teachers.FixedTeacher(teacher),
        feature_loss=losses.FeatureDistillation(
            of or [("hidden", "hidden")], projection=projection, weight=0.5
        ),
        **kwargs,
    )


@pytest.mark.parametrize("weights", [None, np.arange(16, dtype="float32")])
def test_one_update_by_hand(weights):
    """Of features alone."""
    student, teacher = _network(5, 0), _network(5, 3)
    model = tfdistill.CodistillModel(
        student, teachers=tfdistill.teachers.FixedTeacher(teacher)
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # No task: without any loss, Keras would warn of the last layer.
        loss_weights=0.0,
        distillation_weight=3.0,
        feature_loss=losses.FeatureDistillation(
            [("hidden", "hidden")], weight=0.5
        ),
    )
    before = student.get_layer("hidden").kernel.numpy()
    ours, theirs = _hidden(student, _X), _hidden(teacher, _X)
    rows = np.ones(16) if weights is None else weights
    wanted = np.mean(rows * np.mean((ours - theirs) ** 2, axis=1))
    # d/dkernel of 3 * 0.5 * that.
    slope = rows[:, None] * 2 * (ours - theirs) / (16 * 5) * (1 - ours**2)
    moved = before - 0.1 * 3 * 0.5 * _X.T @ slope
    logs = cases.fit(model, _X, _Y, batch_size=16, sample_weight=weights)
    assert logs["feature_loss"] == pytest.approx([wanted], rel=1e-5)
    assert logs["loss"] == pytest.approx([1.5 * wanted], rel=1e-5)
    found = student.get_layer("hidden").kernel
    np.testing.assert_allclose(found, moved, rtol=1e-4, atol=1e-6)


def test_it_adds_to_the_distillation_of_outputs():
    logs = cases.fit(_taught(_network(5, 0), _network(5, 3)), _X, _Y)
    total = logs["task_loss"][0] + logs["distillation_loss"][0]
    total += 0.5 * logs["feature_loss"][0]
    assert logs["loss"][0] == pytest.approx(total, rel=1e-5)


def test_a_projection_is_trained_and_never_saved(tmp_path):
    student = _network(4, 0)
    model = _taught(
        student,
        _network(7, 3),
        projection=True,
        optimizer=keras.optimizers.Adam(0.05),
    )
    (kernel, bias) = model._projections[0].weights
    assert kernel.shape == (4, 7)
    before = kernel.numpy()
    logs = cases.fit(model, _X, _Y, epochs=30)
    assert logs["feature_loss"][-1] < 0.8 * logs["feature_loss"][0]
    assert np.abs(kernel - before).max() > 1e-3
    # By which backups find it.
    assert any(v is bias for v in model.trainable_variables)
    own = [v.path for v in student.variables]
    assert not any("projection" in path for path in own)
    assert [v.path for v in model.graph.variables] == own
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    assert len(loaded.variables) == len(own) and not loaded.compiled
    # Compiled again with the same one, it goes on.
    again = model.codistillation.feature_loss
    model.compile(
        "adam",
        "mse",
        distillation_loss=losses.ForwardKL(from_logits=True),
        feature_loss=again,
    )
    assert model._projections[0].weights[0] is kernel


def test_it_resumes_with_its_projection(tmp_path):
    def train(epochs, directory):
        keras.utils.set_random_seed(1)
        model = _taught(
            _network(4, 0), _network(7, 3), projection=True, optimizer="adam"
        )
        backup = tfdistill.callbacks.Backup(directory)
        cases.fit(model, _X, _Y, epochs=epochs, callbacks=[backup])
        return model

    whole = train(4, tmp_path / "a")
    train(2, tmp_path / "b")
    resumed = train(4, tmp_path / "b")
    for value, same in zip(
        resumed.get_weights(), whole.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(value, same)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: _taught(_network(4, 0), _network(7, 3)),
            r"\(None, 4\) from 'hidden' .*\(projection=True\)",
        ),
        (
            lambda: _taught(
                _network(7, 0), _network(7, 3), of=[("a", "hidden")]
            ),
            "layers of the student, .*'hidden', 'top'.*; received 'a'",
        ),
    ],
)
def test_layers_that_cannot_be_compared(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "teachers",
    [
        lambda: cases.peers(tfdistill.Exchange("/x")),
        lambda: tfdistill.teachers.FixedTeacher("/x"),
    ],
)
def test_other_teachers_have_no_layers_to_name(teachers):
    loss = losses.FeatureDistillation([("hidden", "hidden")])
    with pytest.raises(ValueError, match="exactly one teacher.*FixedTeacher"):
        cases.codistill(_network(5, 0), teachers(), feature_loss=loss)
