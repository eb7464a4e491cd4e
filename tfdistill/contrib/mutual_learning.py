"""Several students in one model, which teach each other: mutual learning.

Zhang et al. 2018 (arXiv:1706.00384), with the update of all students at once:
each learns from what the others predicted before the step. Nothing is sent or
run twice, since the predictions are outputs of the step itself.
"""

from collections.abc import Sequence

import tensorflow as tf

import tfdistill
from tfdistill import teachers


class OtherStudents(teachers.Teacher):
    """Lets students that are outputs of one model teach each other.

    The model returns its first student's outputs, then the next student's.
    Each learns from all the others: the students stand in a circle, and for
    each distance in it there is one teacher, the student so far ahead.

    Example:
        >>> teachers = OtherStudents(3)
    """

    def __init__(self, num_students: int, *, weight: float = 1.0) -> None:
        """Takes the number of students in the model.

        Args:
            num_students: Students in the model, >= 2.
            weight: Weight of each relative to other teachers, >= 0. Default 1.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(weight=weight)
        if isinstance(num_students, bool) or not num_students >= 2:
            raise ValueError(
                "`num_students` must be the number of students in the model's "
                f"outputs, >= 2; received {num_students!r}."
            )
        self._num_students = num_students

    def members(self, cluster: tfdistill.Cluster) -> Sequence[teachers.Teacher]:
        """Returns one teacher for each distance between two students."""
        return [
            _Ahead(distance, self._num_students, self.weight)
            for distance in range(1, self._num_students)
        ]


class _Ahead(teachers.Teacher):
    """To each student, the one at a distance ahead of it in the circle."""

    def __init__(self, distance: int, num_students: int, weight: float) -> None:
        super().__init__(name=f"next_{distance}", weight=weight)
        self._distance, self._num_students = distance, num_students

    def ask(self, batch: teachers.Batch) -> list[tf.Tensor]:
        """Returns the outputs of the step, each student's at another's place.

        They come from a training forward pass, as predictions from peers do.
        """
        own, size = batch.flat, self._num_students
        if len(own) % size:
            raise ValueError(
                f"A model of {size} students must have equally many outputs "
                f"for each; received {len(own)} outputs. Return the outputs of "
                "the first student, then the outputs of the next."
            )
        first = self._distance * (len(own) // size)
        return [*own[first:], *own[:first]]
