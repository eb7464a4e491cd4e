"""What docs/from_distiller.md says of `keras.distillation`, measured.

A test of a defect fails when Keras corrects it: then the page must change.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

kd = pytest.importorskip("keras.distillation", reason="needs Keras >= 3.12")

_X, _Y = cases.data()
_T = 3.0


def _net(width, seed, *, before=(), dtype=None, **options):
    inputs = keras.Input((4,))
    hidden = inputs
    for layer in before:
        hidden = layer(hidden)
    hidden = keras.layers.Dense(
        width, activation="tanh", name="hidden", dtype=dtype, **options
    )(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3, dtype=dtype)(hidden))
    cases.randomize(model, seed)
    return model


def _task_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _logits(loss="instance"):
    if loss == "instance":
        loss = keras.losses.KLDivergence()
    return kd.LogitsDistillation(temperature=_T, loss=loss)


def _features():
    return kd.FeatureDistillation(
        teacher_layer_name="hidden", student_layer_name="hidden"
    )


def _distilled(student, teacher, how=None, *, loss=None, y=None, **options):
    """Three steps of a Distiller; returns it and its logs."""
    model = kd.Distiller(teacher, student, how or _logits())
    model.compile(
        keras.optimizers.SGD(0.5),
        loss or _task_loss(),
        run_eagerly=options.pop("run_eagerly", False),
    )
    history = model.fit(
        _X,
        _Y if y is None else y,
        batch_size=16,
        epochs=options.pop("epochs", 3),
        shuffle=False,
        verbose=0,
        **options,
    )
    return model, history.history


def _difference(one, other):
    pairs = zip(one.get_weights(), other.get_weights(), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs)


@pytest.mark.parametrize(
    ("width", "how", "ours"),
    [
        (
            5,
            _logits,
            {"distillation_loss": tfdistill.losses.ForwardKL(temperature=_T)},
        ),
        (
            7,
            _features,
            {
                "feature_loss": tfdistill.losses.FeatureDistillation(
                    [("hidden", "hidden")]
                )
            },
        ),
    ],
    ids=["logits", "features"],
)
def test_the_same_training_is_equal(width, how, ours):
    teacher = _net(7, 3)
    before, _ = _distilled(_net(width, 1), teacher, how())
    model = tfdistill.CodistillModel(
        _net(width, 1), teachers=tfdistill.teachers.FixedTeacher(teacher)
    )
    model.compile(
        keras.optimizers.SGD(0.5),
        _task_loss(),
        loss_weights=0.5,
        distillation_weight=0.5,
        **ours,
    )
    cases.fit(model, _X, _Y, batch_size=16, epochs=3)
    assert _difference(model.student, before.student) < 1e-6
    assert _difference(model.student, _net(width, 1)) > 1e-3


def test_kl_by_name_takes_no_softmax():
    teacher, student = 4 * _X[:, :3], 4 * _X[:, 1:]
    soft = [cases.softmax(z / _T) for z in (teacher, student)]
    wanted = _T**2 * np.mean((soft[0] * np.log(soft[0] / soft[1])).sum(-1))
    right = _logits().compute_loss(teacher, student)
    assert float(right) == pytest.approx(wanted, rel=1e-4)
    by_default = kd.LogitsDistillation(temperature=_T)
    assert abs(by_default.compute_loss(teacher, student) - wanted) > 0.5
    negative = [-np.abs(z) - 1 for z in (teacher, student)]
    assert float(by_default.compute_loss(*negative)) == 0


def test_weights_regularizers_and_teachers_after_it():
    teacher = _net(7, 3)
    plain, _ = _distilled(_net(5, 1), teacher)
    assert not teacher.trainable_weights
    nothing = np.zeros(len(_X), "float32")
    other, _ = _distilled(_net(5, 1), teacher, sample_weight=nothing)
    assert _difference(plain.student, other.student) == 0
    regularizer = keras.regularizers.L2(10.0)
    other, _ = _distilled(_net(5, 1, kernel_regularizer=regularizer), teacher)
    assert _difference(plain.student, other.student) == 0


def test_its_file_holds_the_teacher(tmp_path):
    model, _ = _distilled(_net(5, 1), _net(7, 3), epochs=1)
    model.save(tmp_path / "a.keras")
    loaded = keras.models.load_model(tmp_path / "a.keras", compile=False)
    assert len(loaded.weights) == 2 * len(loaded.student.weights)


def test_two_replicas_take_another_step(two_replicas):
    one_hot = np.eye(3, dtype="float32")[_Y]
    moved, logged = [], []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            student = _net(5, 1)
            start = student.get_weights()
            _, logs = _distilled(
                student, _net(7, 3), loss="mse", y=one_hot, epochs=1
            )
        pairs = zip(student.get_weights(), start, strict=True)
        moved.append(np.concatenate([(a - b).ravel() for a, b in pairs]))
        logged.append(logs["distillation_loss"][0])
    assert np.linalg.norm(moved[1]) > 1.3 * np.linalg.norm(moved[0])
    assert logged[1] == pytest.approx(logged[0] / 2, rel=1e-4)


class _Count(keras.layers.Layer):
    """Counts how often it runs, and whether in training."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, inputs, training=None):
        self.calls.append(training)
        return inputs


def test_who_runs_how_often():
    asked, run = _Count(), _Count()
    teacher, student = _net(7, 3, before=[asked]), _net(7, 1, before=[run])
    model, _ = _distilled(student, teacher, _features(), run_eagerly=True)
    run.calls.clear()
    asked.calls.clear()
    model.fit(_X, _Y, batch_size=16, verbose=0)
    assert run.calls == [True, True] and asked.calls == [False]
    model.evaluate(_X, _Y, batch_size=16, verbose=0)
    assert asked.calls == [False, False]


def test_what_it_refuses():
    with pytest.raises(ValueError, match="dtypes must match"):
        kd.Distiller(_net(7, 3, dtype="bfloat16"), _net(5, 1), _logits())
    with pytest.raises(ValueError, match="must be a keras.Model"):
        kd.Distiller([_net(7, 3), _net(7, 4)], _net(5, 1), _logits())
    with pytest.raises(ValueError, match="Dimensions must be equal"):
        _distilled(_net(5, 1), _net(7, 3), _features())
