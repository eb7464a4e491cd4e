"""Soft targets that come with the data, as a teacher: nothing of it runs here.

`tfdistill.labels` writes them beforehand, or asks servers for them.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill import losses
from tfdistill.labels import forms
from tfdistill.teachers import output_kinds
from tfdistill.teachers import teacher

# What a step reports of each teacher: the share of rows that it taught.
TAUGHT_ROWS = "taught_rows"


class LabelTeacher(teacher.Teacher):
    """A teacher whose predictions come with the data, as labels.

    It works under parameter servers, too: labels travel with the batch.

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
                `labels.TeacherClient` that asks servers for them, whose answers
                and faults `status` then counts.
            weight: Weight relative to other teachers, >= 0. Default 1.

        Raises:
            ValueError: It is neither.
        """
        self._asker: Any = None if isinstance(labels, str) else labels
        name = labels if isinstance(labels, str) else labels.name
        if not name:
            raise ValueError(
                "`labels` must be the name of a teacher whose labels the data "
                "carry, or a tfdistill.labels.TeacherClient; received "
                f"{labels!r}."
            )
        super().__init__(name=name, weight=weight)

    def attach(self, student: teacher.Student) -> None:
        """Takes where the last step's report is."""
        self._student = student

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Finds the labels of the batch; NaN where none counts."""
        outputs = batch.flat
        label = self._label(batch, len(outputs))
        counts = label["version"] >= 0
        if "expires_step" in label:
            counts &= batch.step <= label["expires_step"]
        names = [next(iter(kept)) for kept in label["outputs"]]
        ends = [name.removeprefix("whole_") for name in names]
        own = self._student.graph.ends
        output_kinds.check_ends(self.name, ends, batch.losses, own)
        said = []
        for kept, like, loss in zip(
            label["outputs"], outputs, batch.losses, strict=True
        ):
            output = self._decoded(kept, like, loss)
            rows = tf.reshape(counts, [-1, *[1] * (output.shape.rank - 1)])
            said.append(tf.where(rows, output, float("nan")))
        return output_kinds.checked(self.name, said, batch.losses)

    def _label(self, batch: teacher.Batch, num_outputs: int) -> Any:
        label = batch.labels.get(self.name)
        if label is None:
            raise ValueError(
                f"The data must contain labels of the teacher {self.name!r}; "
                f"it contains labels of {sorted(batch.labels)}. Map the data "
                "set with tfdistill.labels, or remove the name from `teachers`."
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
        self,
        kept: Mapping[str, Any],
        like: tf.Tensor,
        loss: losses.DistillationLoss | None,
    ) -> tf.Tensor:
        if forms.is_top(kept):
            check_classes(self.name, loss)
        form = form_for(loss, forms.Form())
        output = form.decode(kept, num_classes=like.shape[-1])
        if not output.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"The labels of {self.name!r} must have the shape of the "
                f"student's output, {like.shape}; received {output.shape}."
            )
        return output

    def status(self) -> dict[str, Any]:
        """Describes the labels of the last step, for logs."""
        found, rows = super().status(), math.nan
        taught = self._student.last.detail(TAUGHT_ROWS)
        if taught is not None:
            rows = float(taught[0][self._student.names.index(self.name)])
        if not math.isnan(rows):
            found["share"] = rows
        if rows == 0:
            found["health"] = teacher.ABSENT
            found["reason"] = "no row has a usable label"
        if self._asker is not None:
            self._add_answers(found, is_absent=rows == 0)
        return found

    def _add_answers(self, found: dict[str, Any], *, is_absent: bool) -> None:
        asked = self._asker.status()
        found |= {
            "step": max((s["version"] for s in asked["servers"]), default=-1),
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


def form_for(
    loss: losses.DistillationLoss | None, form: forms.Form
) -> forms.Form:
    """The form of an output, of which the loss says whether it is logits."""
    from_logits = loss is None or loss.from_logits is not False
    return dataclasses.replace(form, from_logits=from_logits)


def check_classes(name: str, loss: losses.DistillationLoss | None) -> None:
    """Refuses parts of an output for a loss that needs all of it."""
    if isinstance(loss, output_kinds.OF_NUMBERS):
        raise ValueError(
            f"The predictions of {name!r} must be whole for "
            f"{type(loss).__name__}, which compares each number separately; "
            "received only the top classes. Leave out `top_k`."
        )


def check_read(
    labels: Mapping[str, Any], teachers: Iterable[teacher.Teacher]
) -> None:
    """Warns of labels in the data that no teacher reads."""
    if not any(isinstance(each, LabelTeacher) for each in teachers):
        warnings.warn(
            f"The data contain labels of {', '.join(labels)}, which no teacher "
            "reads. Add tfdistill.teachers.LabelTeacher(name) to `teachers`, "
            "or leave out `distillation_loss` to train without teachers.",
            stacklevel=2,
        )
