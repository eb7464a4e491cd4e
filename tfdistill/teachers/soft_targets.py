"""The teachers' predictions in one step, each weighted by its age."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.teachers import teacher as teacher_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftTargets:
    """What the teachers say about one batch.

    Attributes:
        outputs: By output of the student, in `keras.tree.flatten` order: one
            float32 tensor `[batch, ...]` for each teacher.
        weights: float32 `[num_teachers, batch]`; 0 if a teacher is absent,
            too stale, or not finite.
        shares: float32 `[num_teachers]` in [0, 1]: what each teacher counts
            by its age and its standing; 0 if it is not asked.
        steps: int64 `[num_teachers]`: the version of each, -1 for none.
        staleness: float32 scalar, mean steps since the versions in use; NaN
            if no teacher that has versions is in use.
    """

    outputs: list[list[tf.Tensor]]
    weights: tf.Tensor
    shares: tf.Tensor
    steps: tf.Tensor
    staleness: tf.Tensor

    @property
    def taught_rows(self) -> tf.Tensor:
        """Each teacher's share of the rows for which it has an answer.

        float32 `[num_teachers]`; NaN for a teacher that is not asked.
        """
        rows = tf.cast(self.weights > 0, tf.float32)
        share = tf.reduce_mean(rows, axis=1)
        return tf.where(self.shares > 0, share, float("nan"))

    @property
    def strength(self) -> tf.Tensor:
        """What the whole term counts: the greatest share of a teacher.

        1 while a fresh teacher is in use, less once all have grown old, and 0
        if none is in use for any example.
        """
        speaks = tf.reduce_any(self.weights > 0)
        return tf.where(speaks, tf.reduce_max(self.shares), 0.0)

    @property
    def share_of_rows(self) -> tf.Tensor:
        """The greatest share of a teacher in use for a row, float32 `[batch]`.

        A teacher that fades hands over to the others, not to nobody.
        """
        shares = tf.where(self.weights > 0, self.shares[:, tf.newaxis], 0.0)
        return tf.reduce_max(shares, axis=0)


def standings(teachers: Sequence[teacher_lib.Teacher]) -> np.ndarray:
    """Returns what a step is to know of the teachers, float64 `[teachers, 3]`.

    The version, what it counts, and the last step at which it does.
    """
    found = [teacher.standing() for teacher in teachers]
    rows = [[each.step, each.share, each.last_step] for each in found]
    return np.array(rows, np.float64).reshape([-1, 3])


class Asked:
    """Asks the teachers in the traced step.

    What they count changes by assignment, so the training step is never traced
    again for it.

    Attributes:
        standings: What `standings` returned, as a variable; on the workers of
            parameter servers, a tensor that has come with the execution.
    """

    def __init__(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        *,
        standings: Any = None,
    ) -> None:
        """Makes the variable if it is not given, in the strategy's scope."""
        self._teachers = teachers
        self.standings = standings
        if standings is None:
            self.standings = tf.Variable(
                np.zeros([len(teachers), 3]),
                trainable=False,
                name="standings",
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )

    def _columns(self) -> list[tf.Tensor]:
        """Returns versions, shares, and last steps."""
        step, share, last = tf.unstack(
            tf.convert_to_tensor(self.standings), num=3, axis=1
        )
        return [tf.cast(step, tf.int64), tf.cast(share, tf.float32), last]

    def ask(
        self, batch: teacher_lib.Batch, *, active: tf.Tensor
    ) -> SoftTargets:
        """Asks each teacher in use; see `TeacherList.ask`."""
        like = batch.flat
        steps, known, last = self._columns()
        known = tf.where(tf.cast(batch.step, last.dtype) <= last, known, 0.0)
        usable = active & (known > 0)
        shares = tf.where(usable, known, 0.0)
        # Only their proportion matters to an aggregate: a single teacher that
        # fades says what it said, in whatever precision.
        relative = tf.math.divide_no_nan(shares, tf.reduce_max(shares))
        outputs, weights = [], []
        for index, teacher in enumerate(self._teachers):
            answers = _ask(teacher, batch, usable[index], like)
            finite = _finite_rows(answers)
            outputs.append(answers)
            weight = teacher.weight * relative[index]
            weights.append(tf.where(finite, weight, 0.0))
        return SoftTargets(
            outputs=[list(column) for column in zip(*outputs, strict=True)],
            weights=tf.stack(weights),
            shares=shares,
            steps=steps,
            staleness=mean_of(
                tf.cast(batch.step - steps, tf.float32),
                (known > 0) & (steps >= 0),
            ),
        )


def mean_of(values: tf.Tensor, counted: tf.Tensor) -> tf.Tensor:
    """Returns the mean of those that count; 0 / 0, which is NaN, of none.

    NaN of one that does not count does not spread.
    """
    kept = tf.where(counted, values, 0.0)
    return tf.reduce_sum(kept) / tf.reduce_sum(tf.cast(counted, tf.float32))


def _ask(
    teacher: teacher_lib.Teacher,
    batch: teacher_lib.Batch,
    usable: tf.Tensor,
    like: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Asks one teacher, or nothing at all while it is not in use."""

    def answer() -> list[tf.Tensor]:
        found = [
            tf.cast(output, tf.float32)
            for output in keras.tree.flatten(teacher.ask(batch))
            if output is not None
        ]
        wanted = [output.shape for output in like]
        received = [output.shape for output in found]
        fits = len(received) == len(wanted) and all(
            shape.is_compatible_with(own)
            for shape, own in zip(received, wanted, strict=True)
        )
        if not fits:
            raise ValueError(
                f"The teacher {teacher.name} must answer with one tensor for "
                "each of the student's outputs, of the shapes "
                f"{', '.join(map(str, wanted))}; received "
                f"{', '.join(map(str, received)) or 'nothing'}."
            )
        return found

    def nothing() -> list[tf.Tensor]:
        return [tf.zeros(tf.shape(wanted), tf.float32) for wanted in like]

    answers = tf.cond(usable, answer, nothing)
    for output, wanted in zip(answers, like, strict=True):
        output.set_shape(wanted.shape)
    return [tf.stop_gradient(output) for output in answers]


def _finite_rows(outputs: list[tf.Tensor]) -> tf.Tensor:
    """Finds the rows, bool `[batch]`, whose outputs are all finite."""
    # Counted: TensorFlow's `reduce_all` takes several times as long on a CPU,
    # 1.2 ms for 512 rows of 100 classes.
    faults = [
        tf.reduce_sum(
            tf.cast(~tf.math.is_finite(output), tf.float32),
            axis=list(range(1, output.shape.rank)),
        )
        for output in outputs
    ]
    return tf.equal(tf.add_n(faults), 0.0)
