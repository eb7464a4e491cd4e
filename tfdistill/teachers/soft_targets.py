"""The teachers' predictions in one step, each weighted by its age."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.teachers import options
from tfdistill.teachers import staleness


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What a teacher is asked about: one replica's batch, in one step.

    Attributes:
        inputs: The student's inputs.
        outputs: What the student itself has answered, flat.
        labels: What came with the batch, by name of the teacher.
        step: int64 scalar, the student's step.
        losses: What will compare each output; None for one that is not
            distilled.
        weight: The distillation weight as a function of the step, if known.
    """

    inputs: Any
    outputs: list[tf.Tensor]
    labels: Mapping[str, Any]
    step: tf.Tensor
    losses: Sequence[losses_lib.DistillationLoss | None] = ()
    weight: Callable[[tf.Tensor], Any] | None = None


# From a question to the flat list of outputs, with NaN in the rows for which
# the teacher has no answer.
Asked = Callable[[Question], list[tf.Tensor]]


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
        options: options.TeacherOptions,
        *,
        shared: Callable[..., Any] | None = None,
        of_replica: Callable[..., Any] | None = None,
    ) -> None:
        """Makes the variables; no teacher is in use.

        `shared` and `of_replica` make a variable from an initial value and a
        name: one that all replicas share, and one that each has for itself.
        The strategy makes them by default.
        """
        self._options = options
        self._weights = list(options.weights or ())
        self._is_run = options.is_run
        count = len(self._weights)
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
        self,
        teachers: Sequence[Asked],
        question: Question,
        *,
        active: tf.Tensor,
    ) -> SoftTargets:
        """Asks each teacher in use; see `TeacherSet.predict`."""
        step, like = question.step, question.outputs
        shares = tf.where(active, self._shares_at(step), 0.0)
        usable = shares > 0
        # Only their proportion matters to an aggregate: a single teacher that
        # fades says what it said, in whatever precision.
        relative = tf.math.divide_no_nan(shares, tf.reduce_max(shares))
        outputs, weights, bad = [], [], []
        for index, teacher in enumerate(teachers):
            answers = _ask(teacher, question, usable[index], like)
            finite = _finite_rows(answers)
            outputs.append(answers)
            weight = self._weights[index] * relative[index]
            weights.append(tf.where(finite, weight, 0.0))
            # Rows that somebody else did not send are no fault of a version.
            is_bad = usable[index] & ~tf.reduce_all(finite)
            bad.append(is_bad & self._is_run[index])
        self._count_bad(usable, tf.stack(bad))
        return SoftTargets(
            outputs=[list(column) for column in zip(*outputs, strict=True)],
            weights=tf.stack(weights),
            shares=shares,
            staleness=self._staleness(step),
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
        by_age = staleness.share_by_steps(self._options, step - steps)
        lower = tf.where(steps < 0, shares, tf.minimum(by_age, shares))
        return tf.where(in_use, tf.cast(lower, tf.float32), 0.0)

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
    teacher: Asked,
    question: Question,
    usable: tf.Tensor,
    like: list[tf.Tensor],
) -> list[tf.Tensor]:
    """Asks one teacher, or nothing at all while it is not in use."""

    def answer() -> list[tf.Tensor]:
        return [tf.cast(output, tf.float32) for output in teacher(question)]

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
