"""Several students in one model, which teach each other: mutual learning.

Zhang et al. 2018 (arXiv:1706.00384), with the update of all students at once:
each learns from what the others predicted before the step. Nothing is sent or
run twice, since the predictions are outputs of the step itself.
"""

from typing import Any

import tensorflow as tf

from tfdistill.exports import student_graph
from tfdistill.teachers import by_value
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import soft_targets


def checked(cohort: Any) -> int | None:
    """Returns the number of students of `TeacherSet(cohort=...)`."""
    is_whole = isinstance(cohort, int) and not isinstance(cohort, bool)
    if cohort is not None and not (is_whole and cohort >= 2):
        raise ValueError(
            "`cohort` must be None, or the number of students that are the "
            f"outputs of one model, >= 2; received {cohort!r}."
        )
    return cohort


class NextStudent(by_value.LabelTeacher):
    """The teacher of each student is one of the others, at a fixed distance.

    The students stand in a circle. Those at all distances together are, for
    each student, all the others.
    """

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
        *,
        distance: int,
    ) -> None:
        """Takes as teachers the students so far ahead in the circle."""
        super().__init__(f"next_{distance}", graph, options)
        self._distance = distance

    def ask(self, question: soft_targets.Question) -> list[tf.Tensor]:
        """Returns the outputs of the step, each student's at another's place.

        Of a training forward pass, as of peers that send their predictions.
        """
        own, size = question.outputs, self._options.cohort or 1
        if len(own) % size:
            raise ValueError(
                f"A model of {size} students must have as many outputs of "
                f"each; received {len(own)} outputs. Return those of the "
                "first student, then those of the next."
            )
        first = self._distance * (len(own) // size)
        return [*own[first:], *own[:first]]
