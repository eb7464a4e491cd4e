"""One teacher: how it is run, read, checked and replaced, and how old it is."""

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import other_graphs
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import background
from tfdistill.teachers import gates
from tfdistill.teachers import in_memory
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import peer
from tfdistill.teachers import soft_targets
from tfdistill.teachers import staleness

_log = logging.getLogger(__name__)
# Of the quarantined versions, how many of the newest a status holds.
_MAX_LISTED = 10
# How many of its intervals a teacher that was good may be worse.
_INTERVALS_TO_RECOVER = 2

_Function = Callable[[Any], list[tf.Tensor]]


class Teacher:
    """The place of one teacher in the training step.

    A kind of teacher is a way to fill `function`: `follow` takes the student's
    own graph with a peer's values, `load` a SavedModel, `hold` a Keras model in
    memory. Another kind has an `ask` of its own (by_value.py).
    Without a `reader` its step is -1: it is fixed, and never stale.

    Attributes:
        name: `group_<g>`, the path of a fixed SavedModel, or a model's name.
        reader: Follows the peer; None for a fixed teacher.
        function: From the student's inputs to the flat list of outputs.
        verdict: What it counts until the next refresh, as the group agreed;
            `max_staleness_steps` comes on top of it.
        next_is_worse: Whether the staged version is worse than the student.
        found, found_next_worse: What this task, if it is the chief, proposes.
        silence: How long the peer has published nothing.
        weight: The student's distillation weight as a function of the step;
            None if it is not known.
    """

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an empty place; `clock` has seconds that never go back."""
        self.name = name
        self.reader: peer.PeerReader | None = None
        self.function: _Function | None = None
        self.verdict = self.found = staleness.Verdict()
        self.next_is_worse = self.found_next_worse = False
        self.silence = staleness.Silence()
        self.weight: Callable[[tf.Tensor], Any] | None = None
        # The last version that was found to be beyond the burn-in.
        self._settled: Any = None
        # The student's step at which it was last found to be no worse.
        self._good_at: int | None = None
        self._graph = graph
        self._options = options
        self._clock = clock
        self._strategy = tf.distribute.get_strategy()
        self._variables: list[Any] = []
        self._fingerprint = ""
        self._exchange: publisher.Exchange | None = None
        self._reading = threading.Lock()
        # A graph and its variables, loaded for the version to come.
        self._next: tuple[_Function, list[Any]] | None = None
        # The version whose values the variables hold; None during a swap.
        self._installed: int | None = None
        # By version (-1: fixed), its answer to the canary batch.
        self._answers: dict[int, gates.Answer] = {}
        # By version, this task's clock when it was first seen.
        self._first_seen: dict[int, float] = {}
        # Of the version in use, at the last refresh that had a step.
        self._age_steps: int | None = None
        # What its group had trained on by then; None if it does not say.
        self._examples: float | None = None
        self._drop_reason = ""
        # For logs.
        self._reads = background.WorkTimes()
        self._last_num_bytes: int | None = None
        self._num_swaps = self._num_bytes = self._num_dropped = 0
        self._logged = staleness.GOOD, False

    def ask(self, question: soft_targets.Question) -> list[tf.Tensor]:
        """Answers about a batch, while a step is traced; NaN: no answer."""
        if self.function is None:
            raise RuntimeError(f"{self.name} is no teacher yet.")
        return self.function(question.inputs)

    # ---- filling it, in the strategy's scope ----

    def follow(
        self,
        exchange: publisher.Exchange,
        group: int,
        *,
        alone: bool,
        screen: gates.VersionScreen,
    ) -> None:
        """Takes a peer as the teacher.

        `alone` is whether this task decides for itself, without workers
        beside it; `screen` looks at manifests.
        """
        self._exchange = exchange
        self.function, self._variables = self._own_graph()
        if self._options.canary is not None:
            # Traced here: the reading thread must not run the student's code.
            self._predict(self._variables, self._options.canary.inputs)
        self._fingerprint = self._graph.fingerprint
        self.reader = peer.PeerReader(
            exchange, group, read=self._read, screen=screen, alone=alone
        )

    def _own_graph(self) -> tuple[_Function, list[Any]]:
        graph = self._graph
        variables = [
            tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False)
            for v in graph.variables
        ]
        return (
            lambda inputs: keras.tree.flatten(graph(variables, inputs)),
            variables,
        )

    def _predict(self, values: Sequence[Any], inputs: Any) -> list[Any]:
        tensors = [tf.convert_to_tensor(value) for value in values]
        return keras.tree.flatten(self._graph(tensors, inputs))

    def load(self, path: str) -> None:
        """Takes any SavedModel as the teacher, for good."""
        function = other_graphs.load(
            path, self._graph, trust=self._options.trust_saved_models
        )
        self._try(-1, function)
        self.function, self._variables = function, function.variables

    def hold(self, model: in_memory.FrozenModel) -> None:
        """Takes a Keras model's present values as the teacher, for good."""
        model.copy()
        self._try(-1, model.outputs)
        self.function, self._variables = model, model.variables

    def _try(self, version: int, predict: _Function) -> None:
        """Has a version predict the canary batch, if there is one."""
        canary = self._options.canary
        if canary is not None:
            self._answers[version] = canary.check(
                predict, self._graph.output_spec
            )

    def examine(self) -> None:
        """Has the version in use predict the canary batch, if it did not yet.

        In the background: a graph of a peer's own is not run before it is
        loaded, which happens once.
        """
        version, canary = self._installed, self._options.canary
        function = self.function
        if not (canary and function) or version is None:
            return
        if version in self._answers:
            return
        try:
            answer = canary.ask(function, self._graph.output_spec)
        except Exception as error:  # A peer's graph raises what it likes.
            _log.info("%s failed on the canary batch: %s", self.name, error)
            answer = gates.Answer()
        # Unless another version was put in place meanwhile.
        if self._installed == version:
            self._answers[version] = answer

    @property
    def answer(self) -> gates.Answer | None:
        """The canary answer of the version in use, unless it is worse."""
        if not self.in_use or self.verdict.health == staleness.WORSE:
            return None
        return self._answers.get(self.step)

    def _behind(
        self, version: int | None, beside: gates.Beside | None
    ) -> gates.Behind | None:
        answer = None if version is None else self._answers.get(version)
        if answer is None:
            return None
        return self._options.canary.behind(answer, beside)

    def _is_worse(self, behind: gates.Behind | None, step: int | None) -> bool:
        """Whether a version is worse than the student; as before if unknown."""
        was_worse = self.verdict.health == staleness.WORSE
        if behind is None:
            return was_worse
        if not behind.is_worse(was_worse=was_worse):
            return False
        # A good peer may be worse for the time of one version.
        return was_worse or behind.is_far_worse or not self._has_time(step)

    def _has_time(self, step: int | None) -> bool:
        """Whether it was no worse than the student a moment ago."""
        every, good_at = self.silence.interval, self._good_at
        if step is None or good_at is None or every is None:
            return False
        return step - good_at <= _INTERVALS_TO_RECOVER * every

    # ---- the version in use, and its age ----

    @property
    def step(self) -> int:
        """The version in use, or -1."""
        return self.reader.current if self.reader else -1

    @property
    def in_use(self) -> bool:
        """Whether there is a version to obey."""
        return not self._drop_reason and (self.reader is None or self.step >= 0)

    @property
    def age_secs(self) -> float | None:
        """Seconds since this task first saw the version; None without one."""
        if self.step < 0:
            return None
        return self._clock() - self._first_seen[self.step]

    @property
    def share(self) -> float:
        """What the version counted at the last refresh, in [0, 1]."""
        return min(self._share_by_steps, self.verdict.share)

    @property
    def health(self) -> str:
        """What the share is owed to; of a version in use."""
        if self._share_by_steps < self.verdict.share:
            return staleness.health_by_age(self._share_by_steps)
        return self.verdict.health

    @property
    def _share_by_steps(self) -> float:
        return float(
            staleness.share_by_steps(self._options, self._age_steps or 0)
        )

    @property
    def _fades(self) -> bool:
        return self._options.max_staleness_steps == options_lib.AUTO

    def note_news(self) -> None:
        """Notes which versions the peer has by now: their time begins."""
        if self.reader:
            self._see(self.reader.proposal, self.reader.announced)

    def _see(self, *steps: int) -> None:
        for step in steps:
            if step >= 0:
                self._first_seen.setdefault(step, self._clock())

    def judge(
        self,
        step: int | None,
        beside: gates.Beside | None,
        *,
        examples: float | None = None,
    ) -> None:
        """Finds what the version in use, and the one staged, are worth.

        On the chief. `step` is the student's, `examples` what it has trained
        on, and `beside` is with what the teacher's canary answer is compared;
        None if unknown.
        """
        verdicts = [staleness.Verdict()]
        if self.step >= 0:
            share = staleness.share_by_secs(self._options, self.age_secs or 0.0)
            health = staleness.health_by_age(share)
            verdicts.append(staleness.Verdict(share, health))
        if self.step >= 0 and examples is not None:
            # One that does not say how many it had is as old as can be.
            age = examples - (self._examples or 0.0)
            share = staleness.share_by_examples(self._options, age)
            health = staleness.health_by_age(share)
            verdicts.append(staleness.Verdict(share, health))
        if step is not None and self.step >= 0 and self._fades:
            self.silence.refreshed(step)
            silent = self.silence.share(step)
            verdicts.append(staleness.Verdict(silent, staleness.FADING))
        behind = self._behind(self.step, beside)
        if self._is_worse(behind, step):
            verdicts.append(staleness.Verdict(0.0, staleness.WORSE))
        elif behind and not behind.is_worse(was_worse=False):
            self._good_at = step
        self.found = min(verdicts, key=lambda verdict: verdict.share)
        # One that is read between now and the swap shares the last verdict.
        staged = self.reader.staged if self.reader else None
        version = staged.version.step if staged else None
        self.found_next_worse = self._is_worse(
            self._behind(version, beside), step
        )

    def settle(self) -> None:
        """Takes the weight of a version of the burn-in; each worker alike."""
        version = self.step, self.weight
        if self.step < 0 or self.weight is None or version == self._settled:
            return
        if staleness.in_burn_in(self.weight, self.step):
            self.verdict = staleness.Verdict(0.0, staleness.BURN_IN)
        else:
            self._settled = version

    def note_step(self, step: int) -> None:
        """Notes the student's step; logs each change of health, once.

        Unless the student is better while teachers do not count yet.
        """
        if not self.in_use:
            return
        if self.step >= 0:
            self._age_steps = step - self.step
        health = self.health
        if health == staleness.WORSE and self.weight is not None:
            if not float(self.weight(tf.constant(step, tf.int64))):
                return
        now = health, health != staleness.GOOD and self.share == 0
        before, self._logged = self._logged, now
        if now == before:
            return
        if health == staleness.GOOD:
            again = "" if before[0] == staleness.BURN_IN else " again"
            _log.info("The teacher %s has its full weight%s.", self.name, again)
            return
        if health == staleness.BURN_IN:
            _log.info(
                "The teacher %s has no weight: %s.", self.name, self._reason
            )
            return
        version = "" if self.step < 0 else f", version {self.step},"
        _log.warning(
            "The teacher %s%s is %s: %s. It %s until %s.",
            self.name,
            version,
            health.replace("_", " "),
            self._reason,
            "has no weight" if self.share == 0 else "counts less and less",
            "it is better than that"
            if health == staleness.WORSE
            else "a newer version arrives",
        )

    def standing(self) -> dict[str, Any]:
        """Returns what the teacher counts and is judged by, for a backup."""
        return {
            "share": self.verdict.share,
            "health": self.verdict.health,
            "silence": self.silence.state(),
            "good_at": self._good_at,
        }

    def restore_standing(self, state: Mapping[str, Any]) -> None:
        """Takes what `standing` returned, for the version in use."""
        self.verdict = staleness.Verdict(state["share"], state["health"])
        self.silence.restore(state["silence"])
        self._good_at = state.get("good_at")

    @property
    def _reason(self) -> str:
        """Why the version in use does not count in full."""
        if self.health == staleness.BURN_IN:
            return staleness.burn_in_reason(self.step)
        if self.health == staleness.WORSE:
            return (
                "on the canary batch, it is worse than the student by more "
                "than the margin"
            )
        age = f"{self._age_steps} steps and {self.age_secs or 0:.0f} s old"
        if self.health != staleness.FADING or not self._fades:
            return f"it is {age}, beyond {self._options.bounds}"
        every = self.silence.interval
        before = f", and they came every {every:.0f} steps" if every else ""
        return (
            f"its group publishes no more versions: this one is {age}{before}"
        )

    @property
    def status(self) -> dict[str, Any]:
        """Describes the teacher, for logs; see `TeacherSet.status`."""
        rejected = self.reader.rejected if self.reader else {}
        share = self.share if self.in_use else 0.0
        health = self.health if self.in_use else staleness.ABSENT
        reason = ""
        if self._drop_reason:
            health, reason = staleness.DROPPED, self._drop_reason
        elif not self.in_use:
            reason = rejected[max(rejected)] if rejected else ""
        elif health != staleness.GOOD:
            reason = self._reason
        age_secs = self.age_secs if self.in_use else None
        return {
            "name": self.name,
            "step": self.step if self.in_use else -1,
            "health": health,
            "reason": reason,
            "share": share,
            "age_steps": self._age_steps if self.in_use else None,
            "age_secs": None if age_secs is None else round(age_secs, 1),
            "too_stale": health == staleness.TOO_STALE,
            "swaps": self._num_swaps,
            "bytes": self._num_bytes,
            "last_bytes": self._last_num_bytes,
            "read_secs": self._reads.last_secs,
            "num_dropped": self._num_dropped,
            "num_quarantined": len(rejected),
            "quarantined": {
                step: rejected[step] for step in sorted(rejected)[-_MAX_LISTED:]
            },
        }

    # ---- replacing it, all workers at the same step ----

    @property
    def needs_graph(self) -> bool:
        """Whether the staged version needs a graph that is not loaded."""
        staged = self.reader.staged if self.reader else None
        return staged is not None and staged.fingerprint != self._fingerprint

    def load_graph(self) -> str | None:
        """Loads the staged version's graph; what is in use stays in use.

        Returns why the version cannot be used, or None.
        """
        staged = self.reader.staged if self.reader else None
        if staged is None or self._exchange is None:
            return "nothing is staged."
        try:
            with self._strategy.scope():
                if staged.fingerprint == self._graph.fingerprint:
                    self._next = self._own_graph()
                else:
                    function = other_graphs.load_version(
                        self._exchange, staged.version, self._graph
                    )
                    self._next = (function, function.variables)
            _check_values(self._next[1], staged.values)
            self._try(staged.version.step, self._next[0])
        except Exception as error:  # Loading raises whatever its code raises.
            self._next = None
            return f"its graph cannot be used: {error}"
        return None

    def swap(self, step: int | None = None) -> bool:
        """Puts the staged version in place, at a step of the student.

        Returns whether its graph is another one, so that steps must be traced
        again.
        """
        if self.reader is None:
            raise RuntimeError(f"{self.name} is fixed: it follows no peer.")
        self._installed = None
        staged = self.reader.take()
        changed = self._next is not None
        if self._next is not None:
            self.function, self._variables = self._next
            self._fingerprint, self._next = staged.fingerprint, None
        self._install(staged.values)
        self._installed = self.step
        self._see(self.step)
        for known in (self._first_seen, self._answers):
            # A list first: the reading thread may add to it meanwhile.
            for version in list(known):
                if version < self.step:
                    del known[version]
        extras = staged.version.manifest.extras
        self.silence.arrived(step, extras.get(gates.INTERVAL_FIELD))
        had = extras.get(gates.EXAMPLES_FIELD)
        self._examples = had if isinstance(had, int | float) else None
        # All workers take it for new until the chief has judged it.
        self.verdict = staleness.Verdict()
        if self.next_is_worse:
            self.verdict = staleness.Verdict(0.0, staleness.WORSE)
        self._age_steps, self._drop_reason = None, ""
        self._num_swaps += 1
        self._last_num_bytes = staged.version.num_bytes
        self._num_bytes += staged.version.num_bytes
        return changed

    def _install(self, values: saved_model.Snapshot) -> None:
        """Puts in place what `_read_values` returned."""
        for variable, value in zip(self._variables, values, strict=True):
            variable.assign(tf.cast(value, variable.dtype))

    def drop(self, reason: str) -> None:
        """Stops obeying the version in use; a fixed teacher for good."""
        if not self.in_use:
            return
        if self.reader:
            self.reader.reject(self.step, reason)
        else:
            _log.warning("Dropped the teacher %s: %s", self.name, reason)
        self._drop_reason = reason
        self._num_dropped += 1

    # ---- reading a version, in the background ----

    def _read(self, version: versions.Version) -> saved_model.Snapshot:
        """Reads the values of a version that passed the screen."""
        try:
            expected = self._expected_variables(version)
            # A read that was given up may be under way still.
            with self._reading, self._reads.measured():
                values = self._read_values(version, expected)
            if self._is_own(version):
                self._try(
                    version.step, lambda inputs: self._predict(values, inputs)
                )
            return values
        except ValueError as error:
            raise peer.RejectedError(str(error)) from error

    def _read_values(
        self,
        version: versions.Version,
        expected: Mapping[str, Mapping[str, Any]],
    ) -> saved_model.Snapshot:
        """Reads a version's values; those that are not finite are refused."""
        return saved_model.read_variables(version.path, expected)

    def _is_own(self, version: versions.Version) -> bool:
        ours = self._graph.fingerprint
        return version.manifest.graph_fingerprint == ours

    def _expected_variables(
        self, version: versions.Version
    ) -> Mapping[str, Mapping[str, Any]]:
        found = version.manifest
        if self._is_own(version):
            return saved_model.SavedModelWriter(self._graph).variables
        if self._options.allow_other_graphs:
            return saved_model.in_order(found.variables)
        raise ValueError(
            "its graph differs from the student's, and running a peer's graph "
            "is off by default. Train the same model in each group, or set "
            "TeacherSet(allow_other_graphs=True) if you trust all of them."
        )


def _check_values(variables: Sequence[Any], values: Sequence[Any]) -> None:
    ours = [tuple(variable.shape) for variable in variables]
    theirs = [tuple(value.shape) for value in values]
    if ours != theirs:
        raise ValueError(
            f"its graph must have variables of the shapes {theirs}, as its "
            f"manifest says; found {ours}."
        )
