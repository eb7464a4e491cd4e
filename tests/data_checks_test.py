"""Faulty data and contradictory options end in one clear error each."""

import json
import warnings

import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import servers as parameter_server_cases
from tests.cases import tiers
from tests.programs import commands
from tests.programs import data_errors as program
from tfdistill import data

# Keras warns before we raise.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

X, Y = program.examples()
SPEC = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))


def _generated(*sizes):
    """Data of unknown cardinality, with batches of these sizes."""

    def generate():
        for size in sizes:
            yield X[:size], Y[:size]

    return tf.data.Dataset.from_generator(generate, output_signature=SPEC)


def _fit(strategy=None, **arguments):
    model = program.model(strategy or tf.distribute.get_strategy())
    model.fit(**{"verbose": 0, **arguments})
    return model


def _batches():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


BEFORE = {
    "no batch": (lambda b: {"x": b.take(0)}, "`x` must hold .* 0 batches"),
    "no validation": (
        lambda b: {"x": b, "validation_data": b.take(0)},
        "`validation_data` must hold .* 0 batches",
    ),
    "more steps than data": (
        lambda b: {"x": b, "steps_per_epoch": 3, "epochs": 3},
        "3 steps an epoch for 3 .* received 4, .* end after step 4",
    ),
    "labels of a data set": (
        lambda b: {"x": b, "y": Y},
        "`y` should not be passed",
    ),
    "batch size of a data set": (
        lambda b: {"x": b, "batch_size": 8},
        "`batch_size` doesn't apply to a data set",
    ),
    "two validations": (
        lambda b: {
            "x": X,
            "y": Y,
            "validation_split": 0.5,
            "validation_data": (X, Y),
        },
        "received both",
    ),
    "endless validation": (
        lambda b: {"x": b, "validation_data": b.repeat()},
        "`validation_steps` must be given",
    ),
}


@pytest.mark.parametrize(
    ("on", "case"),
    [
        *(("one", case) for case in BEFORE),
        *(("servers", f"{what} validation") for what in ("no", "endless")),
    ],
)
def test_what_can_be_known_is_told_before_training(on, case, monkeypatch):
    make, message = BEFORE[case]
    if on == "servers":
        parameter_server_cases.pretend(monkeypatch, 2)
    model = program.model(tf.distribute.get_strategy())
    with pytest.raises(ValueError, match=message):
        model.fit(**{"verbose": 0, **make(_batches())})
    assert model.optimizer.iterations.numpy() == 0


def test_more_steps_than_data_on_servers(monkeypatch):
    """There each epoch reads the data from their start."""
    parameter_server_cases.pretend(monkeypatch, 2)
    with pytest.raises(ValueError, match="5 steps an epoch; received 4"):
        _fit(x=_batches(), steps_per_epoch=5, epochs=3)


def test_data_that_start_over_with_an_epoch_suffice():
    model = _fit(x=_batches(), steps_per_epoch=2, epochs=3)
    assert model.optimizer.iterations.numpy() == 6


@pytest.mark.parametrize("on", ["one", tiers.deep("replicas")])
@pytest.mark.parametrize("name", ["x", "validation_data"])
def test_data_that_turn_out_to_be_empty(on, name, two_replicas):
    strategy = two_replicas if on == "replicas" else None
    arguments = {"x": _generated(4), name: _generated()}
    with pytest.raises(
        data.DataError, match=f"`{name}` must hold at least one batch"
    ):
        _fit(strategy, **arguments)


def test_data_that_servers_find_to_be_empty(monkeypatch):
    parameter_server_cases.pretend(monkeypatch, 2)
    with pytest.raises(data.DataError, match="at least one batch"):
        _fit(x=lambda context: _batches().filter(lambda x, y: False))


def test_data_that_end_early_are_told_of_with_the_step():
    with pytest.warns(UserWarning, match="ended after step 2 of 5 of epoch 1"):
        _fit(x=_generated(4, 4), steps_per_epoch=5)


def test_xla_on_several_replicas_is_refused(two_replicas):
    with two_replicas.scope():
        model = tfdistill.CodistillModel(program.student())
        with pytest.raises(ValueError, match="`jit_compile` must be left out"):
            model.compile("sgd", "mse", jit_compile=True)


def _diverging(**arguments):
    rows = X.copy()
    rows[9, 1] = np.inf
    return _fit(x=rows, y=Y, batch_size=4, shuffle=False, **arguments)


def test_a_loss_that_is_not_finite_ends_training():
    with pytest.raises(RuntimeError, match="received nan.*epoch 1.*task_loss"):
        _diverging(epochs=2)


def test_a_loss_that_is_not_finite_is_seen_within_an_epoch(monkeypatch):
    watch = tfdistill.training.guards
    monkeypatch.setattr(watch, "_CHECK_EVERY_EXECUTIONS", 2)
    with pytest.raises(RuntimeError, match="by step 4 of epoch 1"):
        _diverging()


def _with(feature=0.0, label=0, weight=1.0):
    """Examples of which the tenth is another one."""
    parts = X.copy(), Y.copy(), np.ones(16)
    parts[0][9, 0], parts[1][9], parts[2][9] = feature, label, weight
    return tf.data.Dataset.from_tensor_slices(parts).batch(4)


CHECKED = {
    "feature": ({"feature": np.nan}, "x must be .* nan at .1 0. of batch 2"),
    "weight": ({"weight": np.inf}, "sample_weight must be .* inf at .1. of"),
    "label above": ({"label": 3}, "y must be from 0 to 2; received 3 at .1"),
    "label below": ({"label": -1}, "y must be from 0 to 2; received -1"),
}


@pytest.mark.parametrize(
    ("on", "case"),
    [
        *(("one", case) for case in CHECKED),
        tiers.deep("replicas", "feature"),
        ("servers", "label above"),
    ],
)
def test_faulty_examples_are_named(on, case, monkeypatch, two_replicas):
    fault, message = CHECKED[case]
    strategy = two_replicas if on == "replicas" else None
    if on == "servers":
        parameter_server_cases.pretend(monkeypatch)
    dataset = data.checked(_with(**fault), num_classes=3)
    with pytest.raises(data.DataError, match=message):
        _fit(strategy, x=dataset)


def test_a_label_beyond_the_outputs_is_named_without_a_check():
    with pytest.raises(data.DataError, match="from 0 to 2.*received 3"):
        _fit(x=_with(label=3))


def test_checked_data_are_unchanged():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    given = tf.data.Dataset.from_tensor_slices(
        ({"a": [1.0, 2.0], "text": ["b", "c"], "r": ragged}, {"out": [0, 1]})
    ).batch(2)
    found = data.checked(given, num_classes=2)
    assert found.element_spec == given.element_spec
    assert int(found.cardinality()) == 1
    for one, other in zip(
        tf.nest.flatten(list(found), expand_composites=True),
        tf.nest.flatten(list(given), expand_composites=True),
        strict=True,
    ):
        assert (one == other).numpy().all()


def test_a_loader_that_has_nobody_to_follow_is_told_of(monkeypatch):
    monkeypatch.setenv("TFDISTILL_GROUP", "0")
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    monkeypatch.setenv("TFDISTILL_EXCHANGE", "/nowhere")
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _fit(x=_batches(), callbacks=[loader])
    told = [w for w in found if "follows no other group" in str(w.message)]
    assert len(told) == 1


@pytest.mark.multiprocess
@pytest.mark.usefixtures("no_process_left")
@pytest.mark.slow("two workers, started for each fault")
def test_two_workers_end_alike_whatever_one_of_them_lacks(tmp_path):
    commands.launched(tmp_path / "run", program, tmp_path, workers_per_group=2)
    first, second = (
        json.loads((tmp_path / f"worker_{worker}.json").read_text())
        for worker in range(2)
    )
    assert first == second
    assert "DataError: `x` must have the same" in first["empty share"]
    assert "received 4, 0 batches" in first["empty share"]
    assert "received 4, 3 batches" in first["uneven shares"]
    assert "must hold at least one example" in first["empty"]
    assert "received nan at" in first["faulty"]
    assert first["uneven shares, repeated"] == "8 steps"
