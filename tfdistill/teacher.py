"""The teachers of one student: frozen, hot-swapped, checked, and untracked."""

import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import agreement
from tfdistill import canary as canary_lib
from tfdistill import chief_only
from tfdistill import data_schema
from tfdistill import exchange as exchange_lib
from tfdistill import parameter_server
from tfdistill import peer_reader
from tfdistill import remote_teachers
from tfdistill import soft_targets
from tfdistill import student_graph
from tfdistill import teacher_options
from tfdistill import teacher_slot
from tfdistill import version_screen


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
        exchange: exchange_lib.Exchange | None = None,
        peers: Sequence[int] = (),
        *,
        saved_models: Sequence[str | os.PathLike[str]] = (),
        weights: Sequence[float] | None = None,
        max_staleness_steps: int | None = None,
        max_bad_batches: int = 3,
        allow_other_graphs: bool = False,
        trust_saved_models: bool = False,
        schema: Mapping[str, Any] | None = None,
        allow_other_schemas: bool = False,
        canary: canary_lib.Canary | None = None,
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
            max_bad_batches: Batches in a row with NaN or infinite outputs
                after which a version is quarantined. Default 3.
            allow_other_graphs: Whether to run peers' graphs that differ from
                the student's and hold only what `graph_ops` lists.
            trust_saved_models: Whether to load `saved_models` that hold more,
                with a warning.
            schema: What peers' labels, vocabularies and columns must be; see
                `data_schema.digests`. Default: nothing is compared.
            allow_other_schemas: Whether to warn only of another schema.
            canary: A batch that teachers must predict before they are obeyed.
            poll_secs: Seconds between two looks at the exchange. Default 1.

        Raises:
            ValueError: An argument is not as above.
        """
        self._peers = tuple(peers)
        self._saved_models = tuple(os.fspath(path) for path in saved_models)
        self._max_staleness = max_staleness_steps
        self._max_bad_batches = max_bad_batches
        self._allow_other_graphs = allow_other_graphs
        self._trust = trust_saved_models
        self._canary = canary
        self._schema = data_schema.Wanted(schema, allow_other_schemas)
        self._poll_secs = poll_secs
        self._weights = teacher_options.checked_weights(
            weights, self.num_teachers
        )
        teacher_options.check(
            self._peers, max_staleness_steps, max_bad_batches, poll_secs
        )
        self._exchange = exchange or exchange_lib.Exchange(None)
        teacher_options.check_exchange(self._peers, exchange)
        self._graph: student_graph.StudentGraph | None = None
        self._strategy: Any = None
        self._slots: list[teacher_slot.TeacherSlot] = []
        self._poller: peer_reader.Poller | None = None
        self._published: tuple[list[int], list[bool]] = ([], [])
        # What a parameter-server group does otherwise; None in any other.
        self.remote: remote_teachers.RemoteTeachers | None = None
        # Counts loaded graphs: the training step is traced anew for each.
        self.generation = 0

    def __len__(self) -> int:
        return self.num_teachers

    @property
    def num_teachers(self) -> int:
        """Number of teachers, whether or not they have appeared."""
        return len(self._peers) + len(self._saved_models)

    @property
    def follows_peers(self) -> bool:
        """Whether there are peers to follow while training."""
        return bool(self._peers)

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
        self._graph, self._strategy = graph, strategy
        alone = chief_only.num_workers(strategy) == 1
        if parameter_server.is_used(strategy):
            self._make_remote()
        make_slot = (
            self.remote.make_slot if self.remote else teacher_slot.TeacherSlot
        )
        screen = version_screen.VersionScreen(graph, schema=self._schema)
        with strategy.scope():
            if not self.remote:
                self._state = soft_targets.TeacherState(
                    self._weights, max_staleness_steps=self._max_staleness
                )
            for group in self._peers:
                slot = make_slot(f"group_{group}", graph)
                slot.follow(
                    self._exchange,
                    group,
                    alone=alone,
                    allow_other_graphs=self._allow_other_graphs,
                    screen=screen,
                    canary=self._canary,
                )
                self._slots.append(slot)
            for path in self._saved_models:
                slot = teacher_slot.TeacherSlot(path, graph)
                slot.load(path, trust=self._trust, canary=self._canary)
                self._slots.append(slot)
        self._publish_state()
        self._decisions = agreement.Decisions(
            strategy, self._slots, self.remote or self._agreement(strategy)
        )

    def _make_remote(self) -> None:
        """Prepares for parameter servers."""
        teacher_options.check_remote(
            self._saved_models, self._allow_other_graphs, self._canary
        )
        self.remote = remote_teachers.RemoteTeachers(
            self._weights,
            max_staleness_steps=self._max_staleness,
            max_bad_batches=self._max_bad_batches,
        )
        self._state = self.remote.state

    def _agreement(
        self, strategy: tf.distribute.Strategy
    ) -> agreement.Agreement:
        return agreement.Agreement(
            strategy,
            lambda: self._state.bad_in_a_row() >= self._max_bad_batches,
            size=3 * len(self._slots),
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

    def start(self) -> None:
        """Starts to look for versions in the background."""
        if self._peers and self._poller is None:
            readers = [s.reader for s in self._slots if s.reader]
            proposes = chief_only.is_chief(self._strategy)
            self._poller = peer_reader.Poller(
                readers, proposes, self._poll_secs
            )
            self._poller.start()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        if self._poller is not None:
            self._poller.stop()
            self._poller = None

    def refresh(self, *, step: int | None = None) -> list[str]:
        """Lets the group agree on versions and swaps in what all have.

        Every worker calls it at the same step. It reads no file and waits
        for none, except to load a graph that differs from the student's.

        Args:
            step: The student's global step, by which teachers that have
                become too old are logged. Defaults to not looking.

        Returns:
            The names of the teachers that were swapped.
        """
        ready = self._decisions.drop_bad(
            "its outputs were NaN or infinite in "
            f"{self._max_bad_batches} batches in a row."
        )
        ready = self._decisions.load_graphs(ready)
        for slot in ready:
            self.generation += slot.swap()
        if self.remote and ready:
            self.remote.swapped()
        self._publish_state()
        if step is not None and self._max_staleness is not None:
            for slot in self._slots:
                slot.note_age(step - slot.step, self._max_staleness)
        return [slot.name for slot in ready]

    def _publish_state(self) -> None:
        if self.remote:
            # Travels with each execution.
            return
        steps = [slot.step for slot in self._slots]
        in_use = [slot.in_use for slot in self._slots]
        if (steps, in_use) != self._published:
            self._state.assign(steps=steps, in_use=in_use)
            self._published = (steps, in_use)

    def status(self) -> list[dict[str, Any]]:
        """Describes each teacher, for logs.

        Returns:
            For each teacher its name, the step of the version in use (-1 for
            none), whether that is too old, the number of versions put in
            place and their bytes, and the quarantined versions with their
            reasons.
        """
        return [
            {
                "name": slot.name,
                "step": slot.step if slot.in_use else -1,
                "too_stale": slot.too_stale,
                "swaps": slot.num_swaps,
                "bytes": slot.num_bytes,
                "quarantined": dict(slot.reader.rejected)
                if slot.reader
                else {},
            }
            for slot in self._slots
        ]
