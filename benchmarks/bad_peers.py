"""What a bad peer costs the student: its final loss beside training alone.

For each seed, the peers of a recipe train first, in this process, and their
versions are kept: an honest peer, one with random labels (it learns the base
rates only), one with rotated labels, and one with half of the classes rotated.
Then the student trains with each of them, and with an honest peer that died
early. A peer's version appears when the student is at the same step, and the
student waits until it has been read, so the load of the machine decides
nothing.

`before` is what a TeacherSet did without the two defaults that are measured:
no bound on staleness, and no comparison with the student. `fading` is the
default of a TeacherSet, and `compared` that of a recipe, with a canary.
"""

import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from launch import recipes
from launch.config import config as config_lib
from launch.task import students
from launch.task import training
from tfdistill.system import programs
from tfdistill.teachers import peer
from tfdistill.training import steps

_WAIT_SECS = 120.0
_NO_COMPARISON = "codistillation.canary_student_margin=1e9"
_SETTINGS = {
    "before": ["exchange.max_staleness_steps=null", _NO_COMPARISON],
    "fading": [_NO_COMPARISON],
    "compared": [],
}
_STUDENT, _PEER = 0, 1


def _random(labels: tf.Tensor, num_classes: int) -> tf.Tensor:
    return tf.random.shuffle(labels)


def _rotated(labels: tf.Tensor, num_classes: int) -> tf.Tensor:
    return (labels + 1) % num_classes


def _half_rotated(labels: tf.Tensor, num_classes: int) -> tf.Tensor:
    half = num_classes // 2
    return tf.where(labels < half, (labels + 1) % half, labels)


# By kind of peer, what it takes for the labels.
_LABELS: dict[str, Callable[[tf.Tensor, int], tf.Tensor]] = {
    "honest": lambda labels, num_classes: labels,
    "base_rates": _random,
    "rotated": _rotated,
    "half_rotated": _half_rotated,
}


class _Published(steps.SteppedCallback):
    """Waits until the exporter is done with a step."""

    def __init__(
        self, exporter: tfdistill.StudentExporter, every_steps: int
    ) -> None:
        super().__init__()
        self._exporter = exporter
        self._schedule = steps.EverySteps(every_steps)
        self._num_due = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self._num_due += self._schedule.due(self.step)
        _wait(self._is_done)

    def _is_done(self) -> bool:
        totals = self._exporter.totals
        done = totals["published"] + totals["skipped"] + totals["failed"]
        return done >= self._num_due


class _Peer(steps.SteppedCallback):
    """Shows the student the versions of a peer as it goes along."""

    def __init__(self, kept: pathlib.Path, shown: pathlib.Path, last: int):
        super().__init__()
        self._shown = shown
        self._left = sorted(
            (
                path
                for path in kept.iterdir()
                if path.name.isdigit() and int(path.name) <= last
            ),
            key=lambda path: int(path.name),
        )
        self.weights: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        student = self.codistilled.teachers._student
        if student is not None:
            student._most_busy = 1.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        self.weights.append(float((logs or {})["distillation_weight"]))
        while self._left and int(self._left[0].name) <= self.step:
            self._show(self._left.pop(0))

    def _show(self, version: pathlib.Path) -> None:
        self._shown.mkdir(parents=True, exist_ok=True)
        copy = self._shown / f".{version.name}"
        shutil.copytree(version, copy)
        os.rename(copy, self._shown / version.name)
        teachers = self.codistilled.teachers
        reader = teachers._teachers[0].reader
        step = int(version.name)
        _wait(
            lambda: (
                reader.current >= step
                or step in reader.rejected
                or (reader.announced >= step and reader.state != peer.PENDING)
            )
        )
        student = teachers._student
        _wait(lambda: student is None or not student._taken)


def _wait(done: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _WAIT_SECS
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"No news for {_WAIT_SECS:g} s.")
        time.sleep(0.001)


def _cluster(directory: pathlib.Path, group: int) -> tfdistill.Cluster:
    return tfdistill.Cluster(
        group=group,
        num_groups=2,
        exchange=str(directory / "exchange"),
        workdir=str(directory),
    )


def _fit(
    config: config_lib.Config,
    cluster: tfdistill.Cluster,
    labels: Callable[[tf.Tensor, int], tf.Tensor],
    callbacks: Callable[[tfdistill.Exchange], list[Any]],
) -> float:
    """Trains one group; returns its loss on the validation data."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(students.seed_of(config.seed, cluster.group))
    train, validation = training.make(config, cluster)
    exchange = tfdistill.Exchange(
        str(cluster.exchange), max_to_keep=10**6, min_keep_secs=10**6
    )
    learns = students.learns(config, cluster)
    canary = students.make_canary(config, validation) if learns else None
    model = students.make_model(config, cluster, exchange, canary=canary)
    num_classes = max(int(model.student.output_shape[-1]), 2)
    model.fit(
        train.map(lambda x, y: (x, labels(y, num_classes))),
        steps_per_epoch=config.num_steps,
        callbacks=callbacks(exchange),
        verbose=0,
    )
    return float(
        model.evaluate(validation, return_dict=True, verbose=0)["loss"]
    )


def _train_peer(
    config: config_lib.Config, directory: pathlib.Path, kind: str
) -> pathlib.Path:
    """Trains a peer; returns the directory with all of its versions."""
    cluster = _cluster(directory, _PEER)
    alone = recipes.override(config, ["codistillation.enabled=false"])
    every = config.exchange.every_steps

    def callbacks(exchange: tfdistill.Exchange) -> list[Any]:
        exporter = students.make_exporter(alone, cluster, exchange)
        return [exporter, _Published(exporter, every)]

    _fit(alone, cluster, _LABELS[kind], callbacks)
    return pathlib.Path(str(cluster.exchange), f"group_{_PEER}")


def _train_student(
    config: config_lib.Config,
    directory: pathlib.Path,
    peer: pathlib.Path,
    last: int,
) -> tuple[float, float]:
    """Returns the final loss, and the fraction of steps with a teacher."""
    cluster = _cluster(directory, _STUDENT)
    shown = pathlib.Path(str(cluster.exchange), f"group_{_PEER}")
    shows = _Peer(peer, shown, last)
    every = config.exchange.refresh_every_steps
    loss = _fit(
        config,
        cluster,
        _LABELS["honest"],
        lambda exchange: [tfdistill.TeacherLoader(every_steps=every), shows],
    )
    weights = np.asarray(shows.weights)
    return loss, float((weights > 0).mean())


def _measure(options: programs.Options, root: pathlib.Path) -> dict[str, Any]:
    recipe = recipes.override(
        recipes.get(options.recipe), ["exchange.poll_secs=0.002"]
    )
    dying = {f"died_at_{step}": step for step in options.dies_at}
    found: dict[str, list[float]] = {}
    last = options.first_seed + options.num_seeds
    for seed in range(options.first_seed, last):
        config = recipes.override(recipe, [f"seed={seed}"])
        alone = recipes.override(config, ["codistillation.enabled=false"])
        directory = root / str(seed)
        base = _fit(
            alone,
            _cluster(directory / "alone", _STUDENT),
            _LABELS["honest"],
            lambda exchange: [],
        )
        found.setdefault("alone", []).append(base)
        measure.log(f"seed {seed}: alone {base:.4f}")
        peers = {
            kind: _train_peer(config, directory / kind, kind)
            for kind in _LABELS
            if kind in options.peers or (kind == "honest" and dying)
        }
        for kind in [*options.peers, *dying]:
            for setting in options.settings:
                loss, taught = _train_student(
                    recipes.override(config, _SETTINGS[setting]),
                    directory / f"{kind}_{setting}",
                    peers[kind if kind in peers else "honest"],
                    dying.get(kind, 10**9),
                )
                name = f"{kind}, {setting}"
                found.setdefault(name, []).append(loss)
                found.setdefault(f"{name}: taught", []).append(taught)
                measure.log(
                    f"seed {seed}: {name} {loss:.4f} ({loss - base:+.4f}), "
                    f"a teacher in {taught:.0%} of the steps"
                )
    return found


def _report(found: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the mean losses, beside training alone."""
    alone = statistics.mean(found["alone"])
    rows: dict[str, Any] = {"alone": round(alone, 4)}
    for name, losses in found.items():
        if name == "alone" or name.endswith(": taught"):
            continue
        taught = statistics.mean(found[f"{name}: taught"])
        rows[name] = {
            "loss": round(statistics.mean(losses), 4),
            "more_than_alone": round(statistics.mean(losses) - alone, 4),
            "steps_with_a_teacher": round(taught, 3),
        }
    return rows


def _add_options(options: programs.Flags) -> None:
    options.add("recipe", "a recipe", "digits")
    options.add("num_seeds", "runs of each kind", 3, quick=1)
    options.add("first_seed", "of these runs", 0)
    for name, names, text, quick in (
        ("peers", _LABELS, "kinds of peers", ["honest", "base_rates"]),
        ("settings", _SETTINGS, "settings of the student", ["compared"]),
    ):
        options.add(
            name, text, list(names), enum_values=list(names), quick=quick
        )
    options.add("dies_at", "steps of early deaths", [25, 100], quick=[25])


def _run(options: programs.Options, record: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="tfdistill-peers-") as root:
        found = _measure(options, pathlib.Path(root))
        record.update(
            benchmark="bad_peers",
            config=vars(options),
            results=_report(found),
            machine=measure.machine(),
        )


PROGRAM = measure.program("bad_peers", __doc__, define=_add_options, run=_run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
