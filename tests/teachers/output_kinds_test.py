"""Teachers of another scale than the student's are refused, in both ways."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import labels
from tfdistill.system import keras_internals
from tfdistill.teachers import output_kinds

_X, _Y = cases.data(32)
_Cross, _Binary = (
    keras.losses.SparseCategoricalCrossentropy,
    keras.losses.BinaryCrossentropy,
)


def _model(activation=None, units=3):
    """A teacher, or a student."""
    inputs = keras.Input((cases.NUM_FEATURES,))
    if activation == "by hand":
        powers = keras.ops.exp(keras.layers.Dense(units)(inputs))
        outputs = powers / keras.ops.sum(powers, axis=-1, keepdims=True)
    elif activation == "scaled":
        outputs = keras.layers.Dense(units, bias_initializer="normal")(inputs)
        outputs = keras.layers.Rescaling(5.0)(outputs)
    else:
        outputs = keras.layers.Dense(units, activation=activation)(inputs)
    return keras.Model(inputs, outputs, name="big")


def _fit(student, teacher, dataset, *, loss=None):
    is_binary = student.output_shape[-1] == 1
    from_logits = student.layers[-1].activation is keras.activations.linear
    psi = tfdistill.losses.SoftTargetCrossEntropy()
    if is_binary:
        psi = tfdistill.losses.BinarySoftTargetCrossEntropy()
    model = tfdistill.CodistillModel(student, teachers=teacher)
    task = (_Binary if is_binary else _Cross)(from_logits=from_logits)
    model.compile("sgd", task, distillation_loss=loss or psi)
    return model.fit(dataset, verbose=0)


def _given(model, how, dataset, tmp_path):
    """The teacher, and the data with what it needs of them."""
    if how == "labels":
        labels.write(dataset, model, tmp_path / "labels")
        dataset = dataset.apply(labels.read(tmp_path / "labels"))
        return tfdistill.teachers.LabelTeacher("labels"), dataset
    if how == "saved":
        model.export(tmp_path / how, verbose=False)
        model = tmp_path / how
    return tfdistill.teachers.FixedTeacher(model), dataset


_ENDS = [
    (None, "softmax"),
    ("softmax", None),
    (None, "by hand"),
    ("softmax", "scaled"),
    (None, "sigmoid"),
    ("sigmoid", None),
]


# A model is known by its ends, and what comes as numbers by these.
@pytest.mark.parametrize(
    "student, theirs, how",
    [
        *((*ends, "model") for ends in _ENDS),
        *((*ends, "labels") for ends in _ENDS[:2]),
        *((*ends, "saved") for ends in _ENDS[1:2]),
    ],
)
def test_a_teacher_of_another_scale_is_refused(student, theirs, how, tmp_path):
    units = 1 if "sigmoid" in (student, theirs) else 3
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y % (units + 1)))
    dataset = dataset.batch(16)
    given = _given(_model(theirs, units), how, dataset, tmp_path)
    wanted = "probabilities" if student else "logits"
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError),
        match=f"must give what the student does, {wanted}",
    ):
        _fit(_model(student, units), *given)


def test_a_teacher_of_the_same_scale_teaches(tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y)).batch(16)
    given = _given(_model("softmax"), "saved", dataset, tmp_path)
    logs = _fit(_model("softmax"), *given).history
    assert logs["distillation_weight"] == [1]


def test_a_regression_from_0_to_1_may_have_a_sigmoid():
    dataset = tf.data.Dataset.from_tensor_slices((_X, _Y / 3)).batch(16)
    model = tfdistill.CodistillModel(
        _model(units=1),
        teachers=tfdistill.teachers.FixedTeacher(_model("sigmoid", 1)),
    )
    loss = tfdistill.losses.LogitsMeanSquaredError(from_logits=True)
    model.compile("sgd", "mse", distillation_loss=loss)
    logs = model.fit(dataset, verbose=0).history
    assert logs["distillation_weight"] == [1]


def test_a_few_rows_that_add_up_to_1_may_be_logits():
    rows = np.tile(np.array([[0.25, 0.5, 0.25]], np.float32), [4, 1])
    loss = tfdistill.losses.ForwardKL(from_logits=True)
    (found,) = output_kinds.checked("a", [tf.constant(rows)], [loss])
    np.testing.assert_array_equal(found, rows)
    with pytest.raises(tf.errors.InvalidArgumentError, match="logits"):
        output_kinds.checked("a", [tf.constant(np.tile(rows, [2, 1]))], [loss])


@pytest.mark.parametrize(
    ("activation", "from_logits"), [(None, True), ("softmax", False)]
)
def test_how_the_student_ends_says_what_a_loss_of_its_own_does_not(
    activation, from_logits
):
    def own_loss(labels, outputs):
        return keras.ops.mean(outputs, axis=-1)

    teacher = tfdistill.teachers.FixedTeacher(_model(activation))
    model = tfdistill.CodistillModel(_model(activation), teachers=teacher)
    psi = tfdistill.losses.SoftTargetCrossEntropy()
    model.compile("sgd", own_loss, distillation_loss=psi)
    model.fit(_X, _Y, verbose=0)
    (found,) = model.teachers._term.losses
    assert found.from_logits is from_logits


def test_a_student_whose_end_says_nothing_is_refused():
    model = tfdistill.CodistillModel(
        _model("by hand"),
        teachers=tfdistill.teachers.FixedTeacher(_model("by hand")),
    )
    psi = tfdistill.losses.SoftTargetCrossEntropy()
    model.compile("sgd", lambda y, p: p - p, distillation_loss=psi)
    with pytest.raises(ValueError, match="the student's last layer"):
        model.fit(_X, _Y, verbose=0)


@pytest.mark.parametrize(
    "name", ["bce", "BCE", "BinaryCrossentropy", "categorical_crossentropy"]
)
def test_a_task_loss_by_any_name_takes_probabilities(name):
    assert output_kinds.gives_logits(keras_internals.loss_of(name)) is False
