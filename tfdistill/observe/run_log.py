"""The run's progress as JSON lines, and whether it had any teacher at all."""

import contextlib
import json
import logging
import math
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.observe import pace
from tfdistill.status import goodput
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.system import run_files
from tfdistill.system import untrusted
from tfdistill.training import steps

Logs = steps.Logs
_log = logging.getLogger(__name__)


class TeachingWatch(keras.callbacks.Callback):
    """Warns at the end of a training in which no step had a teacher.

    `CodistillModel.fit` adds one if the model has teachers. It looks at the
    logs of epochs, in which the distillation loss is 0 if no teacher was
    asked, so that no step waits for it.
    """

    chief_only = True

    def __init__(self) -> None:
        super().__init__()
        # Why there was no teacher, once training has ended.
        self.untaught: str | None = None
        self._is_taught = False
        self._num_epochs = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forgets a previous training."""
        self.untaught = None
        self._is_taught, self._num_epochs = False, 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Lets the teachers know at which step the training begins."""
        if not self._num_epochs:  # A backup has been restored by now.
            self.model.teachers.count(self._step(), begins=True)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Sees whether any step so far had a teacher."""
        self._num_epochs += 1
        names = ("distillation_loss", "distillation_weight")
        logs = logs or {}
        found = [float(logs[name]) for name in names if name in logs]
        # A step that logs neither is the user's own, of which nothing is known.
        self._is_taught |= any(found) or not found

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Warns if no step had a teacher, and says why."""
        self.model.teachers.count(self._step())
        if self._num_epochs and not self._is_taught:
            self.untaught = self._reason()
            _log.warning("This run never used a teacher: %s", self.untaught)

    def _step(self) -> int:
        optimizer = self.model.optimizer
        return int(keras_internals.num_batches(optimizer).numpy())

    def _reason(self) -> str:
        model: Any = self.model
        done = self._step()
        last = tf.constant(max(0, done - 1), tf.int64)
        weight = float(model.teachers.weight(last))
        if not weight > 0:
            return (
                f"`distillation_weight` was still {weight:g} at step {done}. "
                "If you didn't intend that, shorten the burn-in or train "
                "longer."
            )
        found = model.teachers.status()
        teachers = "; ".join(map(_described, found))
        is_refused = any(each["num_quarantined"] for each in found)
        remedy = "Check the teacher's predictions on a batch of the data."
        if is_refused:
            remedy = (
                "Check whether the other group has the same labels, columns "
                "and settings, and learns at all."
            )
        elif model.teachers.follows_peers:
            remedy = (
                "Train longer, export more often (`every_steps` of the "
                "StudentExporter), or make the groups start together "
                "(WaitForGroups)."
            )
        return f"{teachers}. {remedy}"


def _described(teacher: dict[str, Any]) -> str:
    name, step, reason = (teacher[n] for n in ("name", "step", "reason"))
    if teacher["health"] == "good":
        if step < 0:
            return f"{name} gave no usable answer"
        # It is in use by now, and no step came after that.
        but = " that wasn't refused" if teacher["num_quarantined"] else ""
        return f"the first version of {name}{but} (step {step}) came at the end"
    version = f"version {step}" if step >= 0 else "no version in use"
    health = teacher["health"].replace("_", " ")
    why = (reason or version).rstrip(".")
    if number := teacher["num_quarantined"]:
        return f"{name}: {number} version{'s' * (number > 1)} refused ({why})"
    return f"{name} is {health} ({why})"


class RunLogger(steps.SteppedCallback):
    """Appends the run's progress to `metrics.jsonl`, one JSON object a line.

    `fit` adds one by itself if `TFDISTILL_WORKDIR` is set; the launcher's live
    status reads it. Each line holds the step, the epoch, the time (Unix
    seconds), the logs (null for NaN), `examples_per_second` since the line
    before, without evaluations, and `total_steps` if it is known; with a
    `StudentExporter` the step that it `published` last; with a `WeightMixer`
    its totals, as `mixing`; with several workers those that make the others
    wait, as `slow_workers`; in the second `fit` of a process and later ones its
    number, as `fit`. In a training that `callbacks.Backup` resumes,
    lines of steps that are done again go; the marks of `status.goodput`, in
    `attempts.jsonl` beside it, stay. If no step had a teacher, the last line
    says why, as `untaught`.
    """

    chief_only = True

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        every_secs: float = 1.0,
    ) -> None:
        """Writes nothing yet.

        Args:
            directory: Where `metrics.jsonl` grows.
            every_secs: Least time between two lines in an epoch. Default 1.
        """
        super().__init__()
        self._path = pathlib.Path(directory) / run_files.METRICS
        self._every_secs = every_secs
        self._epoch = 0
        self._pace = pace.TrainingPace()
        self._written_at = 0.0
        self._lines = run_files.LineFile(self._path)
        self._marks = goodput.Marks(self._path.parent)
        self._watch: TeachingWatch | None = None
        # Which `fit` of the process it is.
        self._fit = 1
        self._exporter: Any = None
        self._mixer: Any = None

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that it reports on."""
        self._exporter = steps.first(callbacks, steps.Exporter)
        self._mixer = steps.first(callbacks, steps.Mixer)
        self._watch = steps.first(callbacks, TeachingWatch)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Makes the directory and notes the start."""
        super().on_train_begin(logs)
        if not isinstance(self.model, steps.Trained):
            raise self.misplaced()
        backup = self.model.trainer.backup
        self._fit = fits.number(self._path)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Before what is done again goes.
            last = _last_line(self._path, self._fit)
            self._marks.resume(self.step, last, fit=self._fit)
            if last and last["step"] and not self.step and backup is None:
                _log.warning(
                    "This group had trained to step %s before, and starts at "
                    "step 0 again: `fit` has no tfdistill.callbacks.Backup to "
                    "resume from. Add a Backup to its callbacks, or use "
                    "tfdistill.callbacks.defaults(...), which has a Backup.",
                    last["step"],
                )
            if backup is not None and backup.resumed_step == self.step:
                _forget_after(self._path, self.step, self._fit)
        except OSError as error:
            self._warn(error)
        # Step, epoch and batch at which this training begins.
        self._first: tuple[int, int, int] | None = None
        self._spent: tuple[float, goodput.Goodput] | None = None
        self._pace = pace.TrainingPace()
        self._write({"event": "start"})

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Notes the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Notes the first step of this training."""
        super().on_train_batch_begin(batch, logs)
        if self._first is None:
            self._first = (self.step, self._epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Writes a line when the last one is old enough."""
        before = self.step
        super().on_train_batch_end(batch, logs)
        self._marks.see(self.step)
        # Not of a training step that is not this package's.
        examples = float(self.model.trainer.last.examples or 0)
        self._pace.add(self.step - before, examples)
        if time.time() - self._written_at >= self._every_secs:
            self._write(logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Does not count the time of the evaluation."""
        self._pace.go_on()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Writes a line with the epoch's logs, validation included."""
        self.read_step()
        self._write({"event": "epoch_end", **(logs or {})})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Notes the end."""
        self.read_step()
        untaught = self._watch.untaught if self._watch else None
        why = {"untaught": untaught} if untaught else {}
        self._marks.end(self.step)
        self._write({"event": "end", **why, **(logs or {})})

    def spent(self) -> goodput.Goodput:
        """Returns what the group's time was spent on, once it advances.

        Nothing is lost from then on, so its files are read once.
        """
        now, place = time.time(), self._path.parent
        group = run_files.group_of(place.name)
        if group is None or not self._marks.advances:
            return goodput.Goodput()
        if self._spent is None:
            found = goodput.of_groups(place.parent, [group], until=now)
            self._spent = (now, found[group])
        then, before = self._spent
        return before + goodput.Goodput(now - then)

    def _write(self, logs: dict[str, Any] | None) -> None:
        now = time.time()
        is_taught = isinstance(self.model, steps.Codistilled)
        slow = list(self.model.trainer.worker_waits.slow.values())
        line = {
            **({"fit": self._fit} if self._fit > 1 else {}),
            "step": self.step,
            "epoch": self._epoch,
            "time": now,
            "total_steps": self._total_steps(),
            "teachers": self.model.teachers.status() if is_taught else [],
            "published": self._exporter.published if self._exporter else None,
            **self._place(),
            **({"mixing": self._mixer.totals} if self._mixer else {}),
            **({"slow_workers": slow} if slow else {}),
            **{key: _plain(value) for key, value in (logs or {}).items()},
        }
        speed = self._pace.take_figures().get("host/examples_per_second", 0.0)
        if speed > 0:
            line["examples_per_second"] = speed
        self._written_at = now
        was_lost = self._lines.error is not None
        self._lines.append(line)
        if self._lines.error is not None and not was_lost:
            self._warn(self._lines.error)

    def _place(self) -> dict[str, str]:
        """Where in the exchange a later training publishes."""
        exchange = self._exporter.exchange if self._exporter else None
        if exchange is None or exchange.root == exchange.base:
            return {}
        return {"exchange": exchange.root.removeprefix(f"{exchange.base}/")}

    def _warn(self, error: OSError) -> None:
        _log.warning(
            "%s is incomplete from now on; training continues: %s",
            self._path,
            error,
        )

    def _total_steps(self) -> int | None:
        steps, epochs = self.params.get("steps"), self.params.get("epochs")
        # Where a training resumes is known with its first batch.
        first = self._first or ((0, 0, 0) if self.step == 0 else None)
        if not steps or not epochs or first is None:
            return None
        step, epoch, batch = first
        return step + int(steps) * (int(epochs) - epoch) - batch


def add_to(
    callbacks: list[keras.callbacks.Callback], directory: str | None
) -> None:
    """Adds a `RunLogger` in a launched run, unless there is one.

    Also makes the `directory` of the group, which is None in any other run:
    callbacks of Keras open files there, and make no directory.
    """
    if directory is None:
        return
    with contextlib.suppress(OSError):
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
    if not any(isinstance(callback, RunLogger) for callback in callbacks):
        callbacks.append(RunLogger(directory))


def _last_line(path: pathlib.Path, fit: int) -> dict[str, Any] | None:
    """Returns the last whole line of a `fit` in a log, if it has one."""
    lines = untrusted.last_records(path)
    return next(
        (
            line
            for line in reversed(lines)
            if {"step", "time"} <= {*line} and line.get("fit", 1) == fit
        ),
        None,
    )


def _forget_after(path: pathlib.Path, step: int, fit: int) -> None:
    """Removes what a `fit` logged after the step that it resumes from.

    A line that a crash has cut short goes, too.
    """
    kept = []
    with contextlib.suppress(FileNotFoundError):
        # A broken disk may leave bytes that aren't text.
        text = path.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            with contextlib.suppress(ValueError, TypeError, KeyError):
                found = json.loads(line)
                is_done = found["step"] <= step and found.get("event") != "end"
                if found.get("fit", 1) != fit or is_done:
                    kept.append(line)
    run_files.write(path, (f"{line}\n".encode() for line in kept))


def _plain(value: object) -> Any:
    """A log value in types of JSON: numbers, lists, null for NaN."""
    if isinstance(value, str):
        return value
    return _finite(tf.convert_to_tensor(value).numpy().tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(item) for item in value]
    number = float(value)
    return number if math.isfinite(number) else None
