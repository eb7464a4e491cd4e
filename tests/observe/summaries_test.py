"""What TensorBoard shows of a codistilled training, and what it costs."""

import hashlib
import re
import time

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import summaries as summary_cases
from tests.cases import waits
from tfdistill import teachers
from tfdistill.observe import run_log
from tfdistill.observe import summaries

_X, _Y = cases.data(64)


def _fit(model, directory, *more, epochs=1, every_steps=2, **kwargs):
    shown = tfdistill.callbacks.CodistillTensorBoard(
        directory, every_steps=every_steps
    )
    return cases.fit(
        model,
        _X,
        _Y,
        batch_size=4,
        epochs=epochs,
        callbacks=[*more, shown],
        **kwargs,
    )


def _taught(exchange):
    """A model with one teacher in use, and one version in quarantine."""
    model = cases.codistill(
        cases.linear(0), cases.peers(exchange), metrics=["accuracy"]
    )
    cases.prepare(model, _X, _Y)
    cases.publish(exchange, cases.linear(1, classes=9), step=9)
    cases.refresh_until(model, lambda: cases.quarantined(model))
    cases.publish(exchange, cases.linear(1), step=10)
    cases.load(model, 10)
    return model


class _Published(keras.callbacks.Callback):
    """Gives the writing thread its time between two epochs."""

    def __init__(self, exporter):
        super().__init__()
        self._exporter = exporter

    def on_epoch_end(self, epoch, logs=None):
        waits.until(lambda: self._exporter.writes.last_secs is not None)


def _mixing(exchange):
    """A mixer, with a peer that has published for each step already."""
    begin = b"".join(v.tobytes() for v in cases.linear(0).get_weights())
    extras = {"initial_weights": hashlib.sha256(begin).hexdigest()}
    for step in range(1, 5):
        cases.publish(exchange, cases.linear(1), step=step, extras=extras)
    mixer = tfdistill.mixing.WeightMixer(
        tfdistill.mixing.ModelAveraging(),
        every_steps=1,
        peers=[1],
        wait_secs=60.0,
    )
    exporter = cases.exporter(exchange)
    return exporter, mixer


def test_every_documented_tag_is_written_and_no_other(tmp_path, exchange):
    model = _taught(exchange)
    exporter = cases.exporter(exchange)
    loader = tfdistill.callbacks.TeacherLoader(every_steps=1)
    _fit(
        model,
        tmp_path / "log",
        *(exporter, loader, _Published(exporter)),
        run_log.RunLogger(tmp_path / "group_0"),
        epochs=2,
        validation_data=(_X, _Y),
    )
    found = summary_cases.tags(tmp_path / "log")
    # A peer that teaches by its predictions, and sends none.
    silent_peer = teachers.PeerPredictions(exchange, peers=[1], wait_secs=0.0)
    model = cases.codistill(cases.linear(0), silent_peer)
    _fit(
        model,
        tmp_path / "sent",
        tfdistill.callbacks.TeacherLoader(every_steps=1),
    )
    found |= summary_cases.tags(tmp_path / "sent")
    _fit(
        cases.codistill(cases.linear(0)),
        tmp_path / "mixed",
        *_mixing(
            tfdistill.Exchange(tmp_path / "mixed_exchange", max_to_keep=9)
        ),
        steps_per_epoch=4,
    )
    found |= summary_cases.tags(tmp_path / "mixed")
    # Of a `ChurnBudget`.
    found |= {"codistillation/churn", "codistillation/churn_budget"}
    named = set()
    for tag in found:
        tag = re.sub("^teachers/[^/]+/", "teachers/<teacher>/", tag)
        of_metrics = "^(training|Validation)/(?!learning_rate).*"
        named.add(re.sub(of_metrics, r"\1/<metric>", tag))
    assert named == summary_cases.documented()
    told = {
        **summary_cases.descriptions(tmp_path / "log"),
        **summary_cases.descriptions(tmp_path / "mixed"),
    }
    assert all(told.values())
    assert told["teachers/peer/share"].endswith("The teacher: group_1.")
    # TensorBoard sorts tags so: what decides comes first.
    assert min(told).startswith("Validation/")


def test_teachers_have_the_same_tags_in_all_groups(tmp_path):
    exchange = tfdistill.Exchange(tmp_path / "exchange")
    for group, others in ((0, [1, 2]), (1, [0, 2])):
        members = [
            cases.peers(exchange, others),
            teachers.FixedTeacher(cases.linear(5), name="large"),
        ]
        model = cases.codistill(cases.linear(0), members)
        assert list(summaries._roles(model.teachers)) == [
            *("peer_1", "peer_2"),
            "large",
        ], group


def test_points_hold_the_logs_of_their_step(tmp_path):
    model = cases.codistill(cases.linear(0))
    logged = []

    class Logs(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logged.append(logs["task_loss"])

    _fit(model, tmp_path, Logs(), epochs=2, every_steps=5)
    found = summary_cases.scalars(tmp_path, "codistillation/task_loss")
    steps = [step for step, _ in found]
    assert steps == [5, 10, 15, 20, 25, 30, 32]
    expected = [logged[step - 1] for step in steps]
    np.testing.assert_allclose([v for _, v in found], expected, rtol=1e-6)


def test_the_rows_that_a_teacher_has_taught(tmp_path, exchange):
    model = _taught(exchange)
    _fit(model, tmp_path / "log", cases.never(), every_steps=8)
    found = summary_cases.scalars(tmp_path / "log", "teachers/peer/taught_rows")
    assert [share for _, share in found] == [1.0, 1.0]
    staleness = summary_cases.scalars(
        tmp_path / "log", "teachers/peer/staleness_steps"
    )
    assert staleness[0] == (8, -2.0)


def test_weights_and_logs_are_those_without_summaries(tmp_path, exchange):
    shown = tfdistill.callbacks.CodistillTensorBoard(
        tmp_path / "log", every_steps=1
    )
    model = _taught(exchange)
    begin, found = model.get_weights(), []
    for more in ([], [shown]):
        model.set_weights(begin)
        callbacks = [cases.never(), *more]
        options = {"batch_size": 4, "epochs": 2, "callbacks": callbacks}
        logs = cases.fit(model, _X, _Y, shuffle=False, **options)
        assert not [name for name in logs if name.startswith("_")]
        found.append((logs.keys(), model.get_weights()))
    (names, weights), (others, same) = found
    assert names == others
    cases.assert_close(weights, same)


def test_a_resumed_training_repeats_no_step(tmp_path):
    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 14:
                raise KeyboardInterrupt

    data = tf.data.Dataset.from_tensor_slices((_X, _Y)).repeat().batch(4)
    for more in ([Crash()], []):
        model = cases.codistill(cases.linear(0))
        backup = tfdistill.callbacks.Backup(tmp_path / "backup", every_steps=8)
        callbacks = [
            backup,
            tfdistill.callbacks.CodistillTensorBoard(
                tmp_path / "log", every_steps=2
            ),
            *more,
        ]
        try:
            model.fit(
                data,
                epochs=2,
                steps_per_epoch=10,
                callbacks=callbacks,
                verbose=0,
            )
        except KeyboardInterrupt:
            # TensorBoard reads a directory's files in the order of their
            # names, which begin with the second each was opened in.
            time.sleep(1.1)
    assert backup.resumed_step == 8
    assert len(list((tmp_path / "log").glob("*tfevents*"))) == 2
    for tag in ("codistillation/distillation_weight", "host/rss_bytes"):
        steps = [s for s, _ in summary_cases.scalars(tmp_path / "log", tag)]
        assert steps == list(range(2, 21, 2))
