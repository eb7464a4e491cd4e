"""Soft targets that come with the data, as a teacher: nothing of it runs here.

`tfdistill.labels` writes them beforehand, or asks servers for them.
"""

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill import losses
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.system import run_files
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher
from tfdistill.training import steps

# What a step reports: of each teacher the share of rows that it taught, and the
# newest version of its labels; and its own number.
TAUGHT_ROWS, VERSION, STEP = "taught_rows", "label_version", "step"
# Losses of outputs that are not one distribution over classes.
_OF_NUMBERS = (
    losses.BinarySoftTargetCrossEntropy,
    losses.LogitsMeanSquaredError,
)


class LabelTeacher(teacher.Teacher):
    """A teacher whose predictions come with the data, as labels.

    Under parameter servers, too: labels travel with the batch.

    Example:
        >>> LabelTeacher("ensemble", weight=2).name
        'ensemble'
    """

    # Rows without a label are the data's business.
    answers_every_row = False

    def __init__(self, labels: Any, *, weight: float = 1.0) -> None:
        """Waits for labels.

        Args:
            labels: The name by which `tfdistill.labels` attaches them; or the
                `labels.Teachers` that asks servers for them, whose answers and
                faults `status` then counts.
            weight: What they count beside other teachers, >= 0. Default 1.

        Raises:
            ValueError: It is neither.
        """
        self._asker: Any = None if isinstance(labels, str) else labels
        name = labels if isinstance(labels, str) else labels.name
        if not name:
            raise ValueError(
                "`labels` must be the name of a teacher whose labels the data "
                f"carry, or a tfdistill.labels.Teachers; received {labels!r}."
            )
        super().__init__(name=name, weight=weight)
        self._is_group = run_files.group_of(name) is not None

    def attach(self, student: teacher.Student) -> None:
        """Takes where the last step's report is."""
        self._student = student

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Finds the labels of the batch; NaN where none counts."""
        outputs = batch.flat
        label = self._label(batch, len(outputs))
        count = attached.that_count(
            label, step=batch.step, num_rows=tf.shape(outputs[0])[0]
        )
        # Of servers of other models, versions are any numbers.
        if self._is_group or "expires_step" in label:
            newest = attached.newest_version(label)
            count &= ~_is_burn_in(newest, batch)
        return [
            _where(count, self._decoded(kept, like, loss))
            for kept, like, loss in zip(
                label["outputs"], outputs, batch.losses, strict=True
            )
        ]

    def _label(self, batch: teacher.Batch, num_outputs: int) -> Any:
        label = batch.labels.get(self.name)
        if label is None:
            raise ValueError(
                f"The data must carry labels of the teacher {self.name!r}; "
                f"received those of {sorted(batch.labels)}. Map the data "
                "set with tfdistill.labels, or leave the name out of "
                "`teachers`."
            )
        if len(label["outputs"]) != num_outputs:
            raise ValueError(
                f"The labels of {self.name!r} must have the student's "
                f"{num_outputs} outputs; received "
                f"{len(label['outputs'])}."
            )
        if label["version"].shape.rank != 1:
            raise ValueError(
                f"The labels of {self.name!r} must have one version for each "
                f"row of a batch; received {label['version'].shape}. Label "
                "batches: call `batch` first, and once."
            )
        return label

    def _decoded(
        self, kept: Any, like: tf.Tensor, loss: losses.DistillationLoss | None
    ) -> tf.Tensor:
        if "whole" not in kept:
            check_classes(self.name, loss)
        form = form_for(loss, forms.Form())
        output = form.decode(kept, num_classes=like.shape[-1])
        if not output.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"The labels of {self.name!r} must have the shape of the "
                f"student's output, {like.shape}; received {output.shape}."
            )
        return output

    def _last(self, what: str) -> float:
        """What the last step reported of this teacher; NaN if nothing."""
        found = self._student.last.detail(what)
        if found is None:
            return math.nan
        return float(found[self._student.names.index(self.name)])

    def status(self) -> dict[str, Any]:
        """Describes the labels of the last step, for logs."""
        rows, version = self._last(TAUGHT_ROWS), self._last(VERSION)
        found = super().status()
        if not math.isnan(version):
            found["step"] = int(version)
            (step,) = self._student.last.detail(STEP) or [version]
            found["age_steps"] = int(step) - int(version)
        if not math.isnan(rows):
            found["share"] = rows
        if rows == 0:
            found["health"] = teacher.ABSENT
            found["reason"] = "no row has a label that counts"
        if self._asker is not None:
            self._add_answers(found, is_absent=rows == 0)
        return found

    def _add_answers(self, found: dict[str, Any], *, is_absent: bool) -> None:
        asked = self._asker.status()
        found |= {
            "num_answers": asked["batches"] - asked["absent_batches"],
            "num_missed": asked["absent_batches"],
            "num_quarantined": sum(asked["refused"].values()),
        }
        if is_absent:
            found["reason"] += "".join(
                f"; {server['address']}: {server['problem']}"
                for server in asked["servers"]
                if server["problem"]
            )


def reported(
    names: Sequence[str],
    labels: Mapping[str, Any],
    soft: soft_targets.SoftTargets,
    step: tf.Tensor,
) -> steps.Logs:
    """Returns what a step reports of each teacher, for `status`."""
    nothing = tf.constant(math.nan, tf.float64)
    newest = [
        attached.newest_version(labels[name]) if name in labels else nothing
        for name in names
    ]
    return {
        **steps.hidden(TAUGHT_ROWS, soft.taught_rows),
        **steps.hidden(VERSION, tf.stack(newest)),
        **steps.hidden(STEP, step[tf.newaxis]),
    }


def _is_burn_in(version: tf.Tensor, batch: teacher.Batch) -> tf.Tensor:
    """Whether a version, NaN if unknown, was made in the burn-in, in graph.

    The student's own is over by now, so none that is ahead of it was.
    """
    if batch.weight is None:
        return tf.constant(False)
    is_before = version < tf.cast(batch.step, version.dtype)
    step = tf.cast(tf.where(is_before, version, 0.0), tf.int64)
    return is_before & tf.equal(batch.weight(step), 0.0)


def form_for(
    loss: losses.DistillationLoss | None, form: forms.Form
) -> forms.Form:
    """The form of an output, of which the loss says whether it is logits."""
    from_logits = loss is None or loss.from_logits is not False
    return dataclasses.replace(form, from_logits=from_logits)


def check_classes(name: str, loss: losses.DistillationLoss | None) -> None:
    """Refuses parts of an output for a loss that needs all of it."""
    if isinstance(loss, _OF_NUMBERS):
        raise ValueError(
            f"The predictions of {name!r} must be whole for "
            f"{type(loss).__name__}, which compares each number by itself; "
            "received top classes. Leave `top_k` out."
        )


def _where(count: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """An output with NaN in the rows that do not count."""
    rows = tf.reshape(count, [-1, *[1] * (output.shape.rank - 1)])
    return tf.where(rows, output, float("nan"))
