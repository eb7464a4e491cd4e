"""On which rows a student and its teachers are to agree."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill.teachers import rows

_STEP = 7


def _table(dtype, *shape):
    """Rows whose values tell their row, and their column."""
    count = int(np.prod(shape))
    return tf.cast(tf.reshape(tf.range(count), shape), dtype)


def test_columns_of_mixed_rows_are_those_of_two_neighbours():
    text = tf.strings.as_string(_table(tf.int32, 7, 20))
    inputs = {
        "ids": _table(tf.int64, 7, 20),
        "numbers": _table(tf.float32, 7, 20),
        "text": text,
        "flat": _table(tf.int32, 7),
    }
    found = rows.mixed(inputs, _STEP)
    for name, values in inputs.items():
        first, second = values[:6:2].numpy(), values[1::2].numpy()
        is_first, is_second = found[name] == first, found[name] == second
        assert np.all(np.asarray(is_first) ^ np.asarray(is_second)), name
        # One draw for all rows, so that replicas make the same of them.
        assert np.all(np.asarray(is_first) == np.asarray(is_first)[:1]), name
    both_ways = np.asarray(found["ids"] == inputs["ids"][:6:2])[0]
    assert 0 < both_ways.sum() < 20
    # Other columns of other inputs, and in other steps.
    numbers = np.asarray(found["numbers"] == inputs["numbers"][:6:2])[0]
    later = rows.mixed(inputs, _STEP + 1)["ids"] == inputs["ids"][:6:2]
    assert (numbers != both_ways).any()
    assert (np.asarray(later)[0] != both_ways).any()


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_pictures_are_weighted_sums(dtype):
    pictures = _table(dtype, 4, 3, 3, 2)
    found = rows.mixed(pictures, _STEP)
    share = float(tf.random.stateless_uniform([], [7, 0]))
    first, second = pictures.numpy()[::2], pictures.numpy()[1::2]
    expected = share * first + (1 - share) * second
    assert found.dtype == dtype
    atol = 1e-5 if dtype == "float32" else 0.501
    np.testing.assert_allclose(found, expected, atol=atol)


def _model(agree_on, teacher, *, units=3):
    keras.utils.set_random_seed(1)
    student = keras.Sequential(
        [
            keras.Input([4]),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(units),
        ]
    )
    model = tfdistill.CodistillModel(
        student,
        teachers=tfdistill.teachers.FixedTeacher(teacher),
        agree_on=agree_on,
    )
    return student, model


def _fit(agree_on, weight, x, y, sample_weight=None, **options):
    student, model = _model(agree_on, cases.linear(3), **options)
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
        distillation_weight=weight,
    )
    logs = cases.fit(model, x, y, sample_weight=sample_weight, batch_size=8)
    return student, logs


def test_what_is_trained_on_labels_stays_as_it_was():
    """Mixed rows move no statistics and draw no mask of a dropout."""
    x, y = cases.data(16)
    alone, _ = _fit("batch", 0.0, x, y)
    for agree_on in ("mixed", "both", lambda inputs: inputs[:3] * 2):
        student, _ = _fit(agree_on, 0.0, x, y)
        for found, expected in zip(
            student.get_weights(), alone.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "agree_on", ["mixed", "both", lambda inputs: inputs[:3] * 2]
)
def test_the_loss_is_that_of_the_rows(agree_on):
    """Against the loss by NumPy, of a student that does not move."""
    x, y = cases.data(7)
    weight = np.linspace(0, 3, 7).astype("float32")
    teacher = cases.linear(3)
    student, logs = cases.linear(1), None
    model = tfdistill.CodistillModel(
        student,
        teachers=tfdistill.teachers.FixedTeacher(teacher),
        agree_on=agree_on,
    )
    model.compile(
        keras.optimizers.SGD(0.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
    )
    logs = cases.fit(model, x, y, sample_weight=weight, batch_size=7)
    # The first step has number 0.
    mixed = rows.mixed(tf.constant(x), 0).numpy()
    pairs = (weight[:6:2] + weight[1::2]) / 2
    asked, counts = {
        "mixed": (mixed, pairs),
        "both": (
            np.concatenate([x[::2], mixed]),
            np.concatenate([weight[::2], pairs]),
        ),
    }.get(agree_on if isinstance(agree_on, str) else "", (x[:3] * 2, [1] * 3))
    targets = cases.softmax(teacher(asked).numpy())
    own = np.log(cases.softmax(student(asked).numpy()))
    expected = -(targets * own).sum(-1) @ np.asarray(counts) / len(asked)
    np.testing.assert_allclose(logs["distillation_loss"], [expected], rtol=1e-5)


def test_what_cannot_be_mixed_is_refused():
    x, y = cases.data(16)
    with pytest.raises(ValueError, match="must be one of 'batch', 'mixed'"):
        _model("rows", cases.linear(3))
    with pytest.raises(ValueError, match="may not have answers for other rows"):
        tfdistill.CodistillModel(
            cases.linear(1),
            teachers=tfdistill.teachers.LabelTeacher("labels"),
            agree_on="both",
        )
    bags = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2])
    with pytest.raises(ValueError, match="Only dense tensors can be mixed"):
        rows.asked(
            rows.BOTH,
            rows.Rows(
                inputs=bags,
                outputs=x,
                taught=x,
                sample_weight=None,
                targets=y,
                count=None,
            ),
            lambda inputs: (inputs, inputs),
            _STEP,
        )
