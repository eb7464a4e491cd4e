"""The teachers of one student: attached, refreshed together, told of."""

import logging
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.exchange import publisher
from tfdistill.exports import student_graph
from tfdistill.teachers import agreement
from tfdistill.teachers import gates
from tfdistill.teachers import on_servers
from tfdistill.teachers import options
from tfdistill.teachers import peer
from tfdistill.teachers import slot as teacher_slot
from tfdistill.teachers import soft_targets


def make_slots(
    options: options.TeacherOptions,
    exchange: publisher.Exchange,
    graph: student_graph.StudentGraph,
    *,
    alone: bool,
    make_slot: Callable[..., teacher_slot.TeacherSlot] | None = None,
) -> list[teacher_slot.TeacherSlot]:
    """Makes a place for each teacher. Call it in the strategy's scope.

    Args:
        options: Of the teachers.
        exchange: Where peers publish.
        graph: The student's traced inference.
        alone: Whether this task decides for itself.
        make_slot: From a name and `graph`. Default: `TeacherSlot`.

    Returns:
        The places, in the order of the weights.

    Raises:
        ValueError: A fixed teacher cannot be used.
    """
    make_slot = make_slot or teacher_slot.TeacherSlot
    screen = gates.VersionScreen(graph, schema=options.schema)
    slots = []
    for group, name in options.names_of_peers.items():
        slot = make_slot(name, graph)
        slot.follow(
            exchange,
            group,
            alone=alone,
            allow_other_graphs=options.allow_other_graphs,
            screen=screen,
            canary=options.canary,
            bounds=options.bounds,
        )
        slots.append(slot)
    for path in options.saved_models:
        slot = teacher_slot.TeacherSlot(path, graph)
        slot.load(path, trust=options.trust_saved_models, canary=options.canary)
        slots.append(slot)
    return slots


_log = logging.getLogger(__name__)


class TeacherRefresh:
    """Reads versions in the background and swaps in what all workers have.

    Attributes:
        generation: Counts loaded graphs: the training step is traced anew for
            each.
    """

    def __init__(
        self,
        options: options.TeacherOptions,
        slots: Sequence[teacher_slot.TeacherSlot],
        strategy: tf.distribute.Strategy,
        *,
        state: soft_targets.TeacherState,
        remote: on_servers.RemoteTeachers | None,
    ) -> None:
        """Starts nothing yet.

        Args:
            options: Of the teachers.
            slots: Their places, in the same order on all workers.
            strategy: The strategy that the student trains under.
            state: What the training step reads of the teachers.
            remote: What a parameter-server group does otherwise; None in any
                other.
        """
        self._options = options
        self._slots = slots
        self._strategy = strategy
        self._state = state
        self._remote = remote
        self._decisions = agreement.Decisions(
            strategy, slots, remote or self._agreement()
        )
        self._poller: peer.Poller | None = None
        self._published: Any = None
        self.generation = 0
        self._publish_state()

    def _agreement(self) -> agreement.Agreement:
        most = self._options.max_bad_batches
        return agreement.Agreement(
            self._strategy,
            lambda: self._state.bad_in_a_row() >= most,
            size=agreement.NUM_FIELDS * len(self._slots),
        )

    def start(self) -> None:
        """Starts to look for versions in the background."""
        if self._options.peers and self._poller is None:
            self._poller = peer.Poller(
                [slot.reader for slot in self._slots if slot.reader],
                replicas.is_chief(self._strategy),
                self._options.poll_secs,
            )
            self._poller.start()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def refresh(self, step: int | None) -> list[str]:
        """See `TeacherSet.refresh`."""
        for slot in self._slots:
            slot.note_news()
        ready = self._decisions.drop_bad(
            "its outputs were NaN or infinite in "
            f"{self._options.max_bad_batches} batches in a row."
        )
        ready = self._decisions.load_graphs(ready)
        self._swap(ready)
        if step is not None:
            for slot in self._slots:
                slot.health.note_step(step)
        return [slot.name for slot in ready]

    def versions(self) -> dict[int, int]:
        """See `TeacherSet.versions`."""
        by_name = {slot.name: slot for slot in self._slots if slot.in_use}
        return {
            group: by_name[name].step if name in by_name else -1
            for group, name in self._options.names_of_peers.items()
        }

    def load_versions(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """See `TeacherSet.load_versions`."""
        names = self._options.names_of_peers
        unknown = sorted(set(wanted) - set(names))
        if unknown:
            _log.warning("Groups %s are no teachers any more.", unknown)
        # The reading thread may be at another version.
        was_running = self._poller is not None
        self.stop()
        ready = self._decisions.read(
            {names[g]: step for g, step in wanted.items() if g in names}
        )
        self._swap(ready)
        if was_running:
            self.start()
        return self.versions()

    def _swap(self, slots: Sequence[teacher_slot.TeacherSlot]) -> None:
        for slot in slots:
            self.generation += slot.swap()
        if self._remote and slots:
            self._remote.swapped()
        self._publish_state()

    def _publish_state(self) -> None:
        if self._remote:
            # Travels with each execution.
            return
        steps = [slot.step for slot in self._slots]
        in_use = [slot.in_use for slot in self._slots]
        shares = [slot.health.share_by_secs for slot in self._slots]
        if (steps, in_use, shares) != self._published:
            self._state.assign(steps=steps, in_use=in_use, shares=shares)
            self._published = (steps, in_use, shares)


class TeacherSet:
    """The frozen teachers of one student.

    Peers' exports are followed while training runs; fixed SavedModels, for
    offline distillation, are loaded once. The student tracks nothing of a
    teacher: it is not in its weights, checkpoints or files.

    A peer whose graph is the student's own is run on the student's own graph
    with the peer's values; its graph file is never loaded. Another graph
    (another architecture or dtype policy) is refused unless
    `allow_other_graphs` is set, because loading it runs its code.
    """

    def __init__(
        self,
        exchange: publisher.Exchange | None = None,
        peers: Sequence[int] = (),
        *,
        saved_models: Sequence[str | os.PathLike[str]] = (),
        weights: Sequence[float] | None = None,
        max_staleness_steps: int | None = None,
        max_staleness_secs: float | None = None,
        staleness_ramp_steps: int = 0,
        staleness_ramp_secs: float = 0.0,
        max_bad_batches: int = 3,
        allow_other_graphs: bool = False,
        trust_saved_models: bool = False,
        schema: Mapping[str, Any] | None = None,
        allow_other_schemas: bool = False,
        canary: gates.Canary | None = None,
        poll_secs: float = 1.0,
    ) -> None:
        """Reads nothing yet.

        Args:
            exchange: Where peers publish. Needed where there are `peers`.
            peers: Groups to learn from: `cluster.peers`, or any list.
            saved_models: Directories of fixed teachers.
            weights: One weight >= 0 for each of `peers`, then for each of
                `saved_models`. Defaults to equal weights.
            max_staleness_steps: A version older than this many of the
                student's steps is not obeyed. Defaults to no bound.
            max_staleness_secs: Likewise, seconds since this group first saw
                it. Defaults to no bound.
            staleness_ramp_steps: Steps after `max_staleness_steps` in which a
                version's weight falls to 0. Default 0: at once.
            staleness_ramp_secs: Likewise, after `max_staleness_secs`.
            max_bad_batches: Batches in a row with NaN or infinite outputs
                after which a version is quarantined. Default 3.
            allow_other_graphs: Whether to run peers' graphs that differ from
                the student's and hold only what `graph_ops` lists.
            trust_saved_models: Whether to load `saved_models` that hold more,
                with a warning.
            schema: What peers' labels, vocabularies and columns must be; see
                `gates.digests`. Default: nothing is compared.
            allow_other_schemas: Whether to warn only of another schema.
            canary: A batch that teachers must predict before they are obeyed.
            poll_secs: Seconds between two looks at the exchange. Default 1.

        Raises:
            ValueError: An argument is not as above.
        """
        self._options = options.TeacherOptions(
            peers=tuple(peers),
            saved_models=options.checked_paths(saved_models),
            weights=weights,
            bounds=options.Bounds(
                max_steps=max_staleness_steps,
                max_secs=max_staleness_secs,
                ramp_steps=staleness_ramp_steps,
                ramp_secs=staleness_ramp_secs,
            ),
            max_bad_batches=max_bad_batches,
            allow_other_graphs=allow_other_graphs,
            trust_saved_models=trust_saved_models,
            schema=gates.Wanted(schema, allow_other_schemas),
            canary=canary,
            poll_secs=poll_secs,
        )
        options.check_exchange(self._options.peers, exchange)
        self._exchange = exchange or publisher.Exchange(None)
        self._graph: student_graph.StudentGraph | None = None
        self._slots: list[teacher_slot.TeacherSlot] = []
        self._refresh: TeacherRefresh | None = None
        # What a parameter-server group does otherwise; None in any other.
        self.remote: on_servers.RemoteTeachers | None = None

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

    # ---- before training ----

    def attach(
        self,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
    ) -> None:
        """Makes the teachers' variables for one student. Idempotent.

        Args:
            graph: The student's traced inference.
            strategy: The strategy that the student trains under.

        Raises:
            RuntimeError: The teachers belong to another student already.
        """
        if self._graph is not None:
            if graph is not self._graph:
                raise RuntimeError(
                    "A TeacherSet serves one student; this one is attached "
                    "to another already. Make a new TeacherSet."
                )
            return
        self._graph = graph
        if replicas.on_servers(strategy):
            self._options.check_remote()
            self.remote = on_servers.RemoteTeachers(self._options)
        with strategy.scope():
            self._state = (
                self.remote.state
                if self.remote
                else soft_targets.TeacherState.of(self._options)
            )
            self._slots = make_slots(
                self._options,
                self._exchange,
                graph,
                alone=replicas.num_workers(strategy) == 1,
                make_slot=self.remote.make_slot if self.remote else None,
            )
        self._refresh = TeacherRefresh(
            self._options,
            self._slots,
            strategy,
            state=self._state,
            remote=self.remote,
        )

    def predict(
        self, inputs: Any, *, step: Any, active: tf.Tensor, like: Any
    ) -> soft_targets.SoftTargets:
        """Asks all teachers about one replica's batch, in inference mode.

        A teacher that is not in use costs nothing, and no gradient is kept.

        Args:
            inputs: The student's inputs, `[batch, ...]`.
            step: int64 scalar, the student's global step.
            active: bool scalar; False leaves all teachers out.
            like: The student's outputs for these inputs.

        Returns:
            The teachers' outputs and what each is worth.
        """
        return self._state.ask(
            [slot.function for slot in self._slots if slot.function],
            inputs,
            step=tf.cast(step, tf.int64),
            active=active,
            like=keras.tree.flatten(like),
        )

    # ---- between steps ----

    @property
    def generation(self) -> int:
        """Counts loaded graphs: the step must be traced anew for each."""
        return self._refresh.generation if self._refresh else 0

    def start(self) -> None:
        """Starts to look for versions in the background."""
        if self._refresh is not None:
            self._refresh.start()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        if self._refresh is not None:
            self._refresh.stop()

    def refresh(self, *, step: int | None = None) -> list[str]:
        """Lets the group agree on versions and swaps in what all have.

        Every worker calls it at the same step. It reads no file and waits
        for none, except to load a graph that differs from the student's.

        Args:
            step: The student's global step, by which teachers that have
                become too old are logged. Defaults to not looking.

        Returns:
            The names of the teachers that were swapped.

        Raises:
            RuntimeError: The teachers belong to no student yet.
        """
        return self._attached("refresh").refresh(step)

    def versions(self) -> dict[int, int]:
        """Returns which version of each peer is in use, for a backup.

        Returns:
            For each peer the step of its version; -1 for none.
        """
        if self._refresh is None:
            return dict.fromkeys(self._options.peers, -1)
        return self._refresh.versions()

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
        return self._attached("load_versions").load_versions(wanted)

    def _attached(self, caller: str) -> TeacherRefresh:
        if self._refresh is None:
            raise RuntimeError(
                f"`{caller}` must come after `fit` has made the teachers' "
                "variables; received a TeacherSet without a student. Call it "
                "from a callback, in `on_train_begin` or later."
            )
        return self._refresh

    def status(self) -> list[dict[str, Any]]:
        """Describes each teacher, for logs.

        Returns:
            For each teacher its `name`, the `step` of the version in use (-1
            for none), its `health` ("absent", "good", "fading", "too_stale"
            or "dropped") with the `reason`, the `share` that its age leaves
            it, its `age_steps` and `age_secs` at the last refresh (None
            without a version), how many versions were put in place (`swaps`)
            and their `bytes`, the `last_bytes` of these, the `read_secs` of
            the last read (None without one), `num_dropped`,
            `num_quarantined`, and the newest `quarantined` versions with
            their reasons.
        """
        return [slot.status for slot in self._slots]
