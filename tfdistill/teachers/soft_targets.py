"""The teachers' predictions in one step, each weighted by its age."""

import dataclasses
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill.teachers import teacher as teacher_lib

# Batches in a row with NaN or infinite answers, after which a teacher is
# dropped: one may be the student's own overflow.
MAX_BAD_BATCHES = 3


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
        staleness: float32 scalar, mean steps since the versions in use; NaN
            if no teacher that has versions is in use.
    """

    outputs: list[list[tf.Tensor]]
    weights: tf.Tensor
    shares: tf.Tensor
    staleness: tf.Tensor

    def first(self, num_outputs: int) -> "SoftTargets":
        """Returns the same about the first outputs only."""
        return dataclasses.replace(self, outputs=self.outputs[:num_outputs])

    @property
    def taught_rows(self) -> tf.Tensor:
        """Each teacher's share of the rows for which it has an answer.

        float32 `[num_teachers]`; NaN for a teacher that is not asked.
        """
        rows = tf.cast(self.weights > 0, tf.float32)
        share = tf.reduce_mean(rows, axis=1)
        return tf.where(self.shares > 0, share, float("nan"))

    @property
    def share_of_rows(self) -> tf.Tensor:
        """The greatest share of a teacher in use for a row, float32 `[batch]`.

        A teacher that fades hands over to the others, not to nobody.
        """
        shares = tf.where(self.weights > 0, self.shares[:, tf.newaxis], 0.0)
        return tf.reduce_max(shares, axis=0)


class TeacherVariables:
    """What the traced step knows of the teachers: versions, shares, faults.

    Make it in the strategy's scope. Versions change by assignment, so the
    training step is never traced again for them.
    """

    def __init__(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        *,
        shared: Callable[..., Any] | None = None,
        of_replica: Callable[..., Any] | None = None,
    ) -> None:
        """Makes the variables; no teacher is in use.

        `shared` and `of_replica` make a variable from an initial value and a
        name: one that all replicas share, and one that each has for itself.
        The strategy makes them by default.
        """
        self._teachers = teachers
        # A bound in steps that none reaches, where there is none.
        self._max_ages = np.array(
            [
                np.iinfo(np.int64).max if most is None else most
                for most in (t.max_staleness_steps for t in teachers)
            ],
            np.int64,
        )
        count = len(teachers)
        shared, of_replica = shared or _mirrored, of_replica or _of_replica
        zeros = np.zeros([count], np.int64)
        self._steps = shared(zeros - 1, name="teacher_steps")
        self._in_use = shared(zeros.astype(bool), name="teachers_in_use")
        self._shares = shared(zeros + 1.0, name="teacher_shares")
        self._bad_batches = of_replica(zeros, name="bad_batches")
        self._bad_steps = of_replica(zeros, name="bad_steps")

    @property
    def variables(self) -> list[Any]:
        """All of them."""
        return [
            self._steps,
            self._in_use,
            self._shares,
            self._bad_batches,
            self._bad_steps,
        ]

    def assign(self, *, steps: Any, in_use: Any, shares: Any) -> None:
        """Sets, between steps, which versions are in force, and their shares.

        A step of -1 is a fixed teacher, or none.
        """
        self._steps.assign(steps)
        self._in_use.assign(in_use)
        self._shares.assign(shares)

    def bad_in_a_row(self) -> tf.Tensor:
        """int64 `[num_teachers]`: this replica's last batches without sense."""
        # A count speaks of one version: its successor starts with none, even
        # while nobody asks it.
        is_same = self._bad_steps.value() == tf.convert_to_tensor(self._steps)
        count = self._bad_batches.value()
        return tf.where(is_same, count, tf.zeros_like(count))

    def ask(
        self, batch: teacher_lib.Batch, *, active: tf.Tensor
    ) -> SoftTargets:
        """Asks each teacher in use; see `TeacherList.ask`."""
        like = [*batch.flat, *batch.hidden]
        shares = tf.where(active, self._shares_at(batch.step), 0.0)
        usable = shares > 0
        # Only their proportion matters to an aggregate: a single teacher that
        # fades says what it said, in whatever precision.
        relative = tf.math.divide_no_nan(shares, tf.reduce_max(shares))
        outputs, weights, bad = [], [], []
        for index, teacher in enumerate(self._teachers):
            answers = _ask(teacher, batch, usable[index], like)
            finite = _finite_rows(answers)
            outputs.append(answers)
            weight = teacher.weight * relative[index]
            weights.append(tf.where(finite, weight, 0.0))
            # Rows that somebody else did not send are no fault of a version.
            is_bad = usable[index] & ~tf.reduce_all(finite)
            bad.append(is_bad & teacher.answers_every_row)
        self._count_bad(usable, tf.stack(bad))
        return SoftTargets(
            outputs=[list(column) for column in zip(*outputs, strict=True)],
            weights=tf.stack(weights),
            shares=shares,
            staleness=self._staleness(batch.step),
        )

    def _count_bad(self, usable: tf.Tensor, bad: tf.Tensor) -> None:
        before = self.bad_in_a_row()
        in_a_row = tf.where(bad, before + 1, tf.zeros_like(before))
        self._bad_batches.assign(tf.where(usable, in_a_row, before))
        self._bad_steps.assign(tf.convert_to_tensor(self._steps))

    def _shares_at(self, step: tf.Tensor) -> tf.Tensor:
        """What each teacher counts at a step, float32 `[num_teachers]`."""
        in_use = tf.convert_to_tensor(self._in_use)
        steps = tf.convert_to_tensor(self._steps)
        shares = tf.convert_to_tensor(self._shares)
        is_recent = (steps < 0) | (step - steps <= self._max_ages)
        return tf.where(in_use & is_recent, tf.cast(shares, tf.float32), 0.0)

    def _staleness(self, step: tf.Tensor) -> tf.Tensor:
        steps = tf.convert_to_tensor(self._steps)
        is_used = (self._shares_at(step) > 0) & (steps >= 0)
        used = tf.cast(is_used, tf.float32)
        total = tf.reduce_sum(tf.cast(step - steps, tf.float32) * used)
        return total / tf.reduce_sum(used)


def _mirrored(initial: np.ndarray, *, name: str) -> tf.Variable:
    return tf.Variable(
        initial,
        trainable=False,
        name=name,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )


def _of_replica(initial: np.ndarray, *, name: str) -> tf.Variable:
    return tf.Variable(
        initial,
        trainable=False,
        name=name,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )


def _ask(
    teacher: teacher_lib.Teacher,
    batch: teacher_lib.Batch,
    usable: tf.Tensor,
    like: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Asks one teacher, or nothing at all while it is not in use."""

    def answer() -> list[tf.Tensor]:
        found = keras.tree.flatten(teacher.ask(batch))
        if len(found) != len(like):
            raise ValueError(
                f"The teacher {teacher.name} must answer with one tensor for "
                f"each of the student's {len(like)} outputs; received "
                f"{len(found)}."
            )
        return [tf.cast(output, tf.float32) for output in found]

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
