"""Heads that learn from teachers in place of outputs."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import backup as backup_cases
from tests.cases import training as cases
from tfdistill.exports import student_graph

_TASKS = ("click", "sale")
_HEADS = {"click_soft": "click"}
_SOFT = tfdistill.losses.BinarySoftTargetCrossEntropy(from_logits=True)


def _model(teachers=None, heads=_HEADS, **compiled):
    keras.utils.set_random_seed(2)
    model = tfdistill.CodistillModel(
        cases.two_tasks((*_TASKS, *heads)),
        teachers=teachers,
        auxiliary_heads=heads,
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        dict.fromkeys(_TASKS, loss),
        **{"distillation_loss": {"click": _SOFT}, **compiled},
    )
    return model


def _fixed():
    keras.utils.set_random_seed(9)
    return tfdistill.teachers.FixedTeacher(cases.two_tasks())


def _fit(model, **kwargs):
    x, y, _ = cases.clicks_and_sales()
    return model.fit(x, y, batch_size=43, verbose=0, **kwargs).history


def _moved(model):
    """How far each variable goes in a step, and what is logged of it."""
    before = {v.path: v.numpy() for v in model.variables}
    history = _fit(model)
    return {
        v.path: v.numpy() - before[v.path] for v in model.variables
    }, history


def _below(moved, output):
    """The weights right below an output."""
    parts = (moved[f"{output}/{name}"] for name in ("kernel", "bias"))
    return np.concatenate([part.reshape(-1) for part in parts])


@pytest.fixture(scope="module")
def alone():
    """A step without heads and teachers."""
    return _moved(_model(heads={}))[0]


@pytest.fixture(scope="module")
def model():
    """One whose head learns from a teacher."""
    return _model(_fixed())


def test_the_head_takes_the_term_of_its_output_which_has_labels_only(
    alone, model
):
    both, direct = _moved(_model(_fixed(), heads={}))
    both, alone = (_below(each, "click") for each in (both, alone))
    assert np.abs(both - alone).max() > 1e-3
    # A head with the weights of the output has the output's own term.
    found = {v.path: v for v in model.trainable_variables}
    for part in ("kernel", "bias"):
        found[f"click_soft/{part}"].assign(found[f"click/{part}"])
    moved, history = _moved(model)
    np.testing.assert_allclose(
        _below(moved, "click"), alone, rtol=1e-5, atol=1e-7
    )
    np.testing.assert_allclose(
        _below(moved, "click_soft"), both - alone, rtol=1e-4, atol=1e-6
    )
    for name in ("loss", "distillation_loss"):
        assert history[name][0] == pytest.approx(direct[name][0], rel=1e-5)


def test_nothing_but_training_sees_it(tmp_path, exchange, model):
    exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=1)
    _fit(model, callbacks=[exporter])
    x, y, _ = cases.clicks_and_sales()
    assert set(model.predict(x, verbose=0)) == set(_TASKS)
    evaluated = model.evaluate(x, y, verbose=0, return_dict=True)
    assert evaluated.keys() == {"loss", "click_loss", "sale_loss"}
    model.export(tmp_path / "served", verbose=False)
    for path in (tmp_path / "served", exchange.latest(0).path):
        loaded = tf.saved_model.load(str(path))
        assert set(loaded.serve(x)) == set(_TASKS)
        assert len(loaded.signatures["serving_default"].outputs) == 2
    model.save(tmp_path / "student.keras")
    kept = keras.models.load_model(tmp_path / "student.keras")
    assert kept.output.keys() == set(_TASKS)
    # So groups with and without heads may teach each other.
    plain = student_graph.StudentGraph(
        cases.two_tasks(), model.graph.input_spec
    )
    assert model.graph.fingerprint == plain.fingerprint


def test_without_teachers_it_is_not_even_trained(alone):
    weights = {"distillation_output_weights": "uncertainty"}
    moved, _ = _moved(_model(**weights))
    assert moved.keys() == alone.keys()
    for path, value in alone.items():
        np.testing.assert_array_equal(moved[path], value, err_msg=path)


def _trained(directory):
    """Trains 12 steps, of which two are of burn-in."""
    model = _model(
        _fixed(),
        loss_weights="uncertainty",
        distillation_loss=_SOFT,
        distillation_output_weights="uncertainty",
        distillation_weight=tfdistill.schedules.BurnIn(steps=2),
    )
    x, y, _ = cases.clicks_and_sales()
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
    logs = backup_cases.Logs()
    backup = tfdistill.callbacks.Backup(directory, every_steps=3)
    model.fit(
        data,
        epochs=2,
        steps_per_epoch=6,
        verbose=0,
        callbacks=[logs, backup_cases.Patient(backup), backup],
    )
    return model, logs, backup


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("backup")
    model, logs, _ = _trained(directory)
    return model, logs, directory


@pytest.mark.deep
def test_rows_that_nobody_teaches_say_nothing_of_a_variance(trained):
    _, logs, _ = trained
    found = [
        float(each["click_distillation_loss_weight"]) for each in logs.batches()
    ]
    # The first step with a teacher changes that of the next.
    assert found[:3] == [1.0] * 3 and 1.0 not in found[3:]


@pytest.mark.deep
def test_a_stopped_training_resumes_to_the_bit(trained, start_again):
    whole, _, directory = trained
    # As if it had been killed before its end.
    shutil.rmtree(directory / "group_0" / "12")
    start_again()
    resumed, _, backup = _trained(directory)
    assert backup.resumed_step == 9
    backup_cases.assert_same(
        backup_cases.values(resumed), backup_cases.values(whole)
    )


def _with_methods():
    below = cases.two_tasks()
    return cases.Penalized(below.input, below.output)


@pytest.mark.parametrize(
    "student, heads, words",
    [
        (cases.two_tasks, {"soft": "click"}, "must map each head"),
        (cases.two_tasks, {"click": "click"}, "must map each head"),
        (cases.dictionaries, {"kind": "value"}, "of the same shape"),
        (cases.dense, {"soft": "click"}, "outputs are a dict"),
        (cases.Subclassed, {"soft": "click"}, "outputs are a dict"),
        (_with_methods, {"click": "sale"}, "methods would be lost"),
    ],
)
def test_what_is_no_head_is_refused(student, heads, words):
    with pytest.raises(ValueError, match=words):
        tfdistill.CodistillModel(student(), auxiliary_heads=heads)
