"""The student's own past as its teacher: its last version, or a mean of them.

With a mean it is the mean teacher of Tarvainen and Valpola 2017
(arXiv:1703.01780). It needs no second group, so it is also a control for
codistillation: what do other groups add to it?
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher

NAME = "own_past"


def checked(include_past: Any) -> bool | float:
    """Returns what `TeacherSet(include_past=...)` was given, if it is valid."""
    if isinstance(include_past, bool):
        return include_past
    if not isinstance(include_past, int | float) or not 0 <= include_past < 1:
        raise ValueError(
            "`include_past` must be True, False, or the share of the old mean "
            "that each version of the student keeps, >= 0 and < 1; received "
            f"{include_past!r}. Such as 0.9."
        )
    return float(include_past)


class PastTeacher(teacher.Teacher):
    """The place of the student's own versions. Make it in the scope."""

    def __init__(
        self,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
    ) -> None:
        """Has no version yet."""
        super().__init__(NAME, graph, options)
        past = options.include_past
        self._decay = 0.0 if isinstance(past, bool) else past
        self._writer = saved_model.SavedModelWriter(graph)
        self._step = -1
        self.function, self._variables = self._own_graph()

    @property
    def held(self) -> list[tf.Variable]:
        """What it holds, for backups: by variable of the student's graph."""
        return self._variables

    @property
    def step(self) -> int:
        """The step of the last version that it took, or -1."""
        return self._step

    @property
    def in_use(self) -> bool:
        """Whether there is a version to obey."""
        return self._step >= 0

    def take(self, step: int, averages: Mapping[int, Any]) -> None:
        """Takes the student's values as a version, between two steps.

        None of the burn-in, from which nobody learns. All workers do so at the
        same step. `averages` are what a version holds in place of weights;
        what is no float is never averaged.
        """
        if self.weight and staleness.in_burn_in(self.weight, step):
            return
        is_first, self._step = self._step < 0, step
        for held, value in zip(
            self._variables, self._writer.snapshot(averages), strict=True
        ):
            value = tf.cast(value, held.dtype)
            if self._decay and held.dtype.is_floating and not is_first:
                old = tf.convert_to_tensor(held)
                value = old + (1 - self._decay) * (value - old)
            held.assign(value)
        self._first_seen.clear()
        self._see(step)
        self._age_steps, self._drop_reason = None, ""
        self._num_swaps += 1

    def drop(self, reason: str) -> None:
        """Stops obeying what it holds; the next version is the first again."""
        super().drop(reason)
        self._step = -1

    def standing(self) -> dict[str, Any]:
        """Returns the teacher's standing and its step, for a backup."""
        return {**super().standing(), "step": self._step}

    def restore_standing(self, state: Mapping[str, Any]) -> None:
        """Takes what `standing` returned; a backup has its values."""
        super().restore_standing(state)
        self._step = state["step"]
        self._see(self._step)
