"""Two groups or more in one process, which take turns.

Each trains until it has published a version; then the next one does, once it
has read those of the others. So a run does not depend on the speed of the
machine.
"""

import collections
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill.teachers import peers

_READ_SECS = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """What another group than an honest one does.

    Attributes:
        data: Changes its training data. Default: nothing.
        rate: The learning rate of SGD, in place of its optimizer.
        num_steps: After so many it ends. Default: as its workload.
    """

    data: Callable[[tf.data.Dataset, keras.Model], Any] = lambda data, _: data
    rate: float | None = None
    num_steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a group.

    Attributes:
        loss: On held-out data.
        taught: The share of steps with a weight that had a teacher.
        is_doubted: Whether a version was refused, or a teacher doubted.
        predictions: What the student says of the held-out rows, in order.
        secs: From the first step to the last.
    """

    loss: float
    taught: float
    is_doubted: bool
    predictions: np.ndarray
    secs: float


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
                each.record.doubt(each.label, each.waits)
                for each in self.model.teachers
            )
        if self._exporter._last_step == self._published:
            return
        self._published = self._exporter._last_step
        self._exporter._worker.wait_idle(_READ_SECS)
        self._lock.hand_over(self._group)
        self._read()

    def _read(self) -> None:
        """Waits until the peers' newest versions were read, or refused."""
        deadline = time.monotonic() + _READ_SECS
        for peer in self.model.teachers:
            if not isinstance(peer, peers.Peer):
                continue
            newest = peer.exchange.latest(peer.follower.group)
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
    """Whose turn it is, in a ring; a group that has ended has none."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._change = threading.Condition()
        self._ring = sorted(groups)

    def begin(self, group: int) -> None:
        with self._change:
            self._change.wait_for(lambda: self._ring[0] == group)

    def hand_over(self, group: int) -> None:
        with self._change:
            self._ring.append(self._ring.pop(0))
            self._change.notify_all()
        self.begin(group)

    def end(self, group: int) -> None:
        with self._change:
            self._ring.remove(group)
            self._change.notify_all()


def _made(
    workload: Any, cluster: tfdistill.Cluster, change: Change, teachers: Any
) -> tuple[Any, dict[str, Any]]:
    """Makes a group, on the thread of all: seeds are of the process."""
    group = cluster.group
    keras.utils.set_random_seed(1000 * workload.seed + group)
    train, validation = workload.datasets(cluster)
    model = tfdistill.CodistillModel(
        workload.model(), teachers=teachers, agree_on=workload.agree_on
    )
    loss = workload.loss
    loss = loss if isinstance(loss, keras.losses.Loss) else loss(train)
    optimizer = workload.optimizer()
    if change.rate is not None:
        optimizer = keras.optimizers.SGD(change.rate)
    model.compile(
        optimizer,
        loss,
        distillation_loss=workload.distillation_loss
        or tfdistill.losses.SoftTargetCrossEntropy(from_logits=True),
        distillation_weight=workload.distillation_weight,
    )
    num_steps = change.num_steps or workload.num_steps
    data = change.data(train, model.student)
    return model, {
        "x": data,
        "steps_per_epoch": num_steps,
        "validation_data": validation,
    }


def _fit(
    model: Any,
    arguments: dict[str, Any],
    workload: Any,
    group: int,
    turn: _Lock,
    root: str,
    held_out: Any,
) -> Result:
    """Trains a group by turns; a dead one just ends."""
    exporter = tfdistill.callbacks.StudentExporter(
        tfdistill.Exchange(root),
        every_steps=workload.every_steps,
        group=group,
        **workload.exporter,
    )
    turns = _Turns(turn, group, exporter)
    loader = tfdistill.callbacks.TeacherLoader(
        every_steps=workload.refresh_every_steps
    )
    turn.begin(group)
    begin = time.monotonic()
    try:
        model.fit(**arguments, callbacks=[exporter, turns, loader], verbose=0)
    finally:
        turn.end(group)
    secs = time.monotonic() - begin
    return Result(
        loss=float(model.evaluate(held_out, verbose=0)),
        taught=turns.num_taught / max(turns.num_steps, 1),
        is_doubted=turns.is_doubted
        or any(
            peer.follower.rejected
            for peer in model.teachers
            if isinstance(peer, peers.Peer)
        ),
        predictions=np.asarray(model.predict(held_out, verbose=0)),
        secs=secs,
    )


def of_peers(cluster: tfdistill.Cluster) -> Any:
    """Returns the other groups' versions as teachers."""
    return tfdistill.teachers.Peers(
        tfdistill.Exchange(cluster.exchange), peers=cluster.peers
    )


def train(
    workload: Any,
    *,
    teachers: Callable[[tfdistill.Cluster], Any] = of_peers,
    num_groups: int = 2,
    other: Change | None = None,
    groups: Sequence[int] | None = None,
    validated: bool = True,
) -> list[Result]:
    """Trains all groups; returns what became of each that did not fail.

    Args:
        workload: What all train, `workload.seed` included.
        teachers: Makes those of a group, or None for none.
        num_groups: At least two, also where some aren't trained.
        other: What group 1 does. Default: as group 0.
        groups: Which are trained. Default: all.
        validated: Whether `fit` gets validation data.
    """
    groups = range(num_groups) if groups is None else groups
    turn, found = _Lock(groups), dict[int, Result]()
    with tempfile.TemporaryDirectory() as root:
        changes = collections.defaultdict(Change, {1: other or Change()})
        clusters = [
            tfdistill.Cluster(group=g, num_groups=num_groups, exchange=root)
            for g in groups
        ]
        made = {
            each.group: _made(
                workload, each, changes[each.group], teachers(each)
            )
            for each in clusters
        }

        def run(group: int) -> None:
            model, arguments = made[group]
            held_out = arguments["validation_data"]
            if not validated:
                arguments["validation_data"] = None
            found[group] = _fit(
                model, arguments, workload, group, turn, root, held_out
            )

        threads = [threading.Thread(target=run, args=(g,)) for g in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if 0 not in found:
        raise RuntimeError("Group 0 failed; its thread has said why.")
    return [found[group] for group in sorted(found)]
