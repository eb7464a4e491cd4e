"""The teachers of one student: made, followed, refreshed, asked.

Each is a `Teacher` (teacher.py); a peer's is fed by a `PeerReader` (peer.py),
and all workers move them alike by an `Agreement` (agreement.py). How stale a
version may be, and what it then counts, is decided in staleness.py. A new kind
of teacher is another way to fill `Teacher.function`, beside `follow`, `load`
and `hold`, or another `Teacher.ask` (by_value.py); a line in
`TeacherSet.attach`; and a field of `TeacherOptions`, whose `num_teachers`
counts it and whose `weights` weigh it.
"""

import dataclasses
import functools
import logging
import math
import os
import typing
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import publisher
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.teachers import agreement
from tfdistill.teachers import by_value
from tfdistill.teachers import cohort as cohort_lib
from tfdistill.teachers import gates
from tfdistill.teachers import in_memory
from tfdistill.teachers import on_servers
from tfdistill.teachers import options
from tfdistill.teachers import own_past as own_past_lib
from tfdistill.teachers import peer
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.training import steps

if typing.TYPE_CHECKING:
    from tfdistill.labels import service

_log = logging.getLogger(__name__)


class TeacherSet:
    """The frozen teachers of one student.

    Peers' exports are followed while training runs. For offline distillation,
    fixed SavedModels are loaded once, and Keras models in memory are copied
    once. No teacher is part of the student's weights, checkpoints or files.

    If a peer's graph equals the student's, the student's own graph runs with
    the peer's values, and the peer's graph file is never loaded. A different
    graph (another architecture or dtype policy) is refused unless
    `allow_other_graphs` is set, because loading it runs its code.
    """

    def __init__(
        self,
        exchange: publisher.Exchange | None = None,
        peers: Sequence[int] = (),
        *,
        saved_models: Sequence[str | os.PathLike[str]] = (),
        models: Sequence[keras.Model | str | os.PathLike[str]] = (),
        include_past: bool | float = False,
        labels: Sequence["str | service.Teachers"] = (),
        cohort: int | None = None,
        weights: Sequence[float] | None = None,
        max_staleness_steps: int | str | None = options.AUTO,
        max_staleness_secs: float | None = None,
        max_staleness_examples: float | None = None,
        staleness_ramp_steps: int = 0,
        staleness_ramp_secs: float = 0.0,
        staleness_ramp_examples: float = 0.0,
        max_bad_batches: int = 3,
        allow_other_graphs: bool = False,
        trust_saved_models: bool = False,
        schema: Mapping[str, Any] | None = None,
        allow_other_schemas: bool = False,
        canary: gates.Canary | tf.data.Dataset | None = None,
        poll_secs: float = 0.1,
        by: str = options.VERSIONS,
        form: forms.Form | None = None,
        wait_secs: float = 0.05,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where peers publish. Required if there are `peers`.
            peers: Groups to learn from: `cluster.peers`, or any list.
            saved_models: Directories of fixed teachers.
            models: Built Keras models, such as those of KerasHub, or paths of
                `.keras` files, as fixed teachers. The first `fit` copies their
                values, which no later change of a model reaches; memory
                holds both.
            include_past: Makes the student's own past a teacher, which needs
                no second group and no exchange. True: its last version, what
                the `StudentExporter` among the callbacks would publish. A
                number >= 0 and < 1: a running mean of its versions, which
                keeps this share of itself at each export; 0.9 is about the
                last ten. Without an exporter, each refresh of the
                `TeacherLoader` takes a version. Default False.
            labels: Names of teachers whose predictions come with the data,
                as `tfdistill.labels` attaches them. In place of a name, the
                `labels.Teachers` that asks servers for them, whose answers
                and faults `status` then counts. Default: none.
            cohort: How many students the model holds side by side, >= 2: its
                outputs are those of the first, then of the next, and so on,
                in flat order. Each learns from what all the others predict in
                the same step. Default: it is one student.
            weights: One weight >= 0 for each of `peers`, then for each of
                `saved_models` and of `models`, for one's own past, for each of
                `labels`, and for each of the others of a `cohort`. Defaults
                to equal weights.
            max_staleness_steps: A version that is more of the student's
                steps old than this loses its weight; None for no bound.
                Default "auto": a peer that has published nothing for ten of
                the intervals at which its versions arrived before fades, over
                ten more. Its next version gets full weight.
            max_staleness_secs: Likewise, in seconds since this group first
                saw the version. Default: no bound.
            max_staleness_examples: Likewise, in examples that the student has
                trained on beyond those of the version's group. For groups of
                different batch sizes or speeds. A `StudentExporter` must be
                among the callbacks, which counts them. Default: no bound.
            staleness_ramp_steps: Steps after `max_staleness_steps` over which
                the weight falls to 0. Default 0: at once.
            staleness_ramp_secs: Likewise, after `max_staleness_secs`.
            staleness_ramp_examples: Likewise, after `max_staleness_examples`.
            max_bad_batches: Batches in a row with NaN or infinite outputs
                after which a version is quarantined. Default 3.
            allow_other_graphs: Whether to run peers' graphs that differ from
                the student's, if they hold only what `graph_ops` lists.
            trust_saved_models: Whether to load `saved_models` that hold more,
                with a warning.
            schema: What peers' labels, vocabularies and columns must be; see
                `gates.digests`. Default: nothing is compared.
            allow_other_schemas: Whether to accept another schema, with a
                warning.
            canary: Held-out examples that each version must predict before it
                is used, and on which it is compared with the student: a
                `tfdistill.Canary`, or a dataset as `fit` takes it, of which
                the first 256 examples are taken. Default: none.
            poll_secs: Seconds between two looks at the exchange. Default 0.1.
            by: How peers teach. `"versions"` (default): their exports run in
                the student's step. `"predictions"`: they send what they predict
                of the same batch, in the same step, as the student does; all
                groups read `group_shard(..., mode="coordinated")`.
            form: With predictions, what is sent of them: a
                `tfdistill.labels.Form`. Default: all, in float32.
            wait_secs: With predictions, the longest wait of a step for those
                of its peers; the step does without those that are missing.
                Default 0.05.

        Raises:
            ValueError: An argument is not as above.
        """
        self._options = options.TeacherOptions(
            peers=tuple(peers),
            saved_models=options.checked_paths(saved_models),
            models=in_memory.checked(models),
            include_past=own_past_lib.checked(include_past),
            labels=options.checked_names(labels, peers),
            cohort=cohort_lib.checked(cohort),
            weights=weights,
            max_staleness_steps=max_staleness_steps,
            max_staleness_secs=max_staleness_secs,
            max_staleness_examples=max_staleness_examples,
            staleness_ramp_steps=staleness_ramp_steps,
            staleness_ramp_secs=staleness_ramp_secs,
            staleness_ramp_examples=staleness_ramp_examples,
            max_bad_batches=max_bad_batches,
            allow_other_graphs=allow_other_graphs,
            trust_saved_models=trust_saved_models,
            schema=gates.digests(schema or {}),
            allow_other_schemas=allow_other_schemas,
            canary=gates.as_canary(canary),
            poll_secs=poll_secs,
            by=by,
            form=form,
            wait_secs=wait_secs,
        )
        options.check_exchange(self._options.peers, exchange)
        # By name, what asks servers for labels.
        self._askers = {
            label.name: label for label in labels if not isinstance(label, str)
        }
        self._exchange = exchange or publisher.Exchange(None)
        self._graph: student_graph.StudentGraph | None = None
        self._layers: list[str] = []
        self._teachers: list[teacher_lib.Teacher] = []
        self._agreement: agreement.Agreement | None = None
        self._poller: peer.Poller | None = None
        # With peers that teach by predictions, if there are any.
        self._swaps: list[by_value.Swap] = []
        self._models: list[keras.Model] | None = None
        self._student: gates.StudentOnCanary | None = None
        # What the traced step knows.
        self._published: dict[str, Any] = {}
        # What a parameter-server group does otherwise; None in any other.
        self.remote: on_servers.RemoteTeachers | None = None
        # What the last execution reported.
        self._last = steps.LastExecution()
        # The student's own past, once it is attached and asked for.
        self.own_past: own_past_lib.PastTeacher | None = None
        self._weight: Callable[[tf.Tensor], Any] | None = None
        # Whether the `fit` in progress has a StudentExporter.
        self.has_exporter = False
        # Counts loaded graphs: the training step is traced again for each.
        self.generation = 0

    def __len__(self) -> int:
        return self.num_teachers

    @property
    def num_teachers(self) -> int:
        """Number of teachers, whether or not they have appeared."""
        return self._options.num_teachers

    @property
    def follows_peers(self) -> bool:
        """Whether there are peers to follow while training."""
        return bool(self._options.peers)

    @property
    def swaps_predictions(self) -> bool:
        """Whether peers teach by what they predict in the same step."""
        return self.follows_peers and self._options.by == options.PREDICTIONS

    @property
    def moves_at_refreshes(self) -> bool:
        """Whether teachers change at the refreshes of a `TeacherLoader`."""
        return self.follows_peers or self.past_moves_at_refreshes

    @property
    def past_moves_at_refreshes(self) -> bool:
        """Whether refreshes move the student's own past: nobody exports it."""
        return self._options.includes_past and not self.has_exporter

    # ---- before training ----

    def only_model(self) -> keras.Model:
        """Returns the one Keras model in memory that is the only teacher.

        Raises:
            ValueError: There are other teachers, or several.
        """
        if len(self._options.models) != 1 or self.num_teachers != 1:
            raise ValueError(
                "`feature_loss` needs exactly one teacher, a Keras model in "
                "memory, since it names that model's layers; received "
                f"{len(self._options.peers)} peers, "
                f"{len(self._options.saved_models)} saved_models and "
                f"{len(self._options.models)} models. Pass "
                "TeacherSet(models=[model]), or leave `feature_loss` out."
            )
        return self._held_models()[0]

    def _held_models(self) -> list[keras.Model]:
        """Loads the files among `models`, once."""
        if self._models is None:
            self._models = [in_memory.loaded(m) for m in self._options.models]
        return self._models

    def count_by(self, weight: Callable[[tf.Tensor], Any] | None) -> None:
        """Takes the distillation weight as a function of the step.

        Versions of its burn-in are not learned from. While it is 0, no teacher
        is reported as worse than the student, which learns fast then.
        """
        self._weight = weight
        for teacher in self._teachers:
            teacher.weight = weight

    def attach(
        self,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
        *,
        from_logits: bool | None = None,
        has_classes: bool = False,
        layers: Sequence[str] = (),
        last: steps.LastExecution | None = None,
    ) -> None:
        """Makes the teachers and their variables for one student, once.

        `from_logits` and `has_classes` are what the distillation loss takes
        outputs for, for a canary that does not say so itself. `layers` are
        those of a model in memory that it answers with beside its outputs.
        `last` is what the trainer keeps of the last execution.
        """
        if self._graph is not None:
            if graph is not self._graph or list(layers) != self._layers:
                raise RuntimeError(
                    "A TeacherSet serves one student, and the layers that "
                    "were compiled first; this one is attached already. Make "
                    "a new TeacherSet, and a new CodistillModel."
                )
            return
        self._graph, self._layers = graph, list(layers)
        self._last = last or self._last
        if self._options.canary:
            self._options.canary.settle(from_logits, has_classes=has_classes)
        self._is_chief = replicas.is_chief(strategy)
        num_workers = replicas.num_workers(strategy)
        if replicas.on_servers(strategy):
            self._options.check_remote()
            self.remote = on_servers.RemoteTeachers(self._options)
        held = [
            in_memory.FrozenModel(model, graph, layers=layers)
            for model in self._held_models()
        ]
        # Each holds its own.
        self._models = None
        if self.swaps_predictions:
            swap = by_value.Swap(
                self._exchange,
                self._options,
                strategy=strategy,
                cluster=strategy_lib.cluster_of(strategy),
            )
            self._swaps.append(swap)
        with strategy.scope():
            self._variables = (
                self.remote.state
                if self.remote
                else soft_targets.TeacherVariables(self._options)
            )
            self._teachers = [
                *(
                    swap.teachers(graph)
                    if self.swaps_predictions
                    else self._peers(graph, alone=num_workers == 1)
                ),
                *self._fixed(graph),
                *self._held(held, graph),
                *self._past(graph),
                *self._labelled(graph),
                *self._others(graph),
            ]
        self.count_by(self._weight)
        self._agreement = agreement.Agreement(
            self._teachers,
            self.remote.sum if self.remote else self._collective(strategy),
            num_workers=num_workers,
            is_chief=self._is_chief,
        )
        canary = self._options.canary
        if self._teachers and self._is_chief and canary and canary.compares:
            self._student = gates.StudentOnCanary(
                canary,
                graph,
                snapshot=saved_model.SavedModelWriter(graph).snapshot,
                predict=self.remote.predictor(graph)
                if self.remote
                else lambda values, x: keras.tree.flatten(graph(values, x)),
            )
        self._publish()

    def _peers(
        self, graph: student_graph.StudentGraph, *, alone: bool
    ) -> Iterator[teacher_lib.Teacher]:
        screen = gates.VersionScreen(
            graph,
            schema=self._options.schema,
            only_warn=self._options.allow_other_schemas,
        )
        for group, name in self._options.names_of_peers.items():
            teacher = (
                self.remote.make_teacher(name, graph)
                if self.remote
                else teacher_lib.Teacher(name, graph, self._options)
            )
            teacher.follow(self._exchange, group, alone=alone, screen=screen)
            yield teacher

    def _fixed(
        self, graph: student_graph.StudentGraph
    ) -> Iterator[teacher_lib.Teacher]:
        for path in self._options.saved_models:
            teacher = teacher_lib.Teacher(path, graph, self._options)
            teacher.load(path)
            yield teacher

    def _held(
        self,
        models: Sequence[in_memory.FrozenModel],
        graph: student_graph.StudentGraph,
    ) -> Iterator[teacher_lib.Teacher]:
        names = in_memory.names(self._options.models)
        for name, model in zip(names, models, strict=True):
            teacher = (
                self.remote.make_model(name, graph)
                if self.remote
                else teacher_lib.Teacher(name, graph, self._options)
            )
            teacher.hold(model)
            yield teacher

    def _past(
        self, graph: student_graph.StudentGraph
    ) -> Iterator[own_past_lib.PastTeacher]:
        if self._options.includes_past:
            self.own_past = own_past_lib.PastTeacher(graph, self._options)
            yield self.own_past

    def _labelled(
        self, graph: student_graph.StudentGraph
    ) -> Iterator[teacher_lib.Teacher]:
        for name in self._options.labels:
            teacher = by_value.LabelTeacher(
                name,
                graph,
                self._options,
                last=functools.partial(self._in_last_step, name),
                asker=self._askers.get(name),
            )
            if self.remote:
                self.remote.teachers.append(teacher)
            yield teacher

    def _others(
        self, graph: student_graph.StudentGraph
    ) -> Iterator[teacher_lib.Teacher]:
        for distance in range(1, self._options.cohort or 1):
            teacher = cohort_lib.NextStudent(
                graph, self._options, distance=distance
            )
            if self.remote:
                self.remote.teachers.append(teacher)
            yield teacher

    def _in_last_step(self, name: str, what: str) -> float:
        """What the last step reported of a teacher; NaN if nothing."""
        found = self._last.detail(what) or [math.nan] * len(self._teachers)
        names = [teacher.name for teacher in self._teachers]
        return float(found[names.index(name)])

    def _collective(self, strategy: tf.distribute.Strategy) -> agreement.Sum:
        most = self._options.max_bad_batches
        return agreement.collective_sum(
            strategy,
            lambda: self._variables.bad_in_a_row() >= most,
            size=agreement.NUM_FIELDS * len(self._teachers),
        )

    def predict(
        self,
        inputs: Any,
        *,
        step: Any,
        active: tf.Tensor,
        like: Any,
        labels: Mapping[str, Any] | None = None,
        losses: Sequence[losses_lib.DistillationLoss | None] | None = None,
    ) -> soft_targets.SoftTargets:
        """Asks all teachers about one replica's batch, in inference mode.

        A teacher that is not in use costs nothing, and no gradient is kept.
        `like` are the student's outputs for these inputs, `step` an int64
        scalar; `active`, a bool scalar, is False to leave all teachers out.
        `labels` are what came with the batch. `losses` compare the outputs,
        one each; by default nobody does.
        """
        outputs = keras.tree.flatten(like)
        question = soft_targets.Question(
            inputs=inputs,
            outputs=outputs,
            labels=labels or {},
            step=tf.cast(step, tf.int64),
            losses=losses or [None] * len(outputs),
            weight=self._weight,
        )
        for swap in self._swaps:
            said = swap.labels(question, active=active)
            question = dataclasses.replace(
                question, labels={**question.labels, **said}
            )
        return self._variables.ask(
            [teacher.ask for teacher in self._teachers],
            question,
            active=active,
        )

    def label_versions(self, labels: Mapping[str, Any]) -> tf.Tensor:
        """Returns the newest version in each teacher's labels of a batch.

        float64 `[num_teachers]`; NaN for a teacher without labels, or whose
        labels have no version.
        """
        nothing = tf.constant(math.nan, tf.float64)
        return tf.stack(
            [
                attached.newest_version(labels[teacher.name])
                if teacher.name in labels
                else nothing
                for teacher in self._teachers
            ]
        )

    # ---- between steps ----

    def start(self) -> None:
        """Starts to look for versions in the background, or for messages."""
        for swap in self._swaps:
            swap.mailbox.start()
        self._start_polling()

    def _start_polling(self) -> None:
        if not self._teachers or self._poller is not None:
            return
        if self._student:
            self._student.begin()
        readers = [t.reader for t in self._teachers if t.reader]
        if readers or self._student:
            self._poller = peer.Poller(
                readers,
                self._is_chief,
                self._options.poll_secs,
                also=self._examine,
            )
            self._poller.start()

    def _examine(self) -> None:
        """Has student and teachers predict the canary batch, on the chief."""
        if self._student:
            self._student.examine()
            for teacher in self._teachers:
                teacher.examine()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        for swap in self._swaps:
            swap.mailbox.stop()
        self._stop_polling()

    def _stop_polling(self) -> None:
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    @property
    def counts_examples(self) -> bool:
        """Whether the age of versions is bounded in examples."""
        return self._options.max_staleness_examples is not None

    def refresh(
        self, *, step: int | None = None, examples: float | None = None
    ) -> list[str]:
        """Lets the group agree on versions and swaps in what all have.

        Every worker calls it at the same step. It neither reads files nor
        waits for them, except to load a graph that differs from the student's.

        Args:
            step: The student's global step, by which teachers that have
                become too old are logged. Defaults to not looking.
            examples: How many the student has trained on, for
                `max_staleness_examples`. Defaults to not looking.

        Returns:
            The names of the teachers that were swapped.

        Raises:
            RuntimeError: The teachers belong to no student yet.
        """
        decide = self._attached("refresh")
        if self.past_moves_at_refreshes:
            self._take_own(step or 0, {})
        if self._student:
            self._student.take()
        for teacher in self._teachers:
            teacher.note_news()
            if self._is_chief:
                beside = self._beside(teacher)
                teacher.judge(step, beside, examples=examples)
        ready = decide.exchange_news(
            "its outputs were NaN or infinite in "
            f"{self._options.max_bad_batches} batches in a row."
        )
        ready = decide.load_graphs(ready)
        self._swap(ready, step)
        if step is not None:
            for teacher in self._teachers:
                teacher.note_step(step)
        return [teacher.name for teacher in ready]

    def note_export(self, step: int, averages: Mapping[int, Any]) -> None:
        """Makes the student's present values a version of its own past.

        Every worker calls it at the same step, whether or not the version is
        written. `averages` are what it holds in place of weights, by the `id`
        of these.
        """
        if self.own_past and self.own_past.step != step:
            self._take_own(step, averages)
            self._publish()

    def _take_own(self, step: int, averages: Mapping[int, Any]) -> None:
        if self.own_past:
            self.own_past.take(step, averages)

    def _beside(self, teacher: teacher_lib.Teacher) -> gates.Beside | None:
        if self._student is None:
            return None
        return self._student.beside(
            [t.answer for t in self._teachers if t is not teacher]
        )

    def versions(self) -> dict[int, int]:
        """Returns which version of each peer is in use, for a backup.

        Returns:
            For each peer the step of its version; -1 for none.
        """
        steps = {
            teacher.name: teacher.step
            for teacher in self._teachers
            if teacher.in_use
        }
        return {
            group: steps.get(name, -1)
            for group, name in self._options.names_of_peers.items()
        }

    def standings(self) -> dict[str, Any]:
        """Returns what each teacher counts, and why, for a backup, as JSON."""
        return {t.name: t.standing() for t in self._teachers if t.in_use}

    def restore_standings(self, standings: Mapping[str, Any]) -> None:
        """Takes what `standings` returned, after `load_versions`.

        Every worker calls it alike. A teacher that has no version in use now
        is left out.
        """
        for teacher in self._teachers:
            is_here = teacher.in_use or teacher is self.own_past
            if is_here and teacher.name in standings:
                teacher.restore_standing(standings[teacher.name])
        self._publish()

    def load_versions(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """Puts known versions in place before training, as if just refreshed.

        Every worker calls it at the same point, once `fit` has made the
        teachers' variables: from `on_train_begin` on. It waits until all
        workers have read the versions. One that is gone, refused or cannot be
        read by all is left out, with a warning.

        Args:
            wanted: For each peer the step of a version, as `versions` had it;
                -1 for none. On several workers the chief's counts.

        Returns:
            What is in use now, as `versions` has it.

        Raises:
            RuntimeError: The teachers belong to no student yet.
        """
        decide = self._attached("load_versions")
        names = self._options.names_of_peers
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            _log.warning("Groups %s are no longer teachers.", unknown)
        # The reading thread may be at another version.
        was_running = self._poller is not None
        self._stop_polling()
        self._swap(
            decide.read_versions(
                {names[g]: step for g, step in wanted.items() if g in names}
            )
        )
        if was_running:
            self._start_polling()
        return self.versions()

    def _attached(self, caller: str) -> agreement.Agreement:
        if self._agreement is None:
            raise RuntimeError(
                f"`{caller}` must come after `fit` has made the teachers' "
                "variables; received a TeacherSet without a student. Call it "
                "from a callback, in `on_train_begin` or later."
            )
        return self._agreement

    def _swap(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        step: int | None = None,
    ) -> None:
        for teacher in teachers:
            self.generation += teacher.swap(step)
        for teacher in self._teachers:
            teacher.settle()
        if self.remote and teachers:
            self.remote.swapped()
        self._publish()

    def _publish(self) -> None:
        """Lets the traced step know of the versions, if anything changed."""
        if self.remote:
            # Travels with each execution.
            return
        values: dict[str, Any] = {
            "steps": [teacher.step for teacher in self._teachers],
            "in_use": [teacher.in_use for teacher in self._teachers],
            "shares": [teacher.verdict.share for teacher in self._teachers],
        }
        if values != self._published:
            self._variables.assign(**values)
            self._published = values

    def status(self) -> list[dict[str, Any]]:
        """Describes each teacher, for logs.

        Returns:
            For each teacher its `name`, the `step` of the version in use (-1
            for none), its `health` ("absent", "burn_in", "good", "fading",
            "too_stale", "worse" or "dropped") with the `reason`, the `share`
            of its weight that this leaves it, its `age_steps` and `age_secs`
            at the last refresh (None without a version), how many versions
            were put in place (`swaps`) and their `bytes`, the `last_bytes` of
            these, the
            `read_secs` of the last read (None without one), `num_dropped`,
            `num_quarantined`, and the newest `quarantined` versions with
            their reasons. Of peers that send predictions, `step` is that of
            the last answer, refused messages count as quarantined, and there
            are `num_answers`, `num_missed` (batches without one), `num_unsent`,
            `num_forged`, `sent_bytes`, and the number `refused` by kind. Of
            labels, `step`, `age_steps` and `share`, the share of rows that
            had a label of an age that counts, are those of the last step.
        """
        return [teacher.status for teacher in self._teachers]
