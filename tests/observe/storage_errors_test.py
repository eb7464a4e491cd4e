"""Files that cannot be written, and trainings that go on."""

import json
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import summaries as summary_cases

_X, _Y = cases.data()
_PROGRAM = '''
import resource
import sys

from tests.cases import codistillation as cases
import keras

import tfdistill
from tfdistill.observe import run_log

directory = sys.argv[1]
before = resource.getrlimit(resource.RLIMIT_FSIZE)


class FullDisk(keras.callbacks.Callback):
    """Lets no file grow in the second and the third epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
        if epoch == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


model = cases.codistill(cases.linear(0))
board = tfdistill.callbacks.IgnoreStorageErrors(
    keras.callbacks.TensorBoard(directory + "/board")
)
callbacks = [
    FullDisk(),
    run_log.RunLogger(directory, every_secs=0.0),
    tfdistill.callbacks.CodistillTensorBoard(
        directory + "/summaries", every_steps=1
    ),
    board,
    tfdistill.callbacks.IgnoreStorageErrors(
        keras.callbacks.ModelCheckpoint(directory + "/{epoch}.keras")
    ),
    cases.never(),
]
x, y = cases.data()
cases.fit(model, x, y, batch_size=4, epochs=5, callbacks=callbacks)
print("failures", board.num_failures, "steps", int(model.optimizer.iterations))
'''


@pytest.mark.deep
@pytest.mark.multiprocess
def test_a_full_disk_costs_lines_and_files_but_no_step(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        env=summary_cases.environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[words.index("steps") + 1]) == 20
    assert int(words[words.index("failures") + 1]) > 0
    assert "training continues" in done.stderr
    # Keras leaves broken ones of the full disk.
    names = {path.name for path in tmp_path.glob("*.keras")}
    assert {"1.keras", "4.keras", "5.keras"} <= names
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    whole = [json.loads(line) for line in lines if line]
    ends = [r["epoch"] for r in whole if r.get("event") == "epoch_end"]
    assert ends == [0, 3, 4]
    found = summary_cases.scalars(
        tmp_path / "summaries", "codistillation/distillation_weight"
    )
    # Of the full disk some may be lost, and none of later steps.
    assert [step for step, _ in found][-8:] == list(range(13, 21))


class _Raises(keras.callbacks.Callback):
    def __init__(self, error):
        super().__init__()
        self._error = error

    def on_epoch_end(self, epoch, logs=None):
        raise self._error


def test_what_is_no_fault_of_storage_is_raised():
    model = cases.codistill(cases.linear(0))
    for error in (ValueError("no file"), tf.errors.UnavailableError(0, 0, "")):
        callback = tfdistill.callbacks.IgnoreStorageErrors(_Raises(error))
        with pytest.raises(type(error)):
            cases.fit(model, _X, _Y, callbacks=[callback, cases.never()])
