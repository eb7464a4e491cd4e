"""The student's own past as its teacher: a running mean of its values.

The mean teacher of Tarvainen and Valpola 2017 (arXiv:1703.01780), and a control
for codistillation: what does it add to a teacher that needs no second group?
"""

from typing import Any

import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import teacher

NAME = "own_past"


def checked(decay: Any) -> float | None:
    """Returns the decay of `TeacherSet(own_past=...)`."""
    is_number = isinstance(decay, int | float) and not isinstance(decay, bool)
    if decay is not None and not (is_number and 0 <= decay < 1):
        raise ValueError(
            "`own_past` must be None, or the share of the old mean that each "
            f"refresh keeps, >= 0 and < 1; received {decay!r}. Such as 0.9."
        )
    return decay


class PastTeacher(teacher.Teacher):
    """The place of the student's own mean. Make it in the strategy's scope."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
    ) -> None:
        """Begins with the student's present values."""
        super().__init__(NAME, graph, options)
        self._decay = options.own_past or 0.0
        self._writer = saved_model.SavedModelWriter(graph)
        self.function, self._variables = self._own_graph()
        self._install(self._writer.snapshot())

    @property
    def mean(self) -> list[tf.Variable]:
        """The mean, for backups: by variable of the student's graph."""
        return self._variables

    def follow_student(self) -> None:
        """Moves the mean towards the student's values, between two steps.

        All workers do so at the same step. What is no float is taken as it is.
        """
        for mean, value in zip(
            self._variables, self._writer.snapshot(), strict=True
        ):
            if mean.dtype.is_floating:
                old = tf.convert_to_tensor(mean)
                value = old + (1 - self._decay) * (value - old)
            mean.assign(value)
