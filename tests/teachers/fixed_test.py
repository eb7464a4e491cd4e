"""Keras models as teachers: whose values, where they are kept, what is refused.

tests/training/multi_worker_test.py trains with one on two replicas, and
tests/runs/ on real workers and on parameter servers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

_X, _Y = cases.data()


def _model(seed=3, units=7):
    """A teacher that would answer otherwise in training."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Dense(units, activation="tanh")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.5)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden), name="big")
    cases.randomize(model, seed)
    return model


def _trained(*models):
    teachers = [tfdistill.teachers.FixedTeacher(model) for model in models]
    model = cases.codistill(cases.linear(), teachers)
    logs = cases.fit(model, _X, _Y, epochs=2, batch_size=8)
    return logs, model


def test_it_teaches_as_its_saved_model_and_as_its_file_do(tmp_path):
    teacher = _model()
    teacher.save(tmp_path / "a.keras")
    tfdistill.CodistillModel(teacher).export(tmp_path / "b", verbose=False)
    expected, other = _trained(tmp_path / "b")
    for given in (teacher, tmp_path / "a.keras"):
        found, model = _trained(given)
        cases.assert_close(found, expected, rtol=1e-5)
        cases.assert_close(model, other, rtol=1e-5)
    assert expected["distillation_weight"] == [1, 1]


def test_no_file_and_no_list_of_weights_knows_of_it(tmp_path):
    teacher = _model()
    before = [value.copy() for value in teacher.get_weights()]
    model = cases.codistill(
        cases.linear(),
        tfdistill.teachers.FixedTeacher(teacher),
        optimizer="adam",
    )
    cases.fit(model, _X, _Y)
    own = [v.path for v in model.student.variables]
    assert [v.path for v in model.weights] == own
    # The counter and the rate, and of each weight two moments.
    assert len(model.optimizer.variables) == 2 + 2 * len(own)
    cases.assert_close(teacher, before)
    assert teacher.trainable and teacher.trainable_weights
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras")
    cases.assert_close(loaded, model.student)


def test_it_stays_as_it_was_when_fit_began():
    """Even if it is the student itself."""
    student = cases.linear()
    model = cases.codistill(student, tfdistill.teachers.FixedTeacher(student))
    before = student(_X).numpy()
    cases.fit(model, _X, _Y, epochs=2)
    (found,), _ = cases.outputs_of_teachers(model, _X)
    np.testing.assert_allclose(found, before, rtol=1e-5)
    assert np.abs(student(_X) - before).max() > 1e-3


def test_outputs_are_found_by_name_and_in_any_precision():
    def two(order, dtype):
        inputs = keras.Input((cases.NUM_FEATURES,))
        layers = {n: keras.layers.Dense(2, dtype=dtype) for n in order}
        return keras.Model(inputs, {n: y(inputs) for n, y in layers.items()})

    teacher = two("ba", "bfloat16")
    model = tfdistill.CodistillModel(
        two("ab", "float32"), teachers=tfdistill.teachers.FixedTeacher(teacher)
    )
    model.compile(
        "sgd", distillation_loss=tfdistill.losses.ForwardKL(from_logits=True)
    )
    cases.prepare(model, _X)
    soft = cases.ask(model, _X)
    for found, name in zip(soft.outputs, "ab", strict=True):
        np.testing.assert_allclose(
            found[0], tf.cast(teacher(_X)[name], tf.float32), rtol=1e-2
        )


def _of_other_inputs():
    return keras.Sequential([keras.Input((9,)), keras.layers.Dense(3)])


def _with_code():
    inputs = keras.Input((cases.NUM_FEATURES,))
    hidden = keras.layers.Lambda(lambda x: 2 * x)(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(hidden))


def _with_nan():
    teacher = _model()
    teacher.layers[-1].bias.assign([0, np.nan, 0])
    return teacher


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cases.linear(classes=4), r"outputs is \(None, 3\); found .*4"),
        (_of_other_inputs, "the student's inputs .*shape"),
        (_with_code, "[Ll]ambda"),
        (_with_nan, "finite .* 'big' with NaN .*/bias"),
    ],
)
def test_what_cannot_teach_is_refused(build, message, tmp_path):
    build().save(tmp_path / "a.keras")
    with pytest.raises(ValueError, match=message):
        _trained(tmp_path / "a.keras")
