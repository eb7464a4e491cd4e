"""Teachers whose predictions arrive by value: nothing of them is run here."""

from typing import Any

import tensorflow as tf

from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher


class LabelTeacher(teacher.Teacher):
    """The place of a teacher whose predictions come with the data."""

    # What a parameter-server group asks of its teachers: it keeps nothing.
    half = 0
    worker_variables: tuple[Any, ...] = ()

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
        *,
        from_logits: bool | None,
    ) -> None:
        """Waits for labels; `from_logits` is how the loss takes outputs."""
        super().__init__(name, graph, options)
        self._form = forms.Form(from_logits=from_logits is not False)

    def use(self, arguments: tf.Tensor) -> None:
        """Has nothing to fetch."""

    def ask(self, question: soft_targets.Question) -> list[tf.Tensor]:
        """Finds the labels of the batch; NaN where none counts."""
        label = self._label(question)
        count = attached.that_count(
            label,
            step=question.step,
            num_rows=tf.shape(question.outputs[0])[0],
        )
        return [
            _where(count, self._decoded(kept, like))
            for kept, like in zip(
                label["outputs"], question.outputs, strict=True
            )
        ]

    def _label(self, question: soft_targets.Question) -> Any:
        label = question.labels.get(self.name)
        if label is None:
            raise ValueError(
                f"The data must carry labels of the teacher {self.name!r}; "
                f"received those of {sorted(question.labels)}. Map the data "
                "set with tfdistill.labels, or leave the name out of "
                "TeacherSet(labels=...)."
            )
        if len(label["outputs"]) != len(question.outputs):
            raise ValueError(
                f"The labels of {self.name!r} must have the student's "
                f"{len(question.outputs)} outputs; received "
                f"{len(label['outputs'])}."
            )
        return label

    def _decoded(self, kept: Any, like: tf.Tensor) -> tf.Tensor:
        output = self._form.decode(kept, num_classes=like.shape[-1])
        if not output.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"The labels of {self.name!r} must have the shape of the "
                f"student's output, {like.shape}; received {output.shape}."
            )
        return output


def _where(count: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """An output with NaN in the rows that do not count."""
    rows = tf.reshape(count, [-1, *[1] * (output.shape.rank - 1)])
    return tf.where(rows, output, float("nan"))
