"""The teachers' predictions in one step, each weighted by its age."""

import dataclasses
import itertools
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.training import steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftTargets:
    """The teachers' predictions for one batch.

    Attributes:
        outputs: By output of the student, in `keras.tree.flatten` order: one
            float32 tensor `[batch, ...]` for each teacher.
        weights: float32 `[num_teachers, batch]`; 0 if a teacher is absent,
            too stale, or not finite.
        shares: float32 `[num_teachers]` in [0, 1]: what each teacher counts
            by its age and its standing; 0 if it is not asked, or waits.
        steps: int64 `[num_teachers]`: the version of each, -1 for none.
        staleness: float32 scalar, mean steps since the versions in use; NaN
            if no teacher that has versions is in use.
        is_asked: bool `[num_teachers]`: whether there are answers of it.
    """

    outputs: list[list[tf.Tensor]]
    weights: tf.Tensor
    shares: tf.Tensor
    steps: tf.Tensor
    staleness: tf.Tensor
    is_asked: tf.Tensor | None = None

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

        While a teacher fades, its share passes to the other teachers.
        """
        shares = tf.where(self.weights > 0, self.shares[:, tf.newaxis], 0.0)
        return tf.reduce_max(shares, axis=0)


def standings(teachers: Sequence[teacher_lib.Teacher]) -> np.ndarray:
    """Returns what a step is to know of the teachers, float64 `[teachers, 3]`.

    The version, what it counts, and the last step at which it does. The share
    of a teacher that waits is negative: it is asked, and counts nothing.
    """
    rows = []
    for teacher in teachers:
        found = teacher.standing()
        share = -found.share if teacher.waits else found.share
        rows.append([found.step, share, found.last_step])
    return np.array(rows, np.float64).reshape([-1, 3])


class Shown:
    """What the traced step knows of the teachers, on each replica.

    On parameter servers, `on_servers.RemoteTeachers` takes its place.
    """

    def __init__(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Makes the variable, in the strategy's scope."""
        self._teachers = teachers
        self.standings = replicas.told(
            strategy,
            tf.zeros([len(teachers), 3], tf.float64),
            name="standings",
        )

    def show(self) -> None:
        """Shows steps from now on the teachers' present state."""
        self.standings.assign(standings(self._teachers))


def ask(
    teachers: Sequence[teacher_lib.Teacher],
    standings: tf.Tensor | tf.Variable,
    batch: teacher_lib.Batch,
    *,
    active: tf.Tensor,
) -> SoftTargets:
    """Asks each teacher in use, in the traced step; see `TeacherList.ask`.

    `standings` is what the function of that name returned. It changes by
    assignment, so the training step is never traced again for it.
    """
    is_plain = _plain(batch)
    table = tf.convert_to_tensor(standings)
    versions = tf.cast(table[:, 0], tf.int64)
    in_time = tf.cast(batch.step, table.dtype) <= table[:, 2]
    known = tf.where(in_time, tf.cast(table[:, 1], tf.float32), 0.0)
    usable = active & (tf.abs(known) > 0)
    shares = tf.where(usable, tf.maximum(known, 0.0), 0.0)
    # Only their proportion matters to an aggregate: a single teacher that
    # fades says what it said, in whatever precision.
    relative = tf.math.divide_no_nan(shares, tf.reduce_max(shares))
    outputs, weights = [], []
    for index, teacher in enumerate(teachers):
        answers = _ask(teacher, batch, usable[index], is_plain)
        weight = teacher.weight * relative[index]
        outputs.append(answers)
        weights.append(tf.where(_finite_rows(answers), weight, 0.0))
    has_version = tf.cast((known > 0) & (versions >= 0), tf.float32)
    ages = tf.cast(batch.step - versions, tf.float32)
    return SoftTargets(
        outputs=[list(column) for column in zip(*outputs, strict=True)],
        weights=tf.stack(weights),
        shares=shares,
        is_asked=usable,
        steps=versions,
        # 0 / 0, which is NaN, if no teacher in use has versions.
        staleness=tf.reduce_sum(ages * has_version)
        / tf.reduce_sum(has_version),
    )


def _ask(
    teacher: teacher_lib.Teacher,
    batch: teacher_lib.Batch,
    usable: tf.Tensor,
    is_plain: list[bool],
) -> list[tf.Tensor]:
    """Asks one teacher, or nothing at all while it is not in use.

    Outputs that aren't plain tensors get zeros.
    """
    like = list(itertools.compress(batch.flat, is_plain))

    def answer() -> list[tf.Tensor]:
        given = [
            output
            for output in keras.tree.flatten(teacher.ask(batch))
            if output is not None
        ]
        if len(given) == len(is_plain):
            given = list(itertools.compress(given, is_plain))
        found = [tf.cast(output, tf.float32) for output in given]
        wanted = [output.shape for output in like]
        received = [output.shape for output in found]
        fits = len(received) == len(wanted) and all(
            shape.is_compatible_with(own)
            for shape, own in zip(received, wanted, strict=True)
        )
        if not fits:
            raise ValueError(
                f"The teacher {teacher.name} must return one tensor for each "
                "of the student's outputs, of the shapes "
                f"{', '.join(map(str, wanted))}; received "
                f"{', '.join(map(str, received)) or 'nothing'}."
            )
        return found

    def nothing() -> list[tf.Tensor]:
        return [tf.zeros(tf.shape(wanted), tf.float32) for wanted in like]

    answers = tf.cond(usable, answer, nothing)
    for output, wanted in zip(answers, like, strict=True):
        output.set_shape(wanted.shape)
    left = iter(tf.stop_gradient(output) for output in answers)
    zeros = tf.zeros(tf.shape(like[0])[:1])
    return [next(left) if plain else zeros for plain in is_plain]


def _plain(batch: teacher_lib.Batch) -> list[bool]:
    """Finds which outputs are numbers for each row, as distilled ones must be.

    What else there is, such as strings, is left out.
    """
    found = []
    for index, (path, value) in enumerate(
        keras.tree.flatten_with_path(batch.outputs)
    ):
        wrong = steps.not_rows(value)
        found.append(not wrong)
        if wrong and (not batch.losses or batch.losses[index] is not None):
            raise ValueError(
                "An output with a distillation loss must be a tensor of "
                "numbers with a row for each example; received "
                f"{wrong} for {steps.name_of_output(path)!r}. Pass a "
                "`distillation_loss` by output, with None for this one."
            )
    return found


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
