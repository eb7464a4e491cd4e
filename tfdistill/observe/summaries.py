"""Shows a group's codistillation in TensorBoard."""

import math
import os
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from tensorboard.compat.proto import summary_pb2
from tensorboard.plugins.scalar import metadata

from tfdistill.observe import pace
from tfdistill.observe import run_log
from tfdistill.observe import storage_errors
from tfdistill.statistics import events
from tfdistill.system import fits
from tfdistill.system import processes
from tfdistill.teachers import labels
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import predictions
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.training import steps

Logs = steps.Logs
# In a group's directory: a place that other programs rely on, so that
# `tensorboard --logdir` calls the run group_0/tensorboard.
DIRECTORY = "tensorboard"
_SHOWN = (
    *("loss", "task_loss", "distillation_loss", "distillation_weight"),
    *("churn", "churn_budget"),
)


class CodistillTensorBoard(steps.SteppedCallback):
    """Writes the progress of a codistilled training for TensorBoard.

    Losses, each teacher's staleness and health, exports and
    refreshes, speed and memory, at the student's global step.
    `docs/monitoring.md` lists the tags. `CodistillModel.fit` adds one by
    itself if `TFDISTILL_WORKDIR` is set.

    TensorBoard's own writer writes in the background. If storage fails, points
    are lost, but training continues. If a training resumes from a
    `callbacks.Backup`, TensorBoard drops the points of the steps that are
    repeated. A second training of the process, with another optimizer, is a
    separate TensorBoard run, `fit_2` in the directory.

    Example:
        ```python
        shown = tfdistill.callbacks.CodistillTensorBoard("logs")
        ```
    """

    chief_only = True

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int = 50,
    ) -> None:
        """Writes nothing yet.

        Args:
            directory: Directory of the TensorBoard run; a path or a URL.
            every_steps: Steps between points, >= 1. Default 50.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        self._directory = os.fspath(directory)
        self._schedule = steps.EverySteps(every_steps)
        self._exporter: Any = None
        self._loader: Any = None
        self._mixer: Any = None
        self._run_log: run_log.RunLogger | None = None
        self._file: events.SummaryFile | None = None
        self._described: set[str] = set()
        self._pace = pace.TrainingPace()

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that know of exports, refreshes and mixes."""
        self._exporter = steps.first(callbacks, steps.Exporter)
        self._loader = steps.first(callbacks, steps.Loader)
        self._mixer = steps.first(callbacks, steps.Mixer)
        self._run_log = steps.first(callbacks, run_log.RunLogger)

    def misplaced(self) -> ValueError:
        """Returns the error, with what other models can have instead."""
        return ValueError(
            f"{super().misplaced()} Without codistillation, use "
            "keras.callbacks.TensorBoard."
        )

    # ---- Keras' hooks ----

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Writes what is known before the first step."""
        super().on_train_begin(logs)
        self._roles = _roles(self.codistilled.teachers)
        self._described.clear()
        self._schedule.start(self.step)
        if self._file is not None:
            self._file.close()  # From a training that an error ended.
        number = fits.number(self._directory, of=self.model.optimizer)
        self._file = events.SummaryFile(
            fits.below(self._directory, number),
            step=self.step,
            errors=storage_errors.ERRORS,
        )
        others = (self._exporter, self._loader, self._mixer)
        self._pace = pace.TrainingPace(
            [each for each in others if each is not None]
        )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Does not count the time since the last epoch."""
        super().on_epoch_begin(epoch, logs)
        self._pace.go_on()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Writes a point when one is due."""
        before = self.step
        super().on_train_batch_end(batch, logs)
        last = self.model.trainer.last
        self._pace.add(self.step - before, float(last.examples))
        if self._schedule.due(self.step):
            self._point(logs or {})

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Does not count the time of the evaluation."""
        self._pace.go_on()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Writes the epoch's metrics."""
        self.read_step()
        found = _of_logs(
            {
                f"Validation/{name.removeprefix('val_')}"
                if name.startswith("val_")
                else f"training/{name}": value
                for name, value in (logs or {}).items()
                if name not in (*_SHOWN, "teacher_staleness")
            }
        )
        if not self.on_servers:
            rate = keras.ops.convert_to_numpy(
                self.model.optimizer.learning_rate
            )
            found["training/learning_rate"] = float(rate)
        self._scalars(found)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Writes the last point and closes the file."""
        self.read_step()
        if self._pace.num_steps:
            self._point(logs or {})
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- one point ----

    def _point(self, logs: Mapping[str, Any]) -> None:
        status = self.model.teachers.status()
        self._scalars(
            {
                **{f"codistillation/{name}": logs.get(name) for name in _SHOWN},
                **_of_teachers(status, self.step, self._roles),
                **self._taught(),
                **_of_exchange(self._exporter, self._loader),
                **_of_mixing(self._mixer),
                **_of_goodput(self._run_log),
                **self._pace.take_figures(),
                "host/rss_bytes": processes.resident_bytes(),
            }
        )

    def _taught(self) -> dict[str, Any]:
        """The share of rows that each teacher taught in the last step."""
        (found,) = self.model.trainer.last.detail(labels.TAUGHT_ROWS) or [()]
        return {
            f"teachers/{role}/taught_rows": float(share)
            for role, share in zip(self._roles, found, strict=False)
            if not math.isnan(share)
        }

    # ---- to the file ----

    def _scalars(self, values: Mapping[str, Any]) -> None:
        summary = events.scalars(values)
        for point in summary.value:
            if point.tag not in self._described:
                self._described.add(point.tag)
                text = _described(point.tag, self._roles)
                point.metadata.CopyFrom(
                    metadata.create_summary_metadata("", text)
                )
                # TensorBoard's fast loader drops descriptions without it.
                point.metadata.data_class = summary_pb2.DATA_CLASS_SCALAR
        if self._file is not None:
            self._file.add(summary, step=self.step)


# ---- the tags of docs/monitoring.md, and their values ----

_Scalars = dict[str, Any]
# By the tag's last part, for each teacher.
_OF_A_TEACHER = {
    "taught_rows": "Share of the last step's examples (on the "
    "chief's first replica) for which the teacher had "
    "an answer.",
    "staleness_steps": "The student's step minus the version's.",
    "health": "4 good, 3 fading, 2 too stale, 1 dropped, 0 absent.",
    "share": "Share of the teacher's weight that remains at its age.",
    "loss": "Task loss on rows of the student's batches, over the "
    "last five refreshes.",
    "num_quarantined": "Versions (messages, answers) refused so far.",
    "num_answers": "Batches with this teacher's predictions in time.",
    "num_missed": "Batches without this teacher's predictions.",
    "num_unsent": "Messages that the peer didn't accept.",
    "num_forged": "Messages that were unsigned or from another run.",
    "sent_bytes": "Bytes sent to that peer so far.",
}
# By tag; of metrics, by their prefix.
_MEANINGS = {
    "codistillation/task_loss": "Task loss, mean since the epoch began.",
    "codistillation/distillation_loss": "Distillation loss before its weight, "
    "mean since the epoch began.",
    "codistillation/loss": "Task loss plus the weighted distillation loss. To "
    "see whether distillation helps, compare Validation/loss.",
    "codistillation/distillation_weight": "Factor of the distillation loss at "
    "the last step.",
    "codistillation/churn": "Latest measured churn to the teacher of a "
    "ChurnBudget, on its held-out rows.",
    "codistillation/churn_budget": (
        "The largest churn that a ChurnBudget allows."
    ),
    "teachers/num_good": "Teachers with full weight.",
    "exchange/export_secs": "Duration of the last export, in the background.",
    "exchange/export_bytes": "Size of the last version.",
    "exchange/read_secs": (
        "Duration of the slowest teacher's last read, in the background."
    ),
    "exchange/num_published": "Exports so far.",
    "exchange/num_skipped": (
        "Exports skipped because another was still being written."
    ),
    "exchange/num_failed": "Exports that failed so far.",
    "exchange/export_blocked_secs": "Pause of training for the last export.",
    "exchange/refresh_blocked_secs": "Pause of training for the last refresh.",
    "exchange/blocked_share": "Share of the time in which exports, refreshes "
    "and mixes paused training; 0.02 is usual.",
    "mixing/num_mixes": "Mixes of weights so far.",
    "mixing/num_skipped": "Mixes skipped because no peer had a version.",
    "mixing/num_waits": "Mixes that waited for versions.",
    "mixing/read_bytes": "Size of the versions mixed so far.",
    "mixing/staleness_steps": "Age of the oldest version in the last mix.",
    "mixing/blocked_secs": (
        "Pause of training for the last mix, including its wait."
    ),
    "mixing/wait_secs": "Time that the last mix waited for versions.",
    "goodput/share": "Share of this group's time that wasn't lost to faults.",
    "goodput/": "Time lost so far; docs/monitoring.md lists the causes.",
    "host/examples_per_second": "Examples per second, without evaluations.",
    "host/step_secs": (
        "Mean duration of a step since the last point, without evaluations."
    ),
    "host/rss_bytes": "Memory of the chief's process.",
    "training/learning_rate": "Learning rate at the end of the epoch.",
    "training/": "Mean over the epoch.",
    "Validation/": "Value over the validation data; loss is the task loss.",
}
# From the worst that may recover to the best, as a chart shows them.
_HEALTHS = ("absent", "dropped", "too_stale", "fading", "good")
_OF_ANSWERS = (
    *("num_answers", "num_missed", "num_unsent", "num_forged"),
    "sent_bytes",
)


def add_to(
    callbacks: list[keras.callbacks.Callback], directory: str | None
) -> None:
    """Adds a `CodistillTensorBoard` in a launched run, unless there is one."""
    if directory and not steps.first(callbacks, CodistillTensorBoard):
        callbacks.append(CodistillTensorBoard(f"{directory}/{DIRECTORY}"))


def _roles(teachers: Iterable[teacher_lib.Teacher]) -> dict[str, str]:
    """Returns by role, which tags are made of, the name of each teacher.

    Peers have the same roles in all groups, whose curves so share a chart.
    """
    kinds = (peers_lib.Peer, predictions.PredictedPeer)
    peers = [each for each in teachers if isinstance(each, kinds)]
    found: dict[str, str] = {}
    for each in teachers:
        role = each.name.strip("/").replace("/", "_")
        if each in peers:
            role = f"peer_{peers.index(each) + 1}" if peers[1:] else "peer"
        found[role] = each.name
    return found


def _described(tag: str, roles: Mapping[str, str]) -> str:
    """Returns what TensorBoard says of a tag; nothing of unknown ones."""
    kind, _, name = tag.partition("/")
    role, _, name = name.rpartition("/")
    if kind == "teachers" and role:
        return f"{_OF_A_TEACHER[name]} The teacher: {roles[role]}."
    return _MEANINGS.get(tag) or _MEANINGS.get(f"{kind}/", "")


def _of_logs(logs: Mapping[str, Any]) -> _Scalars:
    """Returns the numbers among logs.

    Example:
        >>> _of_logs({"loss": 1.5, "f1": np.array([0.5, 0.25]), "note": "a"})
        {'loss': 1.5}
    """
    arrays = {tag: np.asarray(value) for tag, value in logs.items()}
    return {
        tag: float(value)
        for tag, value in arrays.items()
        if not value.ndim and value.dtype.kind in "biuf"
    }


def _of_teachers(
    status: Sequence[Mapping[str, Any]], step: int, roles: Iterable[str]
) -> _Scalars:
    """Returns what is known of the teachers; None if it is unknown."""
    reads = [t["read_secs"] for t in status if t["read_secs"] is not None]
    found: _Scalars = {
        "teachers/num_good": sum(t["health"] == "good" for t in status),
        "exchange/read_secs": max(reads, default=None),
    }
    for teacher, role in zip(status, roles, strict=False):
        version = teacher["step"]
        values = {
            "staleness_steps": step - version if version >= 0 else None,
            "health": _HEALTHS.index(teacher["health"]),
            "share": teacher["share"],
            "loss": teacher["teacher_loss"],
            "num_quarantined": teacher["num_quarantined"],
            # Only for peers that send predictions.
            **{key: teacher[key] for key in _OF_ANSWERS if key in teacher},
        }
        found |= {f"teachers/{role}/{key}": v for key, v in values.items()}
    return found


def _of_exchange(exporter: Any, loader: Any) -> _Scalars:
    found: _Scalars = {}
    if exporter is not None:
        found |= {
            "exchange/export_secs": exporter.writes.last_secs,
            "exchange/export_bytes": exporter.last_num_bytes,
            "exchange/num_published": exporter.totals["published"],
            "exchange/num_skipped": exporter.totals["skipped"],
            "exchange/num_failed": exporter.totals["failed"],
            "exchange/export_blocked_secs": exporter.blocked.last_secs,
        }
    if loader is not None:
        found["exchange/refresh_blocked_secs"] = loader.blocked.last_secs
    return found


def _of_goodput(log: run_log.RunLogger | None) -> _Scalars:
    if log is None or not (spent := log.spent()).total:
        return {}
    lost = {f"goodput/{name}_secs": secs for name, secs in spent.lost.items()}
    return {"goodput/share": spent.share, **lost}


def _of_mixing(mixer: Any) -> _Scalars:
    if mixer is None:
        return {}
    return {
        "mixing/num_mixes": mixer.num_mixes,
        "mixing/num_skipped": mixer.num_skipped,
        "mixing/num_waits": mixer.num_waits,
        "mixing/read_bytes": mixer.num_bytes,
        "mixing/staleness_steps": max(
            mixer.staleness_steps.values(), default=None
        ),
        "mixing/blocked_secs": mixer.blocked.last_secs,
        "mixing/wait_secs": mixer.waits.last_secs,
    }
