"""A distillation weight that keeps the churn to a fixed teacher at a target."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import backup as cases
from tests.cases import servers
from tests.cases import summaries
from tests.cases import tiers

_RNG = np.random.default_rng(0)
_TRUTH = _RNG.normal(size=(8, 1))
_X = _RNG.normal(size=(1280, 8)).astype("float32")
_TARGET = 0.03
_HELD_OUT = _RNG.normal(size=(300, 8)).astype("float32")


def _labels(x, truth):
    shares = 1 / (1 + np.exp(-(x @ truth)))
    return (np.random.default_rng(1).random(shares.shape) < shares).astype(
        "float32"
    )


def _student(units=16):
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(units, activation="relu"),
            keras.layers.Dense(1),
        ]
    )


@pytest.fixture(scope="module")
def served():
    """The model that serves; the world has changed since."""
    keras.utils.set_random_seed(1)
    model = _student()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss)
    model.fit(_X, _labels(_X, _TRUTH), batch_size=64, epochs=5, verbose=0)
    return model


class _Weights(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(logs["distillation_weight"]))


def _backup(directory):
    """Keeps the state of each fourth step."""
    return tfdistill.callbacks.Backup(directory, every_steps=4, max_to_keep=20)


def _retrained(served, target, *callbacks, strategy=None, units=16, **kwargs):
    """Goes on from what serves with new labels: three epochs of 20 steps."""
    keras.utils.set_random_seed(2)
    budget = tfdistill.callbacks.ChurnBudget(
        target, held_out=_HELD_OUT, **kwargs
    )
    with (strategy or tf.distribute.get_strategy()).scope():
        student = _student(units)
        if units == 16:
            student.set_weights(served.get_weights())
        rate = keras.optimizers.schedules.CosineDecay(0.01, 60)
        model = servers.model(
            student,
            keras.optimizers.Adam(rate),
            teachers=tfdistill.teachers.FixedTeacher(served),
            distillation_weight=budget,
        )
    weights = _Weights()
    y = _labels(_X, _TRUTH + 1)
    data = tf.data.Dataset.from_tensor_slices((_X, y)).batch(64)
    history = model.fit(
        data, epochs=3, verbose=0, callbacks=[*callbacks, weights]
    )
    return model, budget, weights.found, history


def _churn(model, served):
    first, second = (
        1 / (1 + np.exp(-m.predict(_HELD_OUT, verbose=0)))
        for m in (model, served)
    )
    return np.abs(first - second).mean()


@pytest.fixture(scope="module")
def whole(served, tmp_path_factory):
    """A retrain, with what it left: its logs, backups and summaries."""
    directory, logs = tmp_path_factory.mktemp("whole"), cases.Logs()
    backup = _backup(directory / "backup")
    board = tfdistill.callbacks.CodistillTensorBoard(directory, every_steps=10)
    callbacks = board, logs, cases.Patient(backup), backup
    found = _retrained(served, _TARGET, *callbacks, every_steps=3)
    return *found, logs.found, directory


def _assert_kept(model, served, budget):
    churn = _churn(model, served)
    assert budget.churn == pytest.approx(churn, abs=1e-5)
    # The last step of training moves the student, if it must.
    assert 0.8 * budget.target < churn <= budget.target


def test_the_budget_is_kept(served, whole):
    model, budget, weights, history, _, directory = whole
    _assert_kept(model, served, budget)
    assert len(set(weights)) > 10
    assert history.history["churn_budget"] == [_TARGET] * 3
    shown = {"codistillation/churn", "codistillation/churn_budget"}
    assert shown <= summaries.tags(directory)


@pytest.mark.deep
def test_the_budget_is_kept_by_weights_that_early_stopping_restores(served):
    # The first epoch is the best by a loss that is to be large.
    stopping = keras.callbacks.EarlyStopping(
        "task_loss", mode="max", restore_best_weights=True
    )
    model, budget, *_ = _retrained(served, 0.01, stopping)
    assert stopping.best_epoch == 0
    _assert_kept(model, served, budget)


def test_what_cannot_be_reached_is_told(served, caplog):
    _, budget, weights, _ = _retrained(served, 0.001, max_weight=2.0, units=9)
    assert weights[-1] == 2 == budget.weight
    assert f"is {budget.churn:.4g}, with a budget of 0.001" in caplog.text
    assert "can't be met" in caplog.text


@pytest.mark.deep
def test_replicas_have_the_weights_of_one_device(served, whole, two_replicas):
    model, budget, weights, _ = _retrained(
        served, _TARGET, strategy=two_replicas, every_steps=3
    )
    np.testing.assert_allclose(weights[:20], whole[2][:20], rtol=1e-3)
    _assert_kept(model, served, budget)


@pytest.mark.deep
def test_it_is_kept_on_parameter_servers_by_tables_too(monkeypatch, tmp_path):
    servers.pretend(monkeypatch)
    served = servers.student(seed=1)
    served.save(tmp_path / "served.keras")
    budget = tfdistill.callbacks.ChurnBudget(
        0.01, held_out=servers.data(200), every_steps=2
    )
    model = servers.model(
        teachers=tfdistill.teachers.FixedTeacher(tmp_path / "served.keras"),
        distillation_weight=budget,
    )
    model.student.set_weights(served.get_weights())
    weights = _Weights()
    data = servers.batches(8, num_examples=200)
    model.fit(data, epochs=2, verbose=0, callbacks=[weights])
    x, _ = servers.data(200)
    ours, theirs = (tf.sigmoid(m(x)).numpy() for m in (model.student, served))
    churn = np.abs(ours - theirs).mean()
    assert budget.churn == pytest.approx(churn, abs=1e-5)
    assert 0.8 * 0.01 < churn <= 0.01
    assert len(set(weights.found)) > 5
    moved = model.student.get_layer("table").shards[0]
    assert not np.allclose(moved, served.get_layer("table").shards[0])


# In the second epoch, and in the first.
@pytest.mark.parametrize("step", [24, tiers.deep(16)])
def test_it_resumes_to_the_bit(served, whole, tmp_path, step):
    model, _, _, _, expected, directory = whole
    # As if it had been killed after the backup of this step.
    shutil.copytree(directory / "backup", tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "group_0").glob("[0-9]*"):
        if int(path.name) > step:
            shutil.rmtree(path)
    logs, backup = cases.Logs(), _backup(tmp_path)
    callbacks = logs, cases.Patient(backup), backup
    resumed, *_ = _retrained(served, _TARGET, *callbacks, every_steps=3)
    assert backup.resumed_step == step
    cases.assert_same(cases.values(resumed), cases.values(model))
    assert logs.found == {key: expected[key] for key in logs.found}


def test_it_needs_a_fixed_teacher():
    model = servers.model(
        _student(),
        teachers=tfdistill.teachers.OwnPast(),
        distillation_weight=tfdistill.callbacks.ChurnBudget(0.1),
    )
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    data = (_X, _labels(_X, _TRUTH))
    with pytest.raises(ValueError, match="a teachers.FixedTeacher"):
        model.fit(*data, verbose=0, validation_data=data, callbacks=[loader])


def test_it_must_be_the_weight_and_not_only_a_callback(served):
    model = servers.model(
        _student(), teachers=tfdistill.teachers.FixedTeacher(served)
    )
    data = (_X, _labels(_X, _TRUTH))
    budget = tfdistill.callbacks.ChurnBudget(0.1, held_out=_HELD_OUT)
    with pytest.raises(ValueError, match="must be the `distillation_weight`"):
        model.fit(*data, verbose=0, callbacks=[budget])
