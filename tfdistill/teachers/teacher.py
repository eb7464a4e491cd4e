"""What every teacher is: something that answers about a batch.

`Peers`, `PeerPredictions`, `FixedTeacher`, `OwnPast` and `LabelTeacher` are
teachers, each in a file of its own; yours is another subclass of `Teacher`.
"""

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.cluster import identity
from tfdistill.cluster import replicas
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import copies
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# What a teacher's `health` may be.
ABSENT, GOOD, FADING = "absent", "good", "fading"
TOO_STALE, DROPPED = "too_stale", "dropped"
# Places before a version at which a schedule is asked whether it was over.
_NUM_LOOKS_BACK = 4


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a teacher counts until the next refresh, and why.

    Attributes:
        health: "good", "fading", "too_stale", "worse", "burn_in", "dropped"
            or "absent": what the share is owed to.
        reason: Why it is not "good", for logs.
        share: What its weight is scaled by, in [0, 1]; 0 if it is not asked.
        step: The version in use, or -1 for none.
        last_step: The last step of the student at which it counts.
        age_steps: How old the version was at the last refresh, if known.
    """

    health: str = GOOD
    reason: str = ""
    share: float = 1.0
    step: int = -1
    last_step: float = math.inf
    age_steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What a teacher is asked about: one replica's rows, in one step.

    Attributes:
        inputs: `[rows, ...]`, structured as the student takes them.
        outputs: What the student itself has answered, structured as it
            returns them: logits if it returns logits.
        step: The student's step, an int64 scalar.
        labels: What `tfdistill.labels` attached to the rows, by the name of a
            teacher; not the labels of the data, which no teacher sees.
        losses: The distillation loss of each output, in the order of `flat`;
            None for an output that is not distilled.
        weight: The distillation weight as a function of the step, if known.
    """

    inputs: Any
    outputs: Any
    step: tf.Tensor
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    losses: Sequence[losses_lib.DistillationLoss | None] = ()

    @property
    def flat(self) -> list[tf.Tensor]:
        """The outputs in the order of `keras.tree.flatten`."""
        return keras.tree.flatten(self.outputs)


@dataclasses.dataclass(eq=False)
class Student:
    """What a teacher may know of the student, once `fit` has seen its data.

    Attributes:
        graph: The student's inference, traced once.
        strategy: The strategy it trains under.
        weight: The distillation weight as a function of the step, if known.
        loss: The distillation loss of the first output that has one.
        last: What the last execution reported.
        names: The names of its teachers, in order.
        merits: By canary, what compares versions with the student on it.
        remote: What makes places on parameter servers, and tells workers.
        held_out: The canary of peers that were given none, if there is one.
    """

    graph: student_graph.StudentGraph
    strategy: tf.distribute.Strategy
    _: dataclasses.KW_ONLY
    weight: Callable[[tf.Tensor], Any] | None = None
    loss: losses_lib.DistillationLoss | None = None
    last: steps.LastExecution = dataclasses.field(
        default_factory=steps.LastExecution
    )
    names: Sequence[str] = ()
    merits: dict[Any, Any] = dataclasses.field(default_factory=dict)
    remote: Any = None
    held_out: Any = None

    @property
    def on_servers(self) -> bool:
        """Whether it trains on parameter servers."""
        return replicas.on_servers(self.strategy)

    def place(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        values: saved_model.Snapshot | None = None,
    ) -> Any:
        """Makes a place for the values of the teacher of a name.

        On each replica, or on the parameter servers. With `values` they are
        there from the start, and never change.
        """
        if self.remote is not None:
            return self.remote.place(name, graph, values)
        return copies.Copy(graph, values)

    @property
    def is_chief(self) -> bool:
        """Whether this task decides for its group."""
        return replicas.is_chief(self.strategy)

    @property
    def num_workers(self) -> int:
        """How many workers train it in step."""
        return replicas.num_workers(self.strategy)

    @property
    def from_logits(self) -> bool:
        """Whether it returns logits, as the distillation loss takes them."""
        return self.loss is None or self.loss.from_logits is not False

    def in_burn_in(self, step: int) -> bool:
        """Whether a version of a step was made in the student's burn-in.

        That is, while the distillation weight is 0 there and, as far as a few
        looks tell, before: a schedule that has fallen to 0 again is not in
        its burn-in. A ramp that begins at step 0 has none.
        """
        if self.weight is None or step < 0:
            return False
        before = (step * n // _NUM_LOOKS_BACK for n in range(_NUM_LOOKS_BACK))
        return not any(
            float(self.weight(tf.constant(at, tf.int64)))
            for at in (max(step, 1), *before)
        )


class Teacher:
    """Answers about the student's batches; a base class for your own kinds.

    A subclass fills `ask`, which is traced as part of the training step: on
    every replica, and on the workers of parameter servers. It may make
    variables in `attach`, and change them in `refresh`. What the step traced
    stays the same: whatever changes must be in variables.

    Teachers are asked for the student's own rows, and no gradient reaches
    them. Their answers are averaged by their weights before the distillation
    loss compares them with the student's. A row of NaN is no answer: the
    student learns there from the other teachers, or from the labels only. A
    teacher that answers NaN or infinity in several batches in a row is dropped.

    Example:
        >>> class ClassPriors(Teacher):
        ...     '''Predicts each class as often as it occurs.'''
        ...
        ...     def __init__(self, frequencies, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self._logits = tf.math.log(frequencies)
        ...
        ...     def ask(self, batch):
        ...         shape = tf.shape(batch.outputs)
        ...         return tf.broadcast_to(self._logits, shape)
        >>> ClassPriors([0.25, 0.75], weight=0.1).name
        'class_priors'
    """

    # Whether a row without an answer is its own fault, for which it is dropped.
    answers_every_row = True
    # Whether it has a student already.
    is_attached = False

    def __init__(self, *, name: str | None = None, weight: float = 1.0) -> None:
        """Knows of no student yet.

        Args:
            name: For logs, unique among a student's teachers. Default: the
                class's name in snake case.
            weight: What its answers count beside those of others, >= 0.
                Default 1.

        Raises:
            ValueError: The weight is not as above.
        """
        if isinstance(weight, str) or not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight` must be a finite number >= 0; received {weight!r}."
            )
        self.name = name or _snake_case(type(self).__name__)
        self.weight = float(weight)
        self._drop_reason = ""

    # ---- before training ----

    def members(self, cluster: identity.Cluster) -> Sequence["Teacher"]:
        """Returns the teachers that this one stands for: itself, by default.

        Args:
            cluster: The student's place among the groups.
        """
        del cluster
        return [self]

    def attach(self, student: Student) -> None:
        """Makes what it needs, in the scope of the student's strategy.

        Called once, before the first step is traced. A kind that cannot run
        under parameter servers raises ValueError if `student.on_servers`.
        """

    # ---- in the step ----

    def ask(self, batch: Batch) -> Any:
        """Answers about a batch, while the step is traced.

        Args:
            batch: One replica's rows: `inputs`, `outputs`, `step` and so on.

        Returns:
            One tensor for each of the student's outputs, as a structure or a
            flat list of the same order and shapes: logits if the student
            returns logits. NaN in the rows for which it has no answer.
        """
        raise NotImplementedError

    # ---- between steps, on all workers at the same step ----

    def standing(self) -> Standing:
        """Returns what it counts until the next refresh.

        By default all, unless it was dropped.
        """
        if self._drop_reason:
            return Standing(DROPPED, self._drop_reason, share=0.0)
        return Standing()

    def start(self) -> None:
        """Begins what it does beside training; `fit` begins."""

    def stop(self) -> None:
        """Ends what it does beside training; `fit` ends."""

    def refresh(self, step: int | None) -> None:
        """Takes what changed since the last refresh.

        Every worker of the group calls it at the same step, and must come to
        the same state.
        """

    def exported(self, step: int, averages: Mapping[int, Any]) -> None:
        """Hears that the student's present values are a version.

        Whether or not it is written. `averages` are what it holds in place of
        weights, by the `id` of these.
        """

    def drop(self, reason: str) -> None:
        """Leaves it out from now on; the log says why."""
        if not self._drop_reason:
            _log.warning("Dropped the teacher %s: %s", self.name, reason)
            self._drop_reason = reason

    def status(self) -> dict[str, Any]:
        """Describes it for logs; see `TeacherList.status`."""
        found = self.standing()
        return {
            "name": self.name,
            "step": found.step,
            "health": found.health,
            "reason": found.reason,
            "share": found.share,
            "age_steps": found.age_steps,
            "swaps": 0,
            "bytes": 0,
            "last_bytes": None,
            "read_secs": None,
            "num_dropped": int(bool(self._drop_reason)),
            "num_quarantined": 0,
            "quarantined": {},
        }

    # ---- for a backup ----

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Variables that a `tfdistill.callbacks.Backup` keeps."""
        return ()

    def state(self) -> dict[str, Any]:
        """Returns what else a backup keeps, as JSON."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, on all workers alike."""


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
