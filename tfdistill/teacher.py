"""The teachers of one student: frozen, hot-swapped, checked, and untracked."""

import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import canary as canary_lib
from tfdistill import chief_only
from tfdistill import data_schema
from tfdistill import exchange as exchange_lib
from tfdistill import parameter_server
from tfdistill import remote_teachers
from tfdistill import soft_targets
from tfdistill import staleness
from tfdistill import student_graph
from tfdistill import teacher_options
from tfdistill import teacher_places
from tfdistill import teacher_refresh
from tfdistill import teacher_slot


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
        max_staleness_secs: float | None = None,
        staleness_ramp_steps: int = 0,
        staleness_ramp_secs: float = 0.0,
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
                `data_schema.digests`. Default: nothing is compared.
            allow_other_schemas: Whether to warn only of another schema.
            canary: A batch that teachers must predict before they are obeyed.
            poll_secs: Seconds between two looks at the exchange. Default 1.

        Raises:
            ValueError: An argument is not as above.
        """
        self._options = teacher_options.TeacherOptions(
            peers=tuple(peers),
            saved_models=teacher_options.checked_paths(saved_models),
            weights=weights,
            bounds=staleness.Bounds(
                max_steps=max_staleness_steps,
                max_secs=max_staleness_secs,
                ramp_steps=staleness_ramp_steps,
                ramp_secs=staleness_ramp_secs,
            ),
            max_bad_batches=max_bad_batches,
            allow_other_graphs=allow_other_graphs,
            trust_saved_models=trust_saved_models,
            schema=data_schema.Wanted(schema, allow_other_schemas),
            canary=canary,
            poll_secs=poll_secs,
        )
        teacher_options.check_exchange(self._options.peers, exchange)
        self._exchange = exchange or exchange_lib.Exchange(None)
        self._graph: student_graph.StudentGraph | None = None
        self._slots: list[teacher_slot.TeacherSlot] = []
        self._refresh: teacher_refresh.TeacherRefresh | None = None
        # What a parameter-server group does otherwise; None in any other.
        self.remote: remote_teachers.RemoteTeachers | None = None

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
        if parameter_server.is_used(strategy):
            self._options.check_remote()
            self.remote = remote_teachers.RemoteTeachers(self._options)
        with strategy.scope():
            self._state = (
                self.remote.state
                if self.remote
                else soft_targets.TeacherState.of(self._options)
            )
            self._slots = teacher_places.make(
                self._options,
                self._exchange,
                graph,
                alone=chief_only.num_workers(strategy) == 1,
                make_slot=self.remote.make_slot if self.remote else None,
            )
        self._refresh = teacher_refresh.TeacherRefresh(
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

    def _attached(self, caller: str) -> teacher_refresh.TeacherRefresh:
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
