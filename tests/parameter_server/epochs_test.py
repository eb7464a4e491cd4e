"""The window of scheduled calls, over a coordinator that does as it is told.

The data are lists: each worker's share of one epoch. A step takes one item.
"""

import functools
import itertools
import types
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import servers as cases
from tfdistill.parameter_server import epochs
from tfdistill.parameter_server import worker as worker_lib
from tfdistill.training import steps as steps_lib


class _Result:
    def __init__(self, coordinator, value):
        self._coordinator, self._value = coordinator, value

    def get(self):
        self._coordinator.waited_for.append(self._value)
        if self._coordinator.error and self._value >= self._coordinator.fails:
            # What TensorFlow says of every call once one has failed.
            raise RuntimeError("cancelled")
        return self._value


class _Coordinator:
    def __init__(self):
        self.scheduled, self.waited_for, self.num_joins = [], [], 0
        self.error, self.fails = None, 0

    def schedule(self, function, args):
        self.scheduled.append((function, args))
        return _Result(self, function(*args))

    def join(self):
        self.num_joins += 1
        if self.error:
            raise self.error


@pytest.fixture
def coordinator():
    return _Coordinator()


def _double(value):
    return 2 * value


def test_what_went_wrong_is_raised_and_not_the_cancellation(coordinator):
    window = epochs.Executions(coordinator, num_workers=2)
    for value in (1, 2, 3):
        window.schedule(_double, [value])
    coordinator.error, coordinator.fails = ValueError("the data are bad"), 4
    assert window.oldest() == (None, 2)
    with pytest.raises(ValueError, match="the data are bad"):
        window.oldest()
    assert (len(window), coordinator.num_joins) == (0, 1)


TrainingPoint = steps_lib.TrainingPoint


class _Function:
    """In the place of a `TrainFunction`: takes items, counts their sum."""

    def __init__(self, calls, totals, *, num_steps, endless, metric_names):
        self.calls = calls
        self._num_steps = num_steps
        assert metric_names == ["loss"]

    def function(self, iterator, first_step, arguments):
        worker, items = iterator
        taken = list(itertools.islice(items, self._num_steps))
        self.calls.append((self._num_steps, int(first_step), worker, taken))
        return worker, taken

    def result(self, vector):
        worker, taken = vector
        return worker_lib.TrainResult(
            num_steps=len(taken),
            num_examples=10.0 * len(taken),
            worker=worker,
            logs={"own": float(worker)},
            added=np.asarray([sum(taken), len(taken)], np.float64),
            report=np.asarray([len(taken)]),
        )


class _Data:
    """Lists of items for each worker; `None` never ends."""

    def __init__(self, shares):
        self._shares = shares
        self.num_iterators = 0

    def is_endless(self):
        return self._shares is None

    def iterator(self):
        self.num_iterators += 1
        shares = self._shares or [itertools.count(1), itertools.count(1)]
        return cases.PerWorker(
            [(worker, iter(share)) for worker, share in enumerate(shares)]
        )


class _Callback(keras.callbacks.Callback):
    """Notes what it is told of batches; `stop_at` one, it stops training."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.begun, self.ended, self.logs = [], [], []
        self._stop_at = stop_at

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.logs.append(dict(logs))
        if self._stop_at is not None and batch >= self._stop_at:
            self.model.stop_training = True


class _Backup(_Callback):
    """Wants quiet once the batches in `at` are done."""

    def __init__(self, at=(), found=None):
        super().__init__()
        self._at, self._found = at, found
        self.wants_quiet, self.points, self.in_flight = False, [], []

    def on_train_batch_end(self, batch, logs=None):
        self.wants_quiet = self.wants_quiet or batch in self._at

    def resume(self, state):
        assert state == "the state"
        return self._found

    def on_quiet(self, point, state):
        self.wants_quiet = False
        self.points.append(point)
        self.in_flight.append(len(self.window))


class _Rider:
    """Keeps the first number of each report."""

    def __init__(self, reports):
        self._reports = reports

    def arguments(self):
        return tf.zeros([0], tf.int64)

    def note(self, report):
        self._reports.append(int(report[0]))


class _Case:
    """Epochs over a fake model, and what they called."""

    def __init__(
        self, monkeypatch, shares=None, *, steps, execution=3, callbacks=()
    ):
        self.calls = []
        loss = keras.metrics.Mean("loss")
        self.model = types.SimpleNamespace(
            steps_per_execution=execution,
            stop_training=False,
            optimizer=types.SimpleNamespace(
                iterations=tf.Variable(0, dtype=tf.int64)
            ),
            metrics=[loss],
            reset_metrics=loss.reset_state,
            get_metrics_result=lambda: {"loss": loss.result()},
            trainer=types.SimpleNamespace(counts_done=True),
        )
        self.last = steps_lib.LastExecution()
        self.reports, self.data, self.loss = [], _Data(shares), loss
        coordinator = cases.Coordinator(monkeypatch, num_workers=2)
        window = epochs.Executions(coordinator, num_workers=2)
        for callback in callbacks:
            callback.window = window
        self.callbacks = keras.callbacks.CallbackList(list(callbacks))
        for callback in callbacks:
            callback.set_model(self.model)
        self.epochs = epochs.TrainingEpochs(
            self.model,
            functools.partial(_Function, self.calls),
            self.data,
            window,
            rider=_Rider(self.reports),
            last=self.last,
            steps_per_epoch=steps,
            state="the state",
            backup=next((c for c in callbacks if isinstance(c, _Backup)), None),
        )

    @property
    def step(self):
        return int(self.model.optimizer.iterations.numpy())

    def run(self, epoch):
        return self.epochs.run(epoch, self.callbacks)


@pytest.mark.parametrize(
    ("steps", "execution", "sizes"),
    [
        (7, 3, [3, 3, 1]),
        (2, 5, [2]),
        (9, 1, [1] * 9),
    ],
)
def test_an_epoch_has_exactly_its_steps(monkeypatch, steps, execution, sizes):
    callback = _Callback()
    case = _Case(
        monkeypatch, steps=steps, execution=execution, callbacks=[callback]
    )
    assert case.epochs.start(0) == 0
    ends = np.cumsum(sizes)
    for epoch in range(2):
        case.calls.clear()
        logs = case.run(epoch)
        firsts = [epoch * steps, *(epoch * steps + ends)][:-1]
        assert [(n, first) for n, first, *_ in case.calls] == list(
            zip(sizes, firsts, strict=True)
        )
        assert case.step == (epoch + 1) * steps
        # The mean over this epoch's items alone.
        items = [item for *_, taken in case.calls for item in taken]
        assert len(items) == steps
        assert logs["loss"] == pytest.approx(np.mean(items))
        assert float(case.loss.result()) == pytest.approx(logs["loss"])
    assert callback.ended == [*(ends - 1)] * 2
    assert callback.begun == [0, *ends[:-1]] * 2
    assert case.reports == sizes * 2
    assert case.last.examples == 10.0 * sizes[-1]
    assert set(callback.logs[0]) == {"loss", "own"}
    # Endless data go on where the epoch before left them.
    assert case.data.num_iterators == 1


@pytest.mark.parametrize("execution", [1, 3])
@pytest.mark.parametrize("shares", [[5, 2], [1, 0]])
def test_data_that_end_are_used_up(monkeypatch, shares, execution):
    lists = [[10.0 * (w + 1)] * count for w, count in enumerate(shares)]
    callback = _Callback()
    case = _Case(
        monkeypatch,
        lists,
        steps=None,
        execution=execution,
        callbacks=[callback],
    )
    case.epochs.start(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            logs = case.run(epoch)
            assert case.step == (epoch + 1) * sum(shares)
            assert logs["loss"] == pytest.approx(np.mean(sum(lists, [])))
    assert callback.ended[-1] == sum(shares) - 1
    assert sum(case.reports) == 2 * sum(shares)
    assert case.data.num_iterators == 2


def test_stopping_schedules_nothing_more_and_counts_what_is_done(monkeypatch):
    callback = _Callback(stop_at=4)
    case = _Case(monkeypatch, steps=100, callbacks=[callback])
    case.epochs.start(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.run(0)
    # Two were done when it was stopped, and four more were in flight.
    assert callback.ended == [2, 5, 8, 11, 14]
    assert (len(case.calls), case.step) == (5, 15)


# ---- backups ----


def test_quiet_is_between_two_steps_with_none_in_flight(monkeypatch):
    backup = _Backup(at=(5, 26))
    callback = _Callback()
    case = _Case(monkeypatch, steps=31, callbacks=[backup, callback])
    case.epochs.start(0)
    logs = case.run(0)
    assert backup.in_flight == [0, 0]
    # What was in flight when it was due has been done by then.
    steps = [point.step for point in backup.points]
    assert steps == [15, 31]
    assert [(p.epoch, p.batch) for p in backup.points] == [(0, 15), (0, 31)]
    items = [item for *_, taken in case.calls for item in taken]
    assert backup.points[0].metric_sums == (sum(items[:15]), 15.0)
    assert callback.ended[-1] == 30 and case.step == 31
    assert logs["loss"] == pytest.approx(np.mean(items))


def test_training_goes_on_in_the_middle_of_an_epoch(monkeypatch):
    point = TrainingPoint(step=10, epoch=1, batch=4, metric_sums=(70.0, 4.0))
    backup, callback = _Backup(found=point), _Callback()
    case = _Case(monkeypatch, steps=6, callbacks=[backup, callback])
    assert case.epochs.start(0) == 1
    assert case.step == 10
    logs = case.run(1)
    ((num_steps, first, _, taken),) = case.calls
    assert (num_steps, first, case.step) == (2, 10, 12)
    assert callback.begun == [4] and callback.ended == [5]
    assert logs["loss"] == pytest.approx((70 + sum(taken)) / 6)
    # The epochs after it are whole.
    case.run(2)
    assert (case.step, callback.ended[1:]) == (18, [2, 5])
