"""Heads that learn from teachers in place of outputs."""

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


def _weights(model, output):
    found = {v.path: v for v in model.trainable_variables}
    return [found[f"{output}/{part}"] for part in ("kernel", "bias")]


def _moved(model, output):
    """How far the weights right below an output go in a step."""
    before = [v.numpy() for v in _weights(model, output)]
    history = _fit(model)
    after = [v.numpy() for v in _weights(model, output)]
    moved = [a - b for a, b in zip(after, before, strict=True)]
    return np.concatenate([x.reshape(-1) for x in moved]), history


def test_the_head_takes_the_term_of_its_output_which_has_labels_only():
    alone, _ = _moved(_model(heads={}), "click")
    both, direct = _moved(_model(_fixed(), heads={}), "click")
    made = _model(_fixed())
    labels, history = _moved(made, "click")
    np.testing.assert_allclose(labels, alone, rtol=1e-5, atol=1e-7)
    assert np.abs(both - alone).max() > 1e-3
    # A head with the weights of the output has the output's own term.
    made = _model(_fixed())
    pairs = zip(
        _weights(made, "click_soft"), _weights(made, "click"), strict=True
    )
    for head, own in pairs:
        head.assign(own)
    soft, history = _moved(made, "click_soft")
    np.testing.assert_allclose(soft, both - alone, rtol=1e-4, atol=1e-6)
    for name in ("loss", "distillation_loss"):
        assert history[name][0] == pytest.approx(direct[name][0], rel=1e-5)


def test_nothing_but_training_sees_it(tmp_path, run_dir):
    model = _model(_fixed())
    exporter = tfdistill.callbacks.StudentExporter(every_steps=1)
    _fit(model, callbacks=[exporter])
    x, y, _ = cases.clicks_and_sales()
    assert set(model.predict(x, verbose=0)) == set(_TASKS)
    evaluated = model.evaluate(x, y, verbose=0, return_dict=True)
    assert evaluated.keys() == {"loss", "click_loss", "sale_loss"}
    model.export(tmp_path / "served", verbose=False)
    exchange = tfdistill.Exchange(run_dir / "exchange")
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
    taught = _model(
        tfdistill.teachers.FixedTeacher(str(exchange.latest(0).path))
    )
    assert _fit(taught)["distillation_loss"][0] > 0


def test_without_teachers_it_is_not_even_trained():
    model, plain = _model(), _model(heads={})
    _fit(model)
    _fit(plain)
    for one, other in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=one.path)


def test_rows_that_nobody_teaches_say_nothing_of_a_variance():
    weights = {"distillation_loss_weights": "uncertainty"}
    model = _model(_fixed(), distillation_weight=0.0, **weights)
    assert set(_fit(model, epochs=2)["click_distillation_loss_weight"]) == {1.0}
    model = _model(_fixed(), **weights)
    first, second = _fit(model, epochs=2)["click_distillation_loss_weight"]
    assert first == 1.0 != second
    names = {v.path for v in _model(None, **weights).variables}
    assert not any("loss_weight" in name for name in names)


def _begun(directory):
    model = _model(
        _fixed(),
        loss_weights="uncertainty",
        distillation_loss=_SOFT,
        distillation_loss_weights="uncertainty",
    )
    return model, tfdistill.callbacks.Backup(directory, every_steps=3)


def test_a_stopped_training_resumes_to_the_bit(tmp_path):
    x, y, _ = cases.clicks_and_sales()
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
    found = []
    for name, stops in (("whole", [None]), ("stopped", [7, None])):
        for stop in stops:
            model, backup = _begun(tmp_path / name)
            also = [backup_cases.StopAt(stop)] if stop else []
            patient = backup_cases.Patient(backup)
            try:
                model.fit(
                    data,
                    epochs=2,
                    steps_per_epoch=6,
                    verbose=0,
                    callbacks=[patient, backup, *also],
                )
            except backup_cases.Stopped:
                continue
        found.append(backup_cases.values(model))
    assert backup.resumed_step == 6
    backup_cases.assert_same(found[1], found[0])


@pytest.mark.parametrize(
    "student, heads, words",
    [
        (cases.two_tasks, {"soft": "click"}, "must name outputs"),
        (cases.two_tasks, {"click": "click"}, "must name outputs"),
        (cases.dictionaries, {"kind": "value"}, "of its shape .* received"),
        (cases.dense, {"soft": "click"}, "whose outputs are a dict"),
        (cases.Subclassed, {"soft": "click"}, "whose outputs are a dict"),
    ],
)
def test_what_is_no_head_is_refused(student, heads, words):
    with pytest.raises(ValueError, match=words):
        tfdistill.CodistillModel(student(), auxiliary_heads=heads)


def test_a_model_with_methods_of_its_own_is_refused():
    below = cases.two_tasks()
    own = cases.Penalized(below.input, below.output)
    with pytest.raises(ValueError, match="no methods of its own"):
        tfdistill.CodistillModel(own, auxiliary_heads={"click": "sale"})
