"""Teachers that come with the data teach as the models that made them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import teachers as kinds
from tfdistill.labels import attached
from tfdistill.labels import forms

_X, _Y = cases.data(32)


def _data(label=None, *, name="big", form=None, batch_size=8, **expires):
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
                name: attached.label(
                    [kept],
                    version=tf.fill([rows], tf.constant(2, tf.int64)),
                    **{n: tf.fill([rows], v) for n, v in expires.items()},
                )
            },
        )

    return dataset.map(add)


def _labelled_before_batch(x, y):
    """An element whose examples were taken for batches of numbers."""
    version = tf.zeros([8, 4], tf.int64)
    label = {**x.labels["big"], "version": version}
    return attached.attach((x.inputs, y), {"big": label})


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


def test_labels_teach_as_the_model_in_the_step_does(two_replicas):
    teacher = cases.linear(5)
    expected = _trained(kinds.FixedTeacher(teacher), _data())
    assert expected[0]["distillation_weight"] == [1, 1]
    labelled = kinds.LabelTeacher("big")
    _same(_trained(labelled, _data(teacher)), expected)
    labelled = kinds.LabelTeacher("big")
    _same(_trained(labelled, _data(teacher), two_replicas), expected, rtol=1e-5)
    # All classes are top classes.
    labelled = kinds.LabelTeacher("big")
    whole = _data(teacher, form=forms.Form(top_k=3))
    _same(_trained(labelled, whole), expected, rtol=1e-4)


def test_rows_that_have_expired_count_as_absent():
    teacher, last = cases.linear(5), 3
    data = _data(teacher, expires_step=np.int64(last))
    weights = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(float(logs["distillation_weight"]))

    model = cases.codistill(cases.linear(), kinds.LabelTeacher("big"))
    model.fit(data, epochs=2, verbose=0, callbacks=[Watch()])
    assert weights == [1.0] * (last + 1) + [0.0] * (8 - last - 1)
    # Nothing is dropped, and good rows teach again.
    (status,) = model.teachers.status()
    assert (status["health"], status["share"]) == ("absent", 0.0)


def test_evaluate_and_predict_take_the_same_data():
    teacher = cases.linear(5)
    model = cases.codistill(cases.linear(), kinds.LabelTeacher("big"))
    model.fit(_data(teacher), verbose=0)
    assert model.evaluate(_data(teacher), verbose=0) == pytest.approx(
        model.evaluate(_data(), verbose=0)
    )
    np.testing.assert_array_equal(
        model.predict(_data(teacher), verbose=0),
        model.predict(_data(), verbose=0),
    )


def _two_heads(seed):
    """Probabilities of classes, and logits of others."""
    inputs = keras.Input((4,))
    heads = [
        keras.layers.Dense(3, activation="softmax", name="p")(inputs),
        keras.layers.Dense(2, name="q")(inputs),
    ]
    model = keras.Model(inputs, heads)
    cases.randomize(model, seed)
    return model


def test_each_output_is_taken_as_its_own_loss_does():
    teacher, y = _two_heads(5), {"p": _Y, "q": _Y % 2}
    parts = [forms.Form(top_k=3, from_logits=v) for v in (False, True)]

    def add(x, y):
        said = zip(parts, teacher(x), strict=True)
        kept = [form.encode(output) for form, output in said]
        label = attached.label(kept, version=tf.zeros([8], tf.int64))
        return attached.attach((x, y), {"big": label})

    def trained(teachers, data):
        model = tfdistill.CodistillModel(_two_heads(1), teachers=teachers)
        loss = keras.losses.SparseCategoricalCrossentropy
        model.compile(
            "sgd",
            {"p": loss(), "q": loss(from_logits=True)},
            distillation_loss={
                name: tfdistill.losses.SoftTargetCrossEntropy()
                for name in ("p", "q")
            },
        )
        return model.fit(data, epochs=2, verbose=0).history, model

    data = tf.data.Dataset.from_tensor_slices((_X, y)).batch(8)
    expected = trained(kinds.FixedTeacher(teacher), data)
    labelled = kinds.LabelTeacher("big")
    _same(trained(labelled, data.map(add)), expected, rtol=1e-4)


def test_data_without_the_labels_are_refused_with_the_remedy():
    model = cases.codistill(
        cases.linear(), list(map(kinds.LabelTeacher, ("big", "other")))
    )
    with pytest.raises(ValueError, match="labels of the teacher 'other'"):
        model.fit(_data(cases.linear(5)), verbose=0)
    model = cases.codistill(cases.linear(classes=4), kinds.LabelTeacher("big"))
    with pytest.raises(ValueError, match="shape of the student's output"):
        model.fit(_data(cases.linear(5)), verbose=0)
    model = cases.codistill(cases.linear(), kinds.LabelTeacher("big"))
    with pytest.raises(ValueError, match="call `batch` first, and once"):
        model.fit(_data(cases.linear(5)).map(_labelled_before_batch), verbose=0)
