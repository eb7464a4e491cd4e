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
    return history, model.get_weights()


def test_labels_teach_as_the_model_in_the_step_does(two_replicas):
    teacher = cases.linear(5)
    expected = _trained(kinds.FixedTeacher(teacher), _data())
    assert expected[0]["distillation_weight"] == [1, 1]
    labelled = _trained(kinds.LabelTeacher("big"), _data(teacher), two_replicas)
    cases.assert_close(labelled, expected, rtol=1e-5)
    # All classes are top classes.
    top = _data(teacher, form=forms.Form(top_k=3))
    labelled = _trained(kinds.LabelTeacher("big"), top)
    cases.assert_close(labelled, expected, rtol=1e-4)


def test_rows_that_have_expired_count_as_absent():
    teacher, last, weights = cases.linear(5), 3, []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            weights.append(float(logs["distillation_weight"]))

    data = _data(teacher, expires_step=np.int64(last))
    model = cases.codistill(cases.linear(), kinds.LabelTeacher("big"))
    model.fit(data, epochs=2, verbose=0, callbacks=[Watch()])
    assert weights == [1.0] * (last + 1) + [0.0] * (8 - last - 1)
    # Nothing is dropped, and good rows teach again.
    (status,) = model.teachers.status()
    assert (status["health"], status["share"]) == ("absent", 0.0)
    # Evaluate and predict take the same data.
    assert model.evaluate(data, verbose=0) == pytest.approx(
        model.evaluate(_data(), verbose=0)
    )
    np.testing.assert_array_equal(
        model.predict(data, verbose=0), model.predict(_data(), verbose=0)
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


@pytest.mark.deep
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
        history = model.fit(data, epochs=2, verbose=0).history
        return history, model.get_weights()

    data = tf.data.Dataset.from_tensor_slices((_X, y)).batch(8)
    expected = trained(kinds.FixedTeacher(teacher), data)
    found = trained(kinds.LabelTeacher("big"), data.map(add))
    cases.assert_close(found, expected, rtol=1e-4)


def test_data_without_the_labels_are_refused_with_the_remedy():
    data = _data(cases.linear(5))
    for classes, names, given, message in (
        (3, ("big", "other"), data, "labels of the teacher 'other'"),
        (4, ("big",), data, "shape of the student's output"),
        (3, ("big",), data.map(_labelled_before_batch), "`batch` first"),
    ):
        teachers = list(map(kinds.LabelTeacher, names))
        model = cases.codistill(cases.linear(classes=classes), teachers)
        with pytest.raises(ValueError, match=message):
            model.fit(given, verbose=0)
