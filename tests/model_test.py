"""The model that learns from its teachers, in one process."""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import contrib
from tfdistill import losses
from tfdistill import mixing
from tfdistill import teachers
from tfdistill.labels import attached

_X, _Y = cases.data()


def _taught(exchange, student=None, **kwargs):
    """A prepared model with one teacher: the same student, other values."""
    is_linear = student is None
    student = student or cases.linear(0)
    model = cases.codistill(student, cases.peers(exchange), **kwargs)
    cases.prepare(model, _X, _Y)
    if is_linear:
        cases.publish(exchange, _peer(), spec=model.graph.input_spec)
        cases.load(model, 10)
        return model
    before = [v.numpy() for v in student.variables]
    cases.randomize(student, 1)
    cases.publish(exchange, student, spec=model.graph.input_spec)
    for variable, value in zip(student.variables, before, strict=True):
        variable.assign(value)
    cases.load(model, 10)
    return model


@functools.cache
def _peer():
    """Traced once for all tests."""
    return cases.linear(1)


def _values(model):
    return [v.numpy() for v in model.student.variables]


# ---- the loss, by hand ----


def _gradient(
    student, x, y, teachers, *, weight, temperature, rows, soft_rows=None
):
    """d loss / d logits of a linear softmax student, `[n, classes]`."""
    kernel, bias = [v.numpy().astype("float64") for v in student.variables]
    logits = x @ kernel + bias
    task = cases.softmax(logits) - np.eye(cases.NUM_CLASSES)[y]
    target = sum(
        share * cases.softmax((x @ k + b) / temperature)
        for share, (k, b) in teachers
    ) / sum(share for share, _ in teachers)
    soft = temperature * (cases.softmax(logits / temperature) - target)
    soft_rows = rows if soft_rows is None else soft_rows
    return (task * rows[:, None] + weight * soft * soft_rows[:, None]) / len(x)


def _teacher_values(seed):
    return [v.numpy().astype("float64") for v in cases.linear(seed).variables]


def test_one_update_by_hand(exchange):
    temperature, shares = 2.0, (0.25, 2.0)
    for group in (1, 2):
        cases.publish(exchange, cases.linear(group), group=group)
    model = cases.codistill(
        cases.linear(0),
        [
            cases.peers(exchange, [group], weight=share)
            for group, share in enumerate(shares, 1)
        ],
        distillation_loss=losses.SoftTargetCrossEntropy(
            temperature=temperature
        ),
        distillation_weight=0.7,
    )
    rows = np.linspace(0, 2, 16).astype("float32")
    cases.prepare(model, _X, _Y, sample_weight=rows)
    cases.load(model, 10, 10)
    gradient = _gradient(
        model.student,
        _X,
        _Y,
        [(shares[0], _teacher_values(1)), (shares[1], _teacher_values(2))],
        weight=0.7,
        temperature=temperature,
        rows=rows,
    )
    kernel, bias = _values(model)
    logs = cases.fit(model, _X, _Y, batch_size=16, sample_weight=rows)
    expected = kernel - 0.1 * _X.T @ gradient, bias - 0.1 * gradient.sum(axis=0)
    cases.assert_close(_values(model), expected, atol=1e-6)
    np.testing.assert_allclose(
        logs["loss"][0],
        logs["task_loss"][0] + 0.7 * logs["distillation_loss"][0],
        rtol=1e-5,
    )


def test_rows_without_a_label_are_distilled(exchange):
    model = _taught(
        exchange, distillation_weight=0.7, distillation_sample_weights=False
    )
    rows = (np.arange(16) % 2).astype("float32")
    labels = np.where(rows, _Y, 0)
    gradient = _gradient(
        model.student,
        _X,
        labels,
        [(1.0, _teacher_values(1))],
        weight=0.7,
        temperature=1.0,
        rows=rows,
        soft_rows=np.ones(16),
    )
    kernel, _ = _values(model)
    cases.fit(model, _X, labels, batch_size=16, sample_weight=rows)
    expected = kernel - 0.1 * _X.T @ gradient
    np.testing.assert_allclose(_values(model)[0], expected, atol=1e-6)


def test_the_logs_are_means_over_the_epoch(exchange):
    model = _taught(exchange, distillation_weight=0.5)
    logs = cases.fit(model, _X, _Y, batch_size=5, epochs=2)
    for loss, task, soft in zip(
        logs["loss"], logs["task_loss"], logs["distillation_loss"], strict=True
    ):
        np.testing.assert_allclose(loss, task + 0.5 * soft, rtol=1e-5)
        assert soft > 0
    assert logs["distillation_weight"] == [0.5, 0.5]
    # 4 batches an epoch, the last of which began at step 3, then 7.
    assert logs["teacher_staleness"] == [3 - 10, 7 - 10]


def test_evaluate_and_predict_concern_the_student_alone(exchange):
    model = _taught(exchange, metrics=["accuracy"])
    found = model.evaluate(_X, _Y, verbose=0, return_dict=True)
    assert set(found) == {"loss", "accuracy"}
    plain = cases.codistill(cases.linear(0), metrics=["accuracy"])
    expected = plain.evaluate(_X, _Y, verbose=0, return_dict=True)
    assert found == pytest.approx(expected)
    np.testing.assert_allclose(
        model.predict(_X, verbose=0), model.student(_X), rtol=1e-6
    )


def test_without_teachers_it_trains_as_keras_does():
    def run(wrap):
        keras.utils.set_random_seed(1)
        model = cases.deep(0)
        if wrap:
            model = tfdistill.CodistillModel(model)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
        logs = cases.fit(
            model, _X, _Y, epochs=3, batch_size=5, callbacks=[], shuffle=True
        )
        return logs, model.get_weights()

    logs, weights = run(True)
    expected_logs, expected = run(False)
    assert logs.keys() - expected_logs.keys() == {
        "task_loss",
        "distillation_weight",
        "teacher_staleness",
        "distillation_loss",
    }
    for key, value in expected_logs.items():
        np.testing.assert_allclose(logs[key], value, rtol=1e-6)
    cases.assert_close(weights, expected)


def test_without_a_task_the_student_learns_from_its_teachers(exchange):
    cases.publish(exchange, cases.linear(1))
    model = tfdistill.CodistillModel(
        cases.linear(0), teachers=cases.peers(exchange)
    )
    model.compile(
        keras.optimizers.SGD(0.1),
        distillation_loss=losses.SoftTargetCrossEntropy(from_logits=True),
        distillation_weight=0.7,
    )
    cases.prepare(model, _X)
    cases.load(model, 10)
    kernel, bias = _values(model)
    student, teacher = model.student(_X).numpy(), cases.linear(1)(_X).numpy()
    gradient = 0.7 * (cases.softmax(student) - cases.softmax(teacher)) / 16
    logs = cases.fit(model, _X, batch_size=16)
    expected = kernel - 0.1 * _X.T @ gradient, bias - 0.1 * gradient.sum(0)
    cases.assert_close(_values(model), expected, atol=1e-6)
    assert logs["task_loss"] == [0]
    assert logs["loss"] == pytest.approx([0.7 * logs["distillation_loss"][0]])
    plain = tfdistill.CodistillModel(cases.linear(0))
    plain.compile("sgd")
    with pytest.raises(ValueError, match="No loss to compute"):
        cases.fit(plain, _X, _Y, callbacks=[])


# ---- kinds of students ----


class Subclassed(keras.Model):
    """A student that is built by its first batch."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.drop = keras.layers.Dropout(0.5)
        self.top = keras.layers.Dense(3)

    def call(self, inputs, training=None):
        return self.top(self.drop(self.hidden(inputs), training=training))


def test_a_student_that_is_built_by_its_first_batch(exchange):
    model = _taught(exchange, Subclassed())
    logs = cases.fit(model, _X, _Y, epochs=2)
    assert logs["distillation_weight"] == [1, 1]
    assert logs["distillation_loss"][1] > 0


# ---- the student's files ----

_PLAIN = """
import sys
import keras
import numpy as np
root, inputs = sys.argv[1], np.load(sys.argv[1] + "/x.npy")
expected = np.load(root + "/expected.npy")
model = keras.models.load_model(root + "/student.keras")
assert type(model).__name__ == "Functional", type(model)
np.testing.assert_allclose(model(inputs), expected, rtol=1e-5)
model.load_weights(root + "/student.weights.h5")
np.testing.assert_allclose(model(inputs), expected, rtol=1e-5)
assert not any("tfdistill" in name for name in sys.modules)
print("same")
"""


def test_files_open_in_a_plain_keras(exchange, tmp_path):
    model = _taught(exchange, cases.deep(0))
    cases.fit(model, _X, _Y)
    np.save(tmp_path / "x.npy", _X)
    np.save(tmp_path / "expected.npy", model.student(_X))
    model.save(tmp_path / "student.keras")
    model.save_weights(tmp_path / "student.weights.h5")
    assert cases.run_python(_PLAIN, str(tmp_path)).strip() == "same"


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_that_would_lack_the_teachers_is_refused(exchange, copied):
    model = cases.codistill(cases.linear(), cases.peers(exchange))
    with pytest.raises(ValueError, match="must not be copied"):
        copied(model)
    alone = tfdistill.CodistillModel(cases.linear())
    found = copied(alone)
    found = pickle.loads(found) if copied is pickle.dumps else found
    np.testing.assert_allclose(found(_X), alone(_X), rtol=1e-6)


def test_keras_tracks_nothing_of_a_teacher(exchange):
    model = _taught(exchange)
    own = [v.path for v in model.student.variables]
    assert [v.path for v in model.weights] == own
    assert model.trainer.last.examples is None
    cases.fit(model, _X, _Y)
    tracked = {
        *(v.path for v in model.variables),
        *(v.path for v in model.optimizer.variables),
    }
    graph = tf.train.Checkpoint(model=model).write(exchange.root + "_all")
    for key, _ in tf.train.list_variables(graph):
        assert "codistillation" not in key and "_trainer" not in key, key
    found = {v.path for v in model.variables if v.path not in own}
    assert {path.split("/")[0] for path in found} <= {
        "loss",
        "task_loss",
        "distillation_loss",
    }
    assert not any("teacher" in path or "group_1" in path for path in tracked)


# ---- mistakes ----


def test_teachers_need_a_distillation_loss(exchange):
    model = tfdistill.CodistillModel(
        cases.linear(), teachers=cases.peers(exchange)
    )
    with pytest.raises(ValueError, match="distillation_loss.*None with 1"):
        model.compile("sgd", "mse")


@pytest.mark.parametrize("student", [cases.linear, None])
def test_a_student_is_a_model(student):
    with pytest.raises(ValueError, match="must be a keras.Model; received"):
        tfdistill.CodistillModel(student)


def test_teachers_that_nobody_will_load_are_told(exchange):
    model = cases.codistill(cases.linear(), cases.peers(exchange))
    with pytest.warns(UserWarning, match="no .*TeacherLoader"):
        cases.fit(model, _X, _Y, callbacks=[])


def _exporter(exchange):
    return cases.exporter(exchange, 100)


def _mixer(kind=mixing.WeightMixer, peers=(1,), **kwargs):
    return kind(mixing.ModelAveraging(), every_steps=100, peers=peers, **kwargs)


def _twice(make):
    def run(here, there):
        mixers = [_exporter(here), make(), make()]
        cases.fit(cases.codistill(cases.linear()), _X, _Y, callbacks=mixers)

    return run


def _learns_from_itself(kind, *, group=0):
    """By the environment it is group 0, and by the exporter another one."""

    def run(here, there):
        model = cases.codistill(cases.linear(), kind(here, peers=[group, 7]))
        exporter = cases.exporter(here, 100, group=group)
        cases.fit(model, _X, _Y, callbacks=[exporter, cases.never()])

    return run


def _mixes_with_itself(here, there):
    mixers = [_exporter(here), _mixer(peers=[0, 1])]
    cases.fit(cases.codistill(cases.linear()), _X, _Y, callbacks=mixers)


def _gives_a_class(here, there):
    callbacks = [tfdistill.callbacks.Backup]
    cases.fit(cases.codistill(cases.linear()), _X, _Y, callbacks=callbacks)


def _publishes_elsewhere(here, there):
    model = cases.codistill(cases.linear(), cases.peers(there))
    cases.fit(model, _X, _Y, callbacks=[_exporter(here), cases.never()])


def _distils_while_it_mixes(here, there):
    barrier = _mixer(contrib.MergeBarrier, held_out=(_X, _Y))
    model = cases.codistill(cases.linear(), cases.peers(here))
    callbacks = [_exporter(here), barrier, cases.never()]
    cases.fit(model, _X, _Y, callbacks=callbacks)


def _reads_no_labels(here, there):
    model = cases.codistill(
        cases.linear(), distillation_loss=losses.SoftTargetCrossEntropy()
    )
    label = {"outputs": ({"whole": model.student(_X)},), "version": [0] * 16}
    data = tf.data.Dataset.from_tensors((_X, _Y))
    cases.fit(model, data.map(lambda *e: attached.attach(e, {"big": label})))


def _misspells(method, name):
    def train(here, there):
        model = tfdistill.CodistillModel(
            cases.linear(), teachers=cases.peers(here)
        )
        getattr(model, method)(**{name: 1})

    return train


def _measures(metric, *, from_logits=True):
    def train(*_):
        loss = keras.losses.BinaryCrossentropy(from_logits=from_logits)
        given = metric() if callable(metric) else metric
        cases.codistill(cases.linear(), loss=loss, metrics=[given])

    return train


def _ends_in_logits(*_):
    model = tfdistill.DistributedModel(cases.linear())
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(_X, _Y, verbose=0)


def _trains_nothing(*_):
    student = cases.linear()
    student.trainable = False
    cases.fit(cases.codistill(student), _X, _Y)


def _compiles_the_inner_one(*_):
    student = cases.linear()
    student.compile("sgd", "mse")
    tfdistill.CodistillModel(student).fit(_X, _Y, verbose=0)


def _ends_in_softmax(here, there):
    student = cases.linear()
    outputs = keras.layers.Softmax()(student.outputs[0])
    student = keras.Model(student.inputs, outputs)
    model = cases.codistill(student, cases.peers(here))
    cases.fit(model, _X, _Y, callbacks=[_exporter(here), cases.never()])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (_twice(_mixer), "at most one Mixer; .* WeightMixer, WeightMixer"),
        (_twice(cases.never), "at most one Loader; received TeacherLoader, Te"),
        (_twice(lambda: _exporter(None)), "at most one Exporter"),
        (_learns_from_itself(teachers.Peers), "and this is group 0. Leave"),
        (_learns_from_itself(teachers.Peers, group=3), "and this is group 3."),
        (
            _learns_from_itself(teachers.PeerPredictions),
            r"received \[0, 7\], and this is group 0. Leave",
        ),
        (_mixes_with_itself, r"received \[0, 1\], and this is group 0. Leave"),
        (_gives_a_class, r"received the class Backup. .*Backup\(...\)"),
        (
            _publishes_elsewhere,
            "publishes to .*here, and group_1 reads from .*there. Give both",
        ),
        (_distils_while_it_mixes, "must also be the `distillation_weight`"),
        (_reads_no_labels, "labels of big, which no teacher reads"),
        (_misspells("compile", "distilation_loss"), "`distillation_loss`?"),
        (_misspells("compile", "optimiser"), "Did you mean `optimizer`?"),
        (_misspells("fit", "valdation_data"), "Did you mean `validation_data`"),
        (_measures("AUC"), r"keras.metrics.AUC\(from_logits=True\)"),
        (_measures(keras.metrics.AUC), r"AUC\(from_logits=True\)"),
        (_measures("accuracy"), r"BinaryAccuracy\(threshold=0\)"),
        (_measures("Recall"), r"Recall\(thresholds=0\)"),
        (_measures("crossentropy"), r"BinaryCrossentropy\(from_logits=True"),
        (
            _measures(
                lambda: keras.metrics.AUC(from_logits=True), from_logits=False
            ),
            r"AUC\(from_logits=False\)",
        ),
        (_trains_nothing, "has no trainable weights"),
        (_compiles_the_inner_one, "Call `compile` on the CodistillModel"),
        (_ends_in_logits, "student must end .*probabilities; received logits"),
        (_ends_in_softmax, "student must end .*logits; received probabilities"),
    ],
)
def test_mistakes_that_train_wrongly_are_told(tmp_path, train, message):
    """By a ValueError, or by a warning, which is an error in tests."""
    places = [tfdistill.Exchange(tmp_path / name) for name in ("here", "there")]
    with pytest.raises((ValueError, UserWarning), match=message):
        train(*places)


def test_averages_in_place_of_weights_are_for_one_replica(two_replicas):
    with two_replicas.scope():
        optimizer = keras.optimizers.SGD(
            0.1, use_ema=True, ema_overwrite_frequency=2
        )
        with pytest.raises(ValueError, match="with 2 replicas"):
            cases.codistill(cases.linear(), optimizer=optimizer)


class _Own(keras.Model):
    """A student of two layers, to be given methods of its own."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)


@pytest.mark.parametrize("name", ["train_step", "test_step"])
def test_steps_that_would_never_run_are_refused(name):
    kind = type("Student", (_Own,), {name: lambda self, *args: None})
    with pytest.raises(ValueError, match=f"Student with its own {name}, "):
        tfdistill.CodistillModel(kind())


class Doubled(keras.Model):
    """Has a loss of its own, as Keras gave it before `training`."""

    def compute_loss(self, x, y, y_pred, sample_weight):
        return 2 * super().compute_loss(x, y, y_pred, sample_weight)


def test_outputs_of_an_own_loss_are_found_by_name_as_in_keras():
    targets = {"kind": _Y, "size": _X[:, :1]}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    histories = []
    for wrap in (lambda student: student, tfdistill.CodistillModel):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        sizes = {"kind": 3, "size": 1}
        outputs = {
            name: keras.layers.Dense(size, name=name)(inputs)
            for name, size in sizes.items()
        }
        model = wrap(Doubled(inputs, outputs))
        losses_of = {"kind": loss, "size": "mse"}
        model.compile("sgd", losses_of, metrics={"kind": ["accuracy"]})
        found = model.fit(_X, targets, batch_size=8, shuffle=False, verbose=0)
        histories.append(found.history)
    plain, ours = histories
    assert {"kind_loss", "size_loss", "kind_accuracy"} <= set(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)


def test_a_model_that_is_compiled_again_logs_its_losses_again():
    teacher = tfdistill.teachers.FixedTeacher(cases.linear(5))
    model = cases.codistill(cases.linear(), teacher)
    cases.fit(model, _X, _Y)
    model.compile(
        "sgd", model.loss.inner, distillation_loss=tfdistill.losses.ForwardKL()
    )
    logs = cases.fit(model, _X, _Y)
    total = logs["task_loss"][0] + logs["distillation_loss"][0]
    assert logs["loss"][0] == pytest.approx(total, rel=1e-5)
    assert logs["task_loss"][0] > 0
