"""When the burn-in ends by itself."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import servers
from tests.cases import tiers
from tfdistill.follow import follower
from tfdistill.teachers import auto_burn_in
from tfdistill.teachers import loader

_LONG, _RATE = 400, 0.05


def _fit(model, x, y, *callbacks, loader=None, data=None, **kwargs):
    """Trains; returns the weight in force at each step."""
    weights = []
    with model.distribute_strategy.scope():
        model.compile(
            keras.optimizers.SGD(_RATE),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
            distillation_weight="auto",
        )
    each = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: weights.append(
            float(model.teachers.weight(model.optimizer.iterations - 1))
        )
    )
    kwargs = {"steps_per_epoch": _LONG, "epochs": 1, **kwargs}
    data = data or tf.data.Dataset.from_tensors((x, y)).repeat()
    loader = loader or cases.never()
    cases.fit(model, data, callbacks=[loader, each, *callbacks], **kwargs)
    return weights


def _model(tmp_path, strategy=None):
    strategy = strategy or tf.distribute.get_strategy()
    with strategy.scope():
        return tfdistill.CodistillModel(
            cases.linear(0), teachers=cases.peers(tfdistill.Exchange(tmp_path))
        )


def _expected_end(x, y, length):
    """By the losses of gradient descent, in NumPy."""
    student = cases.linear(0)
    w, b = (v.numpy().astype("float64") for v in student.weights)
    losses, end = [], None
    for step in range(1, length + 1):
        p = cases.softmax(x @ w + b)
        losses.append(-np.log(p[np.arange(len(y)), y]).mean())
        error = (p - np.eye(p.shape[1])[y]) / len(y)
        w, b = w - _RATE * x.T @ error, b - _RATE * error.sum(0)
        if step % 5 == 0 and end is None:
            looks = np.reshape(losses, [-1, 5]).mean(1)
            if auto_burn_in.has_fallen(looks) or step >= 0.3 * length:
                end = step
    return end


_PLACES = pytest.mark.parametrize(
    "place", ["one_device", tiers.deep("replicas")]
)


@_PLACES
def test_it_ends_when_the_steep_fall_does(place, tmp_path, two_replicas):
    x, y = cases.data(16)
    end = _expected_end(x, y, _LONG)
    assert 40 < end < 0.3 * _LONG
    strategy = two_replicas if place == "replicas" else None
    weights = _fit(_model(tmp_path, strategy), x, y)
    assert weights == [0.0] * end + [1.0] * (_LONG - end)


def test_it_takes_three_tenths_of_a_training_at_most(tmp_path):
    """And goes on over epochs, of which a look may hold parts of two."""
    x, y = cases.data(16)
    weights = _fit(_model(tmp_path), x, y, steps_per_epoch=12, epochs=5)
    assert weights == [0.0] * 20 + [1.0] * 40


def test_teaching_begins_when_it_ends_whatever_the_intervals(tmp_path):
    """A version is published at once, and those of others are looked for."""
    x, y = cases.data(16)
    exchange = tfdistill.Exchange(tmp_path)
    cases.publish(exchange, cases.linear(1), step=40)
    model = _model(tmp_path)
    (peer,) = model.teachers

    class _Patient(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 14:
                while (
                    peer.follower.current < 0
                    and peer.follower.state != follower.READY
                ):
                    time.sleep(0.01)

    _fit(
        model,
        x,
        y,
        tfdistill.callbacks.StudentExporter(
            every_steps=50, offset_steps=0, exchange=exchange, group=0
        ),
        _Patient(),
        loader=tfdistill.callbacks.TeacherLoader(every_steps=50),
        steps_per_epoch=40,
    )
    assert model.teachers.weight.end == 15
    assert exchange.steps(0) == [15, 40]
    # What was read by then is in use five steps later at the latest.
    assert peer.num_due == 40 - 15
    assert peer.num_taught >= 40 - 20


def test_it_ends_in_a_loop_of_short_trainings(tmp_path):
    x, y = cases.data(16)
    model = _model(tmp_path)
    _fit(model, x, y, steps_per_epoch=2)
    for _ in range(3):
        cases.fit(model, x, y, batch_size=8)
    assert model.teachers.weight.end == 1


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_a_few_steps_end_it_also_where_no_length_is_known(tmp_path):
    x, y = cases.data(16)
    weights = _fit(_model(tmp_path), x, y, steps_per_epoch=8)
    assert weights == [0.0] * 3 + [1.0] * 5
    batches = tf.data.Dataset.from_tensors((x, y)).repeat(6)
    unknown = batches.filter(lambda x, y: True)
    weights = _fit(
        *(_model(tmp_path), x, y), data=unknown, steps_per_epoch=None, epochs=3
    )
    # Known after an epoch of 6, and looked at every five steps.
    assert weights == [0.0] * 10 + [1.0] * 8


def _beside(workdir, then, strategy=None, **limit):
    """Trains 8 steps beside group 1, which acts once this one has published.

    Returns the teacher, and the steps of what either group has published.
    """
    exchange = tfdistill.Exchange(workdir / "exchange")
    cluster = tfdistill.Cluster(
        group=0, num_groups=2, workdir=str(workdir), exchange=exchange.root
    )
    (workdir / "group_1").mkdir(parents=True)
    (workdir / "group_1" / "started").touch()
    is_done = threading.Event()

    def act():
        while exchange.latest(0) is None:
            time.sleep(0.01)
        then(exchange, is_done)

    other = threading.Thread(target=act)
    other.start()
    model = _model(exchange.root, strategy)
    _fit(
        model,
        *cases.data(16),
        tfdistill.callbacks.WaitForGroups(cluster, **limit),
        tfdistill.callbacks.StudentExporter(
            every_steps=50, exchange=exchange, group=0
        ),
        loader=tfdistill.callbacks.TeacherLoader(every_steps=50),
        steps_per_epoch=8,
    )
    is_done.set()
    other.join()
    (peer,) = model.teachers
    assert peer.num_due == 5
    return peer, exchange.steps(0), exchange.steps(1)


@_PLACES
def test_groups_that_wait_teach_each_other_from_its_end(
    place, tmp_path, two_replicas
):
    """However long another group takes; one that is gone costs the limit."""
    strategy = two_replicas if place == "replicas" else None

    def publish(exchange, is_done):
        cases.publish(exchange, cases.linear(1), step=3)

    peer, ours, _ = _beside(tmp_path / "there", publish, strategy)
    assert ours == [3, 8] and peer.num_taught == 5
    peer, ours, _ = _beside(
        tmp_path / "gone", lambda *_: None, strategy, limit_secs=0.1
    )
    assert ours == [3, 8] and peer.num_taught == 0


@pytest.mark.parametrize("why", ["ended", "refused"])
def test_a_group_waits_for_no_version_that_cannot_come(
    why, tmp_path, monkeypatch
):
    monkeypatch.setattr(loader, "_LEAST_WAIT_SECS", 60.0)

    def act(exchange, is_done):
        if why == "ended":
            (tmp_path / "group_1" / "ended").touch()
        else:
            cases.publish(exchange, cases.linear(classes=5), step=3)
        # Which a group that waited would learn from.
        if not is_done.wait(20):
            cases.publish(exchange, cases.linear(1), step=4)

    peer, _, theirs = _beside(tmp_path, act)
    assert theirs == ([] if why == "ended" else [3])
    assert peer.num_taught == 0
    assert (tmp_path / "group_0" / "ended").exists()


def test_it_ends_on_parameter_servers_too(tmp_path, monkeypatch):
    servers.pretend(monkeypatch)
    model = servers.model(
        teachers=cases.peers(tfdistill.Exchange(tmp_path)),
        distillation_weight="auto",
        steps_per_execution=1,
    )
    cases.fit(model, servers.batches().repeat(), steps_per_epoch=60)
    assert model.teachers.weight.end == 20


def test_what_does_not_train_is_worth_hearing_at_once():
    x, y = cases.data(16)
    model = tfdistill.CodistillModel(
        cases.linear(0),
        teachers=tfdistill.teachers.FixedTeacher(cases.linear(1)),
    )
    assert _fit(model, x, y, steps_per_epoch=3) == [1.0] * 3


def test_a_resumed_training_ends_it_at_the_same_step(tmp_path):
    x, y = cases.data(16)

    class _Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch + 1 == 33:
                raise KeyboardInterrupt

    def backup():
        return tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=16)

    with pytest.raises(KeyboardInterrupt):
        _fit(_model(tmp_path / "a"), x, y, backup(), _Stop())
    resumed = _fit(_model(tmp_path / "a"), x, y, backup())
    end = _expected_end(x, y, _LONG)
    begin = _LONG - len(resumed)
    assert 0 < begin < end
    assert resumed == [0.0] * (end - begin) + [1.0] * (_LONG - end)
