"""What every teacher is: something that answers about a batch.

`Peers`, `PeerPredictions`, `FixedTeacher`, `OwnPast` and `LabelTeacher` are
teachers, each in its own file; yours is another subclass of `Teacher`.
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
from tfdistill.teachers import scorer as scorer_lib
from tfdistill.teachers import worth
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# The values of a teacher's `health`.
ABSENT, GOOD, FADING = "absent", "good", "fading"
TOO_STALE, DROPPED = "too_stale", "dropped"
# Places before a version at which a schedule is asked whether it was over.
_NUM_LOOKS_BACK = 4


@dataclasses.dataclass(frozen=True)
class Standing:
    """A teacher's share of its weight until the next refresh, and why.

    Attributes:
        health: "good", "fading", "too_stale", "dropped" or "absent": why the
            share is what it is. Default "good".
        reason: Why the health is not "good", for logs. Default: empty.
        share: Factor for the teacher's weight, in [0, 1]; with 0 the step
            doesn't run the teacher. Default 1.
        step: The step of the version in use, or -1 (default) for none: what
            has a version counts in `teacher_staleness`.
        last_step: The last step of the student at which it counts, exact also
            between refreshes. Default: no bound.
        age_steps: How many steps old the version was at the last refresh;
            None (default) if that is unknown.
    """

    health: str = GOOD
    reason: str = ""
    share: float = 1.0
    step: int = -1
    last_step: float = math.inf
    age_steps: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of a teacher: one replica's rows in one step.

    Attributes:
        inputs: `[rows, ...]`, structured as the student takes them.
        outputs: What the student itself has answered, structured as it
            returns them: logits if it returns logits.
        step: The student's step, an int64 scalar.
        labels: What `tfdistill.labels` attached to the rows, by the name of a
            teacher; not the labels of the data, which no teacher sees.
        losses: The distillation loss of each output, in the order of `flat`;
            None for an output that is not distilled.
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


@dataclasses.dataclass(frozen=True, eq=False)
class Student:
    """What a teacher may know of the student, once `fit` has seen its data.

    Attributes:
        graph: The student's inference, traced once.
        strategy: The strategy it trains under.
        weight: The distillation weight as a function of the step, if known.
        losses: The distillation loss of each output, None for one without;
            empty if the student has none.
        last: What the last execution reported.
        names: The names of its teachers, in order.
        scorer: The task loss of single predictions, if there is one loss.
        held_out_losses: By canary, what compares versions with the student.
        remote: What makes copies on parameter servers, and informs workers.
        held_out: The canary of peers that were given none, if there is one.
    """

    graph: student_graph.StudentGraph
    strategy: tf.distribute.Strategy
    _: dataclasses.KW_ONLY
    weight: Callable[[tf.Tensor], Any] | None = None
    losses: Sequence[losses_lib.DistillationLoss | None] = ()
    last: steps.LastExecution = dataclasses.field(
        default_factory=steps.LastExecution
    )
    names: Sequence[str] = ()
    scorer: scorer_lib.Scorer | None = None
    held_out_losses: dict[Any, worth.HeldOut] = dataclasses.field(
        default_factory=dict
    )
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
        *,
        shares: bool = False,
    ) -> Any:
        """Makes a copy for the values of the teacher of a name.

        On each replica, or on the parameter servers. With `values` they are
        there from the start, and never change. `shares` is for a `Copy`.
        """
        if self.remote is not None:
            return self.remote.place(name, graph, values)
        return copies.Copy(graph, values, shares=shares)

    @property
    def is_chief(self) -> bool:
        """Whether this task decides for its group."""
        return replicas.is_chief(self.strategy)

    @property
    def num_workers(self) -> int:
        """How many workers train it in step."""
        return replicas.num_workers(self.strategy)

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
    """Predicts for the student's batches; the base class of all teachers.

    A subclass fills `ask`; everything else has a default. The methods are
    called in this order:

    * `members`, when a `CodistillModel` is made: on every task, in the
      strategy's scope.
    * `attach`, when the first `fit` has seen the data's shapes, and before the
      step is traced: once, on every worker (on parameter servers, on the
      coordinator only), in the strategy's scope. Here variables are made.
    * `start` and `stop`, when a `fit` with a `TeacherLoader` begins and ends:
      on every worker, for threads and connections.
    * `ask`, while a step is traced: on each replica of each worker, and on
      every worker of parameter servers. What was traced stays as it is, so
      whatever changes must be in variables, which `ask` reads.
    * `exported`, then `refresh`, then `standing`, at each refresh of the
      `TeacherLoader`: between two steps, at the same step on all workers (on
      parameter servers, on the coordinator). Here variables are changed.
    * `status`, when logs are written: on any worker, at any time.
    * `variables` and `state`, when a `Backup` is written, and `restore` when a
      training resumes: on all workers alike, after `attach`.

    Teachers are asked about the student's own rows, in inference mode, and no
    gradient reaches them. Their answers are averaged by their weights, times
    the shares in their standings, before the distillation loss compares them
    with the student's. A row with NaN or infinity isn't used: for it, the
    student learns from the other teachers, or from the labels only. A teacher
    that gives such rows before three refreshes in a row is dropped.

    Attributes:
        name: For logs, unique among a student's teachers.
        weight: Weight of its answers beside other teachers', a float >= 0.
        answers_every_row: False for a kind that often has no answer, and is
            never dropped for that. Default True.
        is_attached: Whether it has a student, which it keeps.
        waits: Why it counts nothing for now although it is asked: it is
            clearly worse than the student. Empty (default) if it counts.
        score: Its task loss beside the student's, on rows of the batches.
        num_due: In how many of the student's steps so far the distillation
            weight was above 0.
        num_taught: In how many of those it counted.
        num_bad: In how many of the last refreshes in a row its answers had
            rows with NaN or infinity.

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

    answers_every_row = True
    is_attached = False
    waits = ""
    num_due = num_taught = num_bad = 0
    # Where the groups that it learns from publish, if they do.
    exchange: Any = None

    def __init__(self, *, name: str | None = None, weight: float = 1.0) -> None:
        """Knows of no student yet.

        Args:
            name: For logs, unique among a student's teachers. Default: the
                class's name in snake case.
            weight: Weight of its answers beside other teachers', >= 0.
                Default 1.

        Raises:
            ValueError: The weight is not as above.
        """
        if isinstance(weight, str) or not 0 <= weight < math.inf:
            raise ValueError(
                f"`weight` must be a finite number >= 0; received {weight!r}."
            )
        kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__)
        self.name = name or kind.lower()
        self.weight = float(weight)
        self._drop_reason = ""
        self.score = worth.Score()

    @property
    def label(self) -> str:
        """What logs call it: its name, but of a peer its present group's."""
        return self.name

    # ---- before training ----

    def members(self, cluster: identity.Cluster) -> Sequence["Teacher"]:
        """Returns the teachers that this one stands for: itself, by default.

        Args:
            cluster: The student's place among the groups: `group`,
                `num_groups`, `peers` and `exchange`, as the environment or
                `make_strategy` has them.

        Raises:
            ValueError: The kind lacks something there, such as an exchange.
        """
        del cluster
        return [self]

    def attach(self, student: Student) -> None:
        """Makes what it needs, in the scope of the student's strategy.

        Variables that are made here are on each replica, or on the parameter
        servers.

        Args:
            student: What a teacher may know of it: `graph`, its traced
                inference with `variables`, `input_spec` and `output_spec`;
                `strategy`; `weight`, the distillation weight by step; and
                `place(name, graph)`, a copy of a graph's variables to run.

        Raises:
            ValueError: The kind cannot teach this student, or cannot run
                under parameter servers and `student.on_servers` is true.
        """

    # ---- in the step ----

    def ask(self, batch: Batch) -> Any:
        """Answers about a batch, while the step is traced.

        Args:
            batch: One replica's rows, `[rows, ...]`, of any number that `tf`
                may learn only when the step runs; see `Batch`.

        Returns:
            One tensor for each of the student's outputs, as a structure or a
            flat list of the same order and shapes `[rows, ...]`: logits if the
            student returns logits. Of any float dtype; it is cast to float32.
            NaN in the rows for which it has no answer.
        """
        raise NotImplementedError

    # ---- between steps, on all workers at the same step ----

    def standing(self) -> Standing:
        """Returns what it counts until the next refresh.

        By default all, unless it was dropped. All workers must return the same.
        """
        if self._drop_reason:
            return Standing(DROPPED, self._drop_reason, share=0.0)
        return Standing()

    def start(self) -> None:
        """Begins what it does beside training; `fit` begins."""

    def stop(self) -> None:
        """Ends what it does beside training; `fit` ends."""

    def doubt(self) -> str:
        """Returns why it should wait, as the chief sees it; or ""."""
        return ""

    def refresh(self, step: int | None) -> None:
        """Takes what changed since the last refresh.

        Every worker of the group calls it at the same step, and must come to
        the same state. It holds up training, so work that takes long belongs
        in a thread, between `start` and `stop`.

        Args:
            step: How many steps the student has made; None if unknown.
        """

    def exported(self, step: int, averages: Mapping[int, Any]) -> None:
        """Called when the student's present values become a version.

        At each export of the `StudentExporter`, whether or not it is written;
        without an exporter, at each refresh.

        Args:
            step: How many steps the student has made.
            averages: What a version holds in place of weights, by the `id` of
                the student's variables; empty if it holds the weights.
        """

    def drop(self, reason: str) -> None:
        """Leaves it out from now on; the log says why.

        Called at a refresh, on all workers, when it made no sense.
        """
        if not self._drop_reason:
            _log.warning("Dropped the teacher %s: %s", self.name, reason)
            self._drop_reason = reason

    def set_doubt(self, doubt: str) -> None:
        """Lets it count nothing from now on, for a reason; or again, for ""."""
        if doubt and not self.waits:
            _log.warning(
                "%s isn't used as a teacher until it publishes a better "
                "version: %s",
                self.label,
                doubt,
            )
        elif self.waits and not doubt:
            _log.info("%s is used as a teacher again.", self.label)
        self.waits = doubt

    def note_taught(self, share: float) -> None:
        """Notes of which share of the rows its answers were finite."""
        # Rows that a peer did not send aren't a version's fault.
        is_bad = self.answers_every_row and self.weight > 0 and share < 1
        self.num_bad = self.num_bad + 1 if is_bad else 0

    def status(self) -> dict[str, Any]:
        """Describes it for logs; more keys may be added.

        Returns:
            `name`; of its standing `step`, `health`, `reason`, `share` and
            `age_steps`; in how many steps it was to count (`num_due`) and did
            (`num_taught`); how many versions were put in use (`swaps`), their
            `bytes` and the `last_bytes` of these, and the `read_secs` of the
            last read, None without one; of peers, `num_unheard`, the versions
            that came and went between those, and the `lag_secs` of the last
            from its snapshot to its use; `num_dropped`; `num_quarantined`, and
            the newest `quarantined` versions with their reasons; `teacher_loss`
            beside the student's `own_loss`, and the `base_loss` of a guess.
        """
        found = self.standing()
        if self.waits:
            found = dataclasses.replace(
                found, health=DROPPED, reason=self.waits, share=0.0
            )
        return {
            "name": self.label,
            "step": found.step,
            "health": found.health,
            "reason": found.reason,
            "share": found.share,
            "age_steps": found.age_steps,
            "num_due": self.num_due,
            "num_taught": self.num_taught,
            "swaps": 0,
            "bytes": 0,
            "last_bytes": None,
            "read_secs": None,
            "num_dropped": int(bool(self._drop_reason)),
            "num_quarantined": 0,
            "quarantined": {},
            **self.score.status(),
        }

    # ---- for a backup ----

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Variables that a `tfdistill.callbacks.Backup` keeps.

        The same, in the same order, from `attach` on.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Returns what else a backup keeps, as JSON holds it."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, on all workers alike.

        Before the first step of a resumed training; `variables` have their
        values by then.
        """

    def kept(self) -> dict[str, Any]:
        """Returns all that a backup keeps of it beside `variables`, as JSON."""
        return {
            **self.state(),
            "on_trial": self.waits,
            "record": {"reports": self.score.reports.tolist()},
            "num_steps": [self.num_taught, self.num_due],
        }

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """Takes what `kept` returned, on all workers alike."""
        self.restore(kept)
        self.waits = kept.get("on_trial", "")
        if "record" in kept:
            self.score = worth.Score(kept["record"]["reports"])
        self.num_taught, self.num_due = kept.get("num_steps", (0, 0))
