"""What a bad peer costs a student, and what an honest one counts.

Two groups train a recipe in this process, by turns of `every_steps` steps, so
that a run does not depend on the speed of the machine. Group 1 is of one kind:
honest, or trained on wrong labels, or dead. The record has, by kind and seed,
the held-out log loss of group 0 beside its loss alone, and the share of the
steps after the burn-in in which it had a teacher. With validation data it also
says whether the rule without them would have decided otherwise: a training in
which no version was refused and no teacher doubted is the same without them.
"""

import dataclasses
import statistics
import tempfile
import threading
import time
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from launch import recipes
from tfdistill.system import programs

_KINDS = (
    *("honest", "base_rates", "rotated", "half_rotated", "learning_rate_0"),
    *("dead_25", "dead_137", "nan", "offset"),
)
_RATES = {"learning_rate_0": 0.0, "nan": 1e30}
_READ_SECS = 2.0
# The share of steps that an honest peer teaches; and in nats, what others cost.
_LEAST_TAUGHT, _MOST_WORSE = 0.75, 0.01


class _Turns(keras.callbacks.Callback):
    """Lets one group train at a time; stands after the exporter."""

    def __init__(self, lock: "_Lock", group: int, exporter: Any) -> None:
        super().__init__()
        self._lock, self._group, self._exporter = lock, group, exporter
        self._step, self._published = 0, None
        self.num_taught = self.num_steps = 0
        self.is_doubted = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts taught steps; hands over when its turn is over."""
        before, self._step = self._step, int(self.model.optimizer.iterations)
        if self.model.teachers.weight(tf.constant(before, tf.int64)) > 0:
            self.num_steps += self._step - before
            is_taught = float(logs["distillation_weight"]) > 0
            self.num_taught += (self._step - before) * is_taught
            self.is_doubted |= any(
                each.record.doubt(each.label) for each in self.model.teachers
            )
        if self._exporter._last_step == self._published:
            return
        self._published = self._exporter._last_step
        self._exporter._worker.wait_idle(_READ_SECS)
        self._lock.hand_over(self._group)
        self._read()

    def _read(self) -> None:
        """Waits until the peer's newest version was read, or refused."""
        deadline = time.monotonic() + _READ_SECS
        for peer in self.model.teachers:
            newest = peer.exchange.latest(1 - self._group)
            while (
                newest is not None
                and time.monotonic() < deadline
                and newest.step > peer.follower.current
                and newest.step not in peer.follower.rejected
                and peer.follower.state == 0
                and self.model.teachers._student.weight(
                    tf.constant(newest.step, tf.int64)
                )
                > 0
            ):
                time.sleep(0.005)


class _Lock:
    """Whose turn it is; a group that has ended has none."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._turn, self._ended = 0, set[int]()

    def begin(self, group: int) -> None:
        with self._change:
            self._change.wait_for(
                lambda: self._turn == group or 1 - group in self._ended
            )

    def hand_over(self, group: int) -> None:
        with self._change:
            self._turn = 1 - group
            self._change.notify_all()
        self.begin(group)

    def end(self, group: int) -> None:
        with self._change:
            self._ended.add(group)
            self._turn = 1 - group
            self._change.notify_all()


def _changed(data: tf.data.Dataset, kind: str, num_classes: int) -> Any:
    """What a peer of a kind trains on."""
    is_rotated = {"rotated": 1.0, "half_rotated": 0.5}.get(kind, 0.0)

    def change(x: Any, y: Any) -> Any:
        if kind == "base_rates":
            return x, tf.random.shuffle(y)
        if kind == "offset":
            return x, y, 1 + (2.71828**0.5 - 1) * tf.cast(y, tf.float32)
        one = tf.ones([], y.dtype)
        rotated = (y + one) % max(num_classes, 2)
        return x, tf.where(
            tf.random.uniform(tf.shape(y)) < is_rotated, rotated, y
        )

    return data if kind in ("honest", *_RATES) else data.map(change)


def _made(
    workload: Any, group: int, kind: str, root: str, validated: bool
) -> dict[str, Any]:
    """Makes a group, on the thread of all: seeds are of the process."""
    cluster = tfdistill.Cluster(group=group, num_groups=2, exchange=root)
    keras.utils.set_random_seed(1000 * workload.seed + group)
    train, validation = workload.datasets(cluster)
    alone = kind == "alone"
    model = tfdistill.CodistillModel(
        workload.model(),
        teachers=None
        if alone
        else tfdistill.teachers.Peers(
            tfdistill.Exchange(root), peers=[1 - group]
        ),
    )
    bad = kind if group == 1 else "honest"
    loss = workload.loss
    loss = loss if isinstance(loss, keras.losses.Loss) else loss(train)
    optimizer = workload.optimizer()
    if bad in _RATES:
        optimizer = keras.optimizers.SGD(_RATES[bad])
    model.compile(
        optimizer,
        loss,
        distillation_loss=workload.distillation_loss
        or tfdistill.losses.SoftTargetCrossEntropy(from_logits=True),
        distillation_weight=workload.distillation_weight,
    )
    is_dead = bad.startswith("dead")
    return {
        "model": model,
        "x": _changed(train, bad, int(model.student.output_shape[-1])),
        "steps_per_epoch": int(bad.split("_")[1])
        if is_dead
        else workload.num_steps,
        "held_out": validation,
        "validation_data": validation if validated else None,
    }


def _fit(
    made: dict[str, Any], workload: Any, group: int, lock: _Lock, root: str
) -> dict[str, Any]:
    """Trains a group by turns; a dead one just ends."""
    model, held_out = made.pop("model"), made.pop("held_out")
    exporter = tfdistill.callbacks.StudentExporter(
        tfdistill.Exchange(root),
        every_steps=workload.every_steps,
        group=group,
        **workload.exporter,
    )
    turns = _Turns(lock, group, exporter)
    loader = tfdistill.callbacks.TeacherLoader(
        every_steps=workload.refresh_every_steps
    )
    lock.begin(group)
    try:
        model.fit(**made, callbacks=[exporter, turns, loader], verbose=0)
    finally:
        lock.end(group)
    if group == 1:
        return {}
    return {
        "log_loss": float(model.evaluate(held_out, verbose=0)),
        "taught": turns.num_taught / max(turns.num_steps, 1),
        "same_without": not turns.is_doubted
        and not any(peer.follower.rejected for peer in model.teachers),
    }


def one(workload: Any, kind: str, *, validated: bool) -> dict[str, Any]:
    """Trains both groups; returns what became of group 0."""
    lock, found = _Lock(), {}
    groups = [0] if kind == "alone" else [0, 1]
    with tempfile.TemporaryDirectory() as root:
        made = [_made(workload, g, kind, root, validated) for g in groups]

        def train(group: int) -> None:
            found[group] = _fit(made[group], workload, group, lock, root)

        if kind == "alone":
            lock.end(1)
        threads = [threading.Thread(target=train, args=(g,)) for g in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return found[0]


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains all kinds with all seeds, and fills the record."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in ("alone", *options.kinds):
        for seed in range(1, options.seeds + 1):
            workload = recipes.get(options.recipe).workload()
            changes: dict[str, Any] = {"seed": seed}
            if options.every_steps is not None:
                changes["every_steps"] = options.every_steps
                changes["refresh_every_steps"] = options.every_steps
            workload = dataclasses.replace(workload, **changes)
            result = one(workload, kind, validated=not options.unvalidated)
            found.setdefault(kind, []).append(result)
            measure.log(f"{kind}, seed {seed}: {found[kind][-1]}")
    judged = {
        kind: _judged(kind, found)
        for kind in options.kinds
        # It is warned of, and no more.
        if kind != "half_rotated" or not options.unvalidated
    }
    record.update(
        benchmark="bad_peers",
        config=vars(options),
        kinds=found,
        judged=judged,
        met=all(each["met"] for each in judged.values()),
    )


def _judged(kind: str, found: dict[str, Any]) -> dict[str, Any]:
    """An honest peer teaches; any other one costs nothing beside no teacher."""
    mean = {
        key: statistics.fmean(each[key] for each in found[kind])
        for key in ("log_loss", "taught")
    }
    if kind == "honest":
        return measure.judge(mean["taught"], at_least=_LEAST_TAUGHT)
    alone = statistics.fmean(each["log_loss"] for each in found["alone"])
    cost = max(0.0, mean["log_loss"] - alone)
    return measure.judge(cost, at_most=_MOST_WORSE)


def _add_options(options: programs.Flags) -> None:
    options.add("recipe", "a recipe, or file.py", "digits")
    # The last one is of clicks.
    options.add(
        "kinds", "of group 1", list(_KINDS[:-1]), enum_values=list(_KINDS)
    )
    options.add("seeds", "trainings of each kind", 3, quick=1)
    options.add(
        "every_steps", "steps between versions, and refreshes", None, kind=int
    )
    options.add("unvalidated", "`fit` gets no validation data", False)


PROGRAM = measure.program("bad_peers", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
