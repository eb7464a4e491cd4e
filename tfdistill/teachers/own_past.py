"""The student's own past as its teacher: its last version, or a mean of them.

With a mean it is the mean teacher of Tarvainen and Valpola 2017
(arXiv:1703.01780). It needs no second group, so it is also a control for
codistillation: what do other groups add to it?
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.exports import saved_model
from tfdistill.teachers import teacher


class OwnPast(teacher.Teacher):
    """The student at its last export, or a running mean of its exports.

    At each export, it takes the version that the `StudentExporter` among the
    callbacks publishes; without an exporter, it takes one at each refresh of
    the `TeacherLoader`. No version is taken during the burn-in.

    It cannot run under parameter servers, where no worker has all values.

    Example:
        >>> OwnPast(0.9).name
        'own_past'
    """

    def __init__(self, decay: float = 0.0, *, weight: float = 1.0) -> None:
        """Holds no version yet.

        Args:
            decay: What the mean keeps of itself at each version, >= 0 and < 1;
                0.9 is about the mean of the last ten. Default 0: the last
                version only.
            weight: Weight relative to other teachers, >= 0. Default 1.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(weight=weight)
        if isinstance(decay, bool) or not 0 <= decay < 1:
            raise ValueError(
                "`decay` must be the share of the old mean that is kept at "
                f"each version, >= 0 and < 1; received {decay!r}. Such as 0.9."
            )
        self._decay = float(decay)
        self._step = -1
        self._age_steps: int | None = None
        self._num_swaps = 0
        self._copy: Any = None

    def attach(self, student: teacher.Student) -> None:
        """Makes room for a copy of the student's values."""
        if student.on_servers:
            raise ValueError(
                "OwnPast must not be used with parameter servers, where no "
                "worker has all of the student's values. Leave it out, or "
                "train without parameter servers."
            )
        self._student = student
        self._writer = saved_model.SavedModelWriter(student.graph)
        self._copy = student.place(self.name, student.graph)

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Runs the student's graph with the values of its past."""
        return self._copy.infer(batch.inputs)

    def standing(self) -> teacher.Standing:
        """Returns which version it holds, if there is one to obey."""
        if self._step >= 0:
            return teacher.Standing(step=self._step, age_steps=self._age_steps)
        if self._drop_reason:
            return super().standing()
        return teacher.Standing(teacher.ABSENT, share=0.0)

    def exported(self, step: int, averages: Mapping[int, Any]) -> None:
        """Takes the student's values as a version; see `Teacher.exported`.

        Only floats are averaged.
        """
        if step == self._step or self._student.in_burn_in(step):
            return
        values: Iterable[Any] = self._writer.snapshot(averages)
        if self._decay and self._step >= 0:
            values = map(self._moved, self._copy.variables, values)
        self._copy.install(values)
        self._step = step
        self._age_steps, self._drop_reason = None, ""
        self._num_swaps += 1

    def _moved(self, held: tf.Variable, value: object) -> tf.Tensor:
        value = tf.cast(value, held.dtype)
        if not held.dtype.is_floating:
            return value
        old = tf.convert_to_tensor(held)
        return old + (1 - self._decay) * (value - old)

    def refresh(self, step: int | None) -> None:
        """Notes the student's step."""
        if step is not None and self._step >= 0:
            self._age_steps = step - self._step

    def drop(self, reason: str) -> None:
        """Stops obeying what it holds; the next version is the first again."""
        super().drop(reason)
        self._step = -1

    def status(self) -> dict[str, Any]:
        """Describes it for logs."""
        return {**super().status(), "swaps": self._num_swaps}

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """What it holds, for backups: by variable of the student's graph."""
        return self._copy.variables if self._copy else ()

    def state(self) -> dict[str, Any]:
        """Returns the step of its version; a backup has the values."""
        return {"step": self._step}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._step = state["step"]
