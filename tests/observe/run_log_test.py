"""Progress as JSON lines: what they hold, and what a failure costs."""

import types

import keras
import pytest

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import runs
from tfdistill.observe import pace
from tfdistill.observe import run_log

_X, _Y = cases.data()


def _fit(model, log, *, extra=(), **kwargs):
    kwargs.setdefault("batch_size", 4)
    callbacks = [log, cases.never(), *extra]
    return cases.fit(model, _X, _Y, callbacks=callbacks, **kwargs)


def test_it_tells_the_epochs_with_their_logs(tmp_path):
    model = cases.codistill(cases.linear(0), metrics=["accuracy"])
    logs = _fit(
        model,
        run_log.RunLogger(tmp_path / "new", every_secs=3600),
        epochs=2,
        validation_data=(_X, _Y),
    )
    lines = runs.records(tmp_path / "new")
    events = ["start", "epoch_end", "epoch_end", "end"]
    assert [line.get("event") for line in lines] == events
    assert [line["step"] for line in lines] == [0, 4, 8, 8]
    assert [line["epoch"] for line in lines] == [0, 0, 1, 1]
    assert {line["total_steps"] for line in lines} == {8}
    assert lines[-1]["teacher_staleness"] is None  # NaN.
    for epoch in (0, 1):
        for name in ("loss", "task_loss", "accuracy", "val_loss"):
            found = lines[1 + epoch][name]
            assert found == pytest.approx(logs[name][epoch])


def test_its_speed_is_that_of_training_without_evaluations(
    tmp_path, monkeypatch
):
    now = [1000.0]

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            now[0] += 0.5

        def on_test_batch_end(self, batch, logs=None):
            now[0] += 100.0

    monkeypatch.setattr(
        pace, "time", types.SimpleNamespace(perf_counter=lambda: now[0])
    )
    log = run_log.RunLogger(tmp_path, every_secs=3600)
    model = cases.codistill(cases.linear(0))
    for _ in range(2):
        cases.fit(
            *(model, _X, _Y),
            batch_size=4,
            epochs=2,
            validation_data=(_X, _Y),
            callbacks=[Clock(), log, cases.never()],
        )
    lines = runs.records(tmp_path)
    found = [x.get("examples_per_second") for x in lines]
    assert found == [None, 8.0, 8.0, None] * 2


def test_a_launched_run_gets_one_by_itself(run_dir, monkeypatch):
    monkeypatch.setenv("TFDISTILL_GROUP", "1")
    monkeypatch.setenv("TFDISTILL_NUM_GROUPS", "2")
    model = cases.codistill(cases.linear(0))
    # Keras makes no directory.
    csv = keras.callbacks.CSVLogger(run_dir / "group_1" / "epochs.csv")
    exporter = tfdistill.callbacks.StudentExporter(every_steps=1000)
    cases.fit(model, _X, _Y, callbacks=[csv, exporter])
    start, *_, end = runs.records(run_dir / "group_1")
    assert (end["event"], end["published"]) == ("end", 1)
    assert start["published"] is None
    mine = run_log.RunLogger(run_dir / "mine")
    cases.fit(model, _X, _Y, callbacks=[mine])
    assert runs.records(run_dir / "mine")[-1]["step"] == 2
    assert runs.records(run_dir / "group_1")[-1]["step"] == 1


def test_a_training_that_starts_at_step_0_again_says_so(
    tmp_path, caplog, start_again
):
    for number in range(4):
        extra = []
        if number == 3:
            extra = [tfdistill.callbacks.Backup(tmp_path / "backup")]
        log = run_log.RunLogger(tmp_path)
        _fit(cases.codistill(cases.linear(0)), log, extra=extra)
        # A second `fit` of the process is no restart.
        told = "had trained to step 4 before, and starts at step 0 again"
        assert (told in caplog.text) == (number == 2)
        caplog.clear()
        if number > 0:
            start_again()


def test_a_resumed_training_keeps_what_can_be_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    other = b'{"fit": 2, "step": 9}'
    lines = [b'{"step": 4}', b"\xff\xfe\x00", b'{"step": 5}', other, b'{"st']
    path.write_bytes(b"\n".join(lines))
    run_log._forget_after(path, 4, 1)
    assert path.read_bytes() == b'{"step": 4}\n' + other + b"\n"
    run_log._forget_after(path, 8, 2)
    assert path.read_bytes() == b'{"step": 4}\n'
