"""Teachers that come with the data teach as the models that made them."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.labels import attached
from tfdistill.labels import forms

_X, _Y = cases.data(32)


def _data(label=None, *, form=None, batch_size=8, **expires):
    """Batches that carry what a model says of them, as labels."""
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y))
    dataset = dataset.batch(batch_size, drop_remainder=True)
    if label is None:
        return dataset
    form = form or forms.Form()
    weights = [tf.constant(w) for w in label.get_weights()]

    def add(x, y):
        rows = tf.shape(x)[0]
        kept = form.encode(x @ weights[0] + weights[1])
        return attached.attach(
            (x, y),
            {
                "big": attached.label(
                    [kept],
                    version=tf.zeros([rows], tf.int64),
                    **{n: tf.fill([rows], v) for n, v in expires.items()},
                )
            },
        )

    return dataset.map(add)


def _trained(teachers, data, strategy=None):
    with (strategy or tf.distribute.get_strategy()).scope():
        model = cases.codistill(cases.linear(), teachers)
    history = model.fit(data, epochs=2, verbose=0).history
    return history, model


def _same(found, expected, rtol=1e-6):
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=rtol)
    for value, same in zip(
        found[1].get_weights(), expected[1].get_weights(), strict=True
    ):
        np.testing.assert_allclose(value, same, rtol=rtol)


def test_labels_teach_as_the_model_in_the_step_does():
    teacher = cases.linear(5)
    expected = _trained(tfdistill.TeacherSet(models=[teacher]), _data())
    assert expected[0]["distillation_weight"] == [1, 1]
    labelled = tfdistill.TeacherSet(labels=["big"])
    _same(_trained(labelled, _data(teacher)), expected)
    # All classes are top classes.
    labelled = tfdistill.TeacherSet(labels=["big"])
    whole = _data(teacher, form=forms.Form(top_k=3))
    _same(_trained(labelled, whole), expected, rtol=1e-4)


def test_two_replicas_learn_from_labels_as_one_device(two_replicas):
    teacher = cases.linear(5)
    expected = _trained(tfdistill.TeacherSet(models=[teacher]), _data())
    labelled = tfdistill.TeacherSet(labels=["big"])
    _same(_trained(labelled, _data(teacher), two_replicas), expected, rtol=1e-5)


def test_rows_that_have_expired_count_as_absent():
    teacher, last = cases.linear(5), 3
    data = _data(teacher, expires_step=np.int64(last))
    weights = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(float(logs["distillation_weight"]))

    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    model.fit(data, epochs=2, verbose=0, callbacks=[Watch()])
    assert weights == [1.0] * (last + 1) + [0.0] * (8 - last - 1)
    alone, _ = _trained(tfdistill.TeacherSet(), _data())
    late = _data(teacher, expires_secs=np.float64(time.time() - 1))
    found, _ = _trained(tfdistill.TeacherSet(labels=["big"]), late)
    assert found["distillation_weight"] == [0, 0]
    np.testing.assert_allclose(found["task_loss"], alone["loss"], rtol=1e-6)
    # Nobody has failed: nothing is dropped, and good rows teach again.
    assert model.teachers.status()[0]["health"] == "good"


def test_evaluate_and_predict_take_the_same_data():
    teacher = cases.linear(5)
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big"])
    )
    model.fit(_data(teacher), verbose=0)
    assert model.evaluate(_data(teacher), verbose=0) == pytest.approx(
        model.evaluate(_data(), verbose=0)
    )
    np.testing.assert_array_equal(
        model.predict(_data(teacher), verbose=0),
        model.predict(_data(), verbose=0),
    )


def test_data_without_the_labels_are_refused_with_the_remedy():
    model = cases.codistill(
        cases.linear(), tfdistill.TeacherSet(labels=["big", "other"])
    )
    with pytest.raises(ValueError, match="labels of the teacher 'other'"):
        model.fit(_data(cases.linear(5)), verbose=0)
    model = cases.codistill(
        cases.linear(classes=4), tfdistill.TeacherSet(labels=["big"])
    )
    with pytest.raises(ValueError, match="shape of the student's output"):
        model.fit(_data(cases.linear(5)), verbose=0)
    for wrong in (["a", "a"], [""], [3]):
        with pytest.raises(ValueError, match="names of teachers, each once"):
            tfdistill.TeacherSet(labels=wrong)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
