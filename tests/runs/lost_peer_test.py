"""A group whose only teacher's process is killed, and comes back later."""

import json
import pathlib
import subprocess
import sys
import time

import keras
import pytest
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.programs import commands
from tests.programs import lost_peer as program
from tfdistill.teachers import worth

pytestmark = pytest.mark.multiprocess
_MOST_STEPS = 20
_STEP_SECS = 0.03


class _Story(keras.callbacks.Callback):
    """Kills the peer, waits until it counts nothing, and starts it again."""

    def __init__(self, start: commands.Starter) -> None:
        super().__init__()
        self._start = start
        self._directory = start.directory
        # Ahead, as it may start slowly: no version of it would ever be young
        # enough for a student that makes three steps in the time of its one.
        self._peer = self._started(300)
        self._chapter = 0
        # Of each step: the version in force and the weight.
        self.steps: list = []
        self.chapters: list = []

    def _started(self, step: int) -> commands.Process:
        return self._start(program, self._directory, step)

    def on_train_batch_begin(self, batch, logs=None):
        (status,) = self.model.teachers.status()
        self._version = status["step"]

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append((self._version, float(logs["distillation_weight"])))
        time.sleep(_STEP_SECS)
        if self._is_done():
            self._chapter += 1
            self.chapters.append(batch)
            self._turn(batch)

    def _is_done(self) -> bool:
        version, weight = self.steps[-1]
        if self._chapter == 0:  # It counts in full.
            return version >= 0 and weight == 1.0
        if self._chapter == 1:  # It counts nothing any more.
            return weight == 0.0
        return weight == 1.0  # It is back.

    def _turn(self, batch: int) -> None:
        if self._chapter == 1:
            self._peer.kill()
            self._peer.wait()
        elif self._chapter == 2:
            # Ahead of this group, which goes on while it starts.
            self._peer = self._started(batch + 10_000)
        else:
            self.model.stop_training = True


@pytest.mark.usefixtures("no_process_left")
@pytest.mark.slow("a peer is started twice")
def test_a_lost_peer_fades_away_and_counts_again_when_it_is_back(
    tmp_path, monkeypatch
):
    # Whatever its weights are worth.
    monkeypatch.setattr(worth, "_LEAST_COUNT", 10**9)
    x, y = cases.data()
    peers = cases.peers(
        tfdistill.Exchange(tmp_path), max_staleness_steps=_MOST_STEPS
    )
    model = cases.codistill(cases.linear(0), peers)
    data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(16)
    with commands.starting(tmp_path) as start:
        story = _Story(start)
        cases.fit(
            model,
            data,
            steps_per_epoch=10**6,
            # The story first: it sees what was in force in the step.
            callbacks=[story, tfdistill.callbacks.TeacherLoader(every_steps=1)],
        )
    assert len(story.chapters) == 3, model.teachers.status()
    for step, (version, weight) in enumerate(story.steps):
        is_in_force = 0 <= version >= step - _MOST_STEPS
        assert weight == float(is_in_force), (step, version)
    killed, forgotten, _ = story.chapters
    assert {w for _, w in story.steps[killed : forgotten + 1]} == {0.0, 1.0}
    assert model.teachers.status()[0]["health"] == "good"


_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _run(*arguments):
    found = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(found.stdout)


@pytest.mark.deep
def test_random_kills_show_no_bad_version(tmp_path, no_process_left):
    """The full number is `python -m benchmarks.exchange_kills`."""
    found = _run("-m", "benchmarks.exchange_kills", "--kills=60", "--seed=7")
    assert (found["kills"], found["bad"]) == (60, 0), found
    assert found["versions"] > 10
    assert found["interrupted"] > 5
    assert found["reads"] > 10
