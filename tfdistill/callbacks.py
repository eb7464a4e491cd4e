"""What happens between steps: exports of the student.

And the other callbacks that users add to `fit`, each of whose code is in its
room: `Backup`, `ChurnBudget`, `CodistillTensorBoard`, `HeldOutPredictions`,
`IgnoreStorageErrors`, `TeacherLoader`, `WaitForGroups`.
"""

import logging
import math
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdistill.backup.callback import Backup
from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.cluster import replicas
from tfdistill.cluster import strategy as strategy_lib
from tfdistill.exchange import claim
from tfdistill.exchange import deltas
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import key_frames
from tfdistill.exports import quantized
from tfdistill.exports import saved_model
from tfdistill.exports import server_bundle
from tfdistill.follow import first_look
from tfdistill.follow import screen
from tfdistill.held_out.callback import HeldOutPredictions
from tfdistill.mixing import mixer
from tfdistill.mixing import rules
from tfdistill.observe.storage_errors import IgnoreStorageErrors
from tfdistill.observe.summaries import CodistillTensorBoard
from tfdistill.system import background
from tfdistill.system import keras_internals
from tfdistill.teachers.churn_budget import ChurnBudget
from tfdistill.teachers.loader import TeacherLoader
from tfdistill.training import steps
from tfdistill.training.wait_for_groups import WaitForGroups

# Longest wait for the last export at the end of training.
_FINISH_SECS = 600.0
# Steps that have certainly ended when so many later ones were begun.
_MOST_UNCOUNTED = 64
# The interval that adapts: its first and least steps, the steps of a refresh
# beside it, and how much longer it is than other groups take to read a version.
_AUTO, _FIRST_STEPS, _LEAST_STEPS, _REFRESH_STEPS = "auto", 100, 20, 5
_MARGIN = 1.5
_log = logging.getLogger(__name__)
__all__ = [
    "Backup",
    "ChurnBudget",
    "CodistillTensorBoard",
    "HeldOutPredictions",
    "IgnoreStorageErrors",
    "StudentExporter",
    "TeacherLoader",
    "WaitForGroups",
    "defaults",
]


def defaults(
    every_steps: int | str, exchange: publisher.Exchange | None = None
) -> list[keras.callbacks.Callback]:
    """Returns the usual callbacks of a codistilled training.

    They are a `StudentExporter`, a `TeacherLoader` and, in a launched run, a
    `Backup` in `backup` in the group's directory. Use the classes themselves
    for any other options.

    Args:
        every_steps: Steps between exports, and between refreshes, >= 1; or
            "auto", see `StudentExporter`.
        exchange: Where this group publishes. Defaults to the exchange of its
            cluster: the cluster of the strategy in whose scope the call is
            made, or else of the environment.

    Returns:
        A new list, to which you may add callbacks of your own.

    Raises:
        ValueError: `every_steps` isn't a whole number >= 1.

    Example:
        >>> [type(callback).__name__ for callback in defaults(every_steps=50)]
        ['StudentExporter', 'TeacherLoader']
    """
    cluster = strategy_lib.current_cluster()
    looks: Any = _REFRESH_STEPS if every_steps == _AUTO else every_steps
    found: list[keras.callbacks.Callback] = [
        StudentExporter(exchange, every_steps=every_steps),
        TeacherLoader(every_steps=looks),
    ]
    if chosen := cluster.method:  # Runs of a comparison are short.
        found.insert(0, WaitForGroups(cluster, limit_secs=method.TOGETHER_SECS))
        if chosen.mixes:
            found[-1] = mixer.WeightMixer(
                rules.ModelAveraging(),
                every_steps=strategy_lib.compared_steps(every_steps),
                wait_secs=method.TOGETHER_SECS,
            )
    if cluster.group_dir is not None:
        found.append(Backup(f"{cluster.group_dir}/backup"))
    return found


class _Export(NamedTuple):
    """What the writing thread publishes."""

    snapshot: saved_model.Snapshot
    step: int
    extras: dict[str, Any]
    whole: bool


class _Examples:
    """How many examples a group has trained on, in earlier attempts, too."""

    def __init__(self, known: float = 0.0) -> None:
        self._known = known
        # Counts that the device may still be computing, so read later.
        self._uncounted: list[Any] = []

    def add(self, examples: Any) -> None:
        self._uncounted.append(examples)
        if len(self._uncounted) > _MOST_UNCOUNTED:
            self._known += float(self._uncounted.pop(0))

    def total(self) -> float:
        self._known += sum(map(float, self._uncounted))
        self._uncounted.clear()
        return self._known


class _Interval:
    """The interval of exports that adapts to how long other groups read."""

    def __init__(self, strategy: tf.distribute.Strategy, step: int) -> None:
        self._workers = replicas.WorkerValues(strategy)
        self._last = step, time.monotonic()

    def adapted(self, every: int, step: int, secs: float | None) -> int:
        """Returns how many steps the chief puts before the next export.

        By how long the last `every` took; half as many or twice at most. It
        stays as it is if no `secs` are known.
        """
        (before, then), now = self._last, time.monotonic()
        self._last = step, now
        if secs is not None:
            wanted = _MARGIN * secs * (step - before) / (now - then)
            wanted = min(max(wanted, every / 2, _LEAST_STEPS), every * 2)
            every = math.ceil(wanted)
        return int(self._workers.chiefs(every))


class StudentExporter(steps.Exporter):
    """Publishes the student for the other groups at regular steps.

    The training thread only takes a snapshot; a background thread writes and
    publishes it. While one export is being written, later ones are skipped.
    The last one is always written, at the end of training. After a failure,
    exports pause for a second, then for twice as long each time, up to 30 s.
    With `use_ema` in the optimizer, versions hold the averages of the weights,
    which `fit` leaves in the model at its end.

    During training the chief holds the claim of its group: a chief of another
    run fails at the start of its training with a `GroupClaimedError`, and one
    that a newer process of the same run has replaced ends its training with a
    `ClaimLostError`.

    Attributes:
        every_steps: Steps between exports; with "auto", at present.
        offset_steps: Steps by which exports come later; None unless given.
        schema: The digests that identify the meaning of its versions.
        exchange, group: Where it publishes, and whose versions, in training.
        totals: How many exports were published, skipped and failed, and the
            bytes published.
    """

    def __init__(
        self,
        exchange: publisher.Exchange | None = None,
        *,
        every_steps: int | str,
        group: int | None = None,
        variables_dtype: str | None = None,
        schema: Mapping[str, Any] | None = None,
        offset_steps: int | None = None,
        key_every: int = 1,
        choose: deltas.Chooser | None = None,
    ) -> None:
        """Writes nothing yet.

        Args:
            exchange: Where to publish. Defaults to the exchange of the cluster
                for which the model's strategy was made.
            every_steps: Steps between exports, >= 1. The last step of training
                is exported, too. "auto": 100 until a group that teaches this
                one says how long it takes to read a version; then as many as
                take half as long again, here and there, but at least 20.
            group: This group's index. Defaults to the index in the cluster for
                which the model's strategy was made; see `make_strategy`.
            variables_dtype: `"bfloat16"` halves the bytes that travel.
                `"int8"` takes a quarter and `"int4"` an eighth, and scales,
                for floats of two axes or more: one for each row of a table,
                else for each index of the last axis. A teacher holds them as
                they are. Defaults to the variables' own dtypes.
            schema: What labels, vocabularies and columns mean, hashed into
                each version; see `screen.digests`. Default: nothing.
            offset_steps: Steps by which exports come after the multiples of
                `every_steps`, >= 0 and less than that. Default: the groups
                take turns, `group * every_steps // num_groups`, unless another
                callback of `fit` mixes the versions of one step.
            key_every: Every so many versions, and the last, are whole. Those
                between are deltas, for teachers only: the rows that changed
                since the whole one, from which `Peers` get the same bits. On
                parameter servers groups read only whole ones, and their own
                tables pass through the coordinator. What is frozen, if that is
                most of the student, such as a backbone beside LoRA weights,
                is not in deltas: all groups publish it once. Default 1: all
                are whole.
            choose: Picks which changes of dense floats go into a delta, such as
                `contrib.TopOfChunks()`; the other changes are offered again.
                Default: all changes.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__()
        self._key_frames = key_frames.KeyFrames(key_every, choose)
        if variables_dtype in quantized.DTYPES and choose is not None:
            raise ValueError(
                "`choose` picks changes of floats; received it with "
                f"variables_dtype={variables_dtype!r}. Leave one of them out."
            )
        every_steps = strategy_lib.compared_steps(every_steps)
        self._adapts = every_steps == _AUTO
        first: Any = _FIRST_STEPS if self._adapts else every_steps
        self._schedule = steps.EverySteps(first)
        _check_offset(offset_steps, self._schedule.every_steps)
        if exchange is not None:
            publisher.check_exchange(exchange)
        self.every_steps = self._schedule.every_steps
        self.offset_steps = offset_steps
        self.schema = screen.digests(schema or {})
        self._given_exchange, self._given_group = exchange, group
        self._variables_dtype = variables_dtype
        self._writer: saved_model.SavedModelWriter | None = None
        self._worker: background.OneJobThread | None = None
        self._claim: claim.GroupClaim | None = None
        # Exports that fail cost a snapshot, and may fill the disk's last bytes.
        self._pause = background.Backoff(first_secs=1.0, longest_secs=30.0)
        self._last_step = -1
        self._began: list[float] | None = None
        self._burn_in: steps.BurnIn | None = None
        self._others: list[steps.SteppedCallback] = []
        self._examples = _Examples()
        self.published: int | None = None
        self.totals = dict.fromkeys(
            ("published", "skipped", "failed", "bytes"), 0
        )
        self.last_num_bytes: int | None = None
        # On the training thread, and on the one that writes.
        self.blocked = background.WorkTimes()
        self.writes = background.WorkTimes()

    @property
    def exports_averages(self) -> bool:
        """Whether versions hold an average of the weights, not the weights."""
        return bool(keras_internals.inner(self.model.optimizer).use_ema)

    @property
    def counts(self) -> dict[str, float]:
        """Updates and examples that this group has trained on, in total."""
        every = self.model.optimizer.gradient_accumulation_steps
        updates = self.step // (every or 1)
        return {"updates": updates, "examples": self._examples.total()}

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds the callbacks that add to manifests, or mix versions."""
        self._others = [
            c for c in callbacks if isinstance(c, steps.SteppedCallback)
        ]
        self._burn_in = steps.first(callbacks, steps.BurnIn)

    def find_place(self, cluster: identity.Cluster) -> None:
        """Settles where it publishes, and whose versions these are."""
        given = self._given_group
        self.group = cluster.group if given is None else given
        self.exchange = self._given_exchange or publisher.Exchange(
            cluster.exchange
        )

    @property
    def _is_mixed(self) -> bool:
        found = steps.first(self._others, steps.Mixer)
        return found is not None and found.mixes_versions

    def state(self) -> dict[str, Any]:
        """Returns how many examples were trained on."""
        return {"examples": self._examples.total()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._examples = _Examples(state["examples"])

    def on_train_begin(self, logs: steps.Logs | None = None) -> None:
        """Claims the group and starts the writing thread, on the chief."""
        super().on_train_begin(logs)
        strategy = self.codistilled.distribute_strategy
        cluster = strategy_lib.cluster_of(strategy)
        self._first_look: first_look.FirstLook | None = None
        if self.step == 0:
            self._last_step, self._examples = -1, _Examples()
            self._began = self.published = None
            self._key_frames.forget()
            peers = [group for group in cluster.peers if group != self.group]
            self._first_look = first_look.FirstLook(
                self.exchange, self.group, peers
            )
        every, offset = self.every_steps, self.offset_steps
        if offset is None:
            # A group that was given may be none of the cluster.
            offset = self.group * every // cluster.num_groups % every
        if self._is_mixed:
            # Versions of all groups of the same step are.
            offset = self.offset_steps or 0
            self._key_frames.refuse_deltas()
            _check_mixed(self._variables_dtype, adapts=self._adapts)
        self._schedule = steps.EverySteps(every, offset_steps=offset)
        self._schedule.start(self.step)
        if self._adapts:
            self._interval = _Interval(strategy, self.step)
        if replicas.is_chief(strategy):
            if self.exchange.enabled:
                run = cluster.workdir or ""
                self._claim = self.exchange.claim(self.group, run=run)
            self._worker = background.OneJobThread("tfdistill-export")

    def on_train_batch_end(
        self, batch: int, logs: steps.Logs | None = None
    ) -> None:
        """Takes a snapshot when one is due."""
        super().on_train_batch_end(batch, logs)
        examples = self.model.trainer.last.examples
        if examples is not None:
            self._examples.add(examples)
        # A first loss may be one of weights that are 0, whatever the data.
        if 2 <= self.step <= 2 * self.model.trainer.num_steps and logs:
            loss = float(logs["loss"])
            self._began = [self.step, loss] if math.isfinite(loss) else None
        if self._claim is not None:
            self._claim.check()
        is_due = self._schedule.due(self.step)
        if is_due or self._is_first:
            with self.blocked.measured():
                if self._adapts and is_due:
                    self._adapt()
                self._export(wait=False)

    @property
    def _is_first(self) -> bool:
        """Whether this is the first version that others may learn from."""
        if self._burn_in is None or self._is_mixed:
            return False
        return self._burn_in.end == self.step > 0

    def on_train_end(self, logs: steps.Logs | None = None) -> None:
        """Publishes the last step and waits until it is written."""
        self._export(wait=True)
        if self._worker is not None:
            self._worker.close(_FINISH_SECS)
            self._worker = None
        if self._claim is not None:
            self._claim.release()
            self._claim.check()
            self._claim = None

    def ensure_published(self, timeout_secs: float) -> None:
        """Waits so long until this step's version is published, or has failed.

        One that was skipped is taken now. Does nothing but on the chief.
        """
        deadline = time.monotonic() + timeout_secs
        values = _averages(self.model.optimizer, self.step)
        self._take(values, whole=True, wait_secs=timeout_secs)
        if self._worker is not None:
            self._worker.wait_idle(max(0.0, deadline - time.monotonic()))

    def _adapt(self) -> None:
        """Sets the steps to the next export, as the chief says."""
        peers, secs = self.codistilled.teachers.peers, None
        if peers.heard_secs or not peers:
            writing = self.writes.last_secs or 0.0
            secs = max(writing, peers.read_secs, peers.heard_secs)
        every = self._interval.adapted(self.every_steps, self.step, secs)
        self.every_steps = every
        self._schedule = steps.EverySteps(every, offset_steps=self.step % every)
        self._schedule.start(self.step)

    def _export(self, *, wait: bool) -> None:
        # A collective, so it comes before anything that workers differ in.
        model = self.codistilled
        model.average_statistics()
        values = _averages(self.model.optimizer, self.step)
        if self.step:
            model.teachers.note_export(self.step, values)
        self._take(values, whole=wait, wait_secs=_FINISH_SECS if wait else 0.0)

    def _take(
        self,
        values: Mapping[int, tf.Tensor],
        *,
        whole: bool,
        wait_secs: float,
    ) -> None:
        """Hands a snapshot to the writing thread, if it is free in time.

        A `whole` version is written even after a delta of the step, and in a
        pause.
        """
        if self._worker is None or not self.exchange.enabled:
            return
        model = self.codistilled
        may_be_delta = self._key_frames.every > 1
        if self.step == self._last_step and not (whole and may_be_delta):
            return
        if not whole and not self._pause.is_over:
            self.totals["skipped"] += 1
            return
        if self._writer is None or self._writer.graph is not model.graph:
            self._writer = saved_model.SavedModelWriter(
                model.graph, variables_dtype=self._variables_dtype
            )
        snapshot = self._writer.snapshot(values)
        export = _Export(snapshot, self.step, self._extras(), whole)
        if self._worker.submit(
            lambda: self._write(export), wait_secs=wait_secs
        ):
            self._last_step = self.step
        else:
            self.totals["skipped"] += 1

    def _extras(self) -> dict[str, Any]:
        """What the manifest says of this step."""
        found: dict[str, Any] = {
            screen.INTERVAL_FIELD: self.every_steps,
            screen.COUNT_FIELD: self.totals["published"],
            **self.counts,
        }
        if self._began:
            found[first_look.BEGAN_FIELD] = self._began
        if self.schema:
            found[screen.SCHEMA_FIELD] = self.schema
        for callback in self._others:
            found |= callback.manifest_extras()
        return found

    def _write(self, export: _Export) -> None:
        # Here, since the training must not wait for a look.
        if self._first_look is not None:
            self._first_look.before()
        with self.writes.measured():
            self._publish(export)
        if self._first_look is not None:
            self._first_look.after(export.extras.get(first_look.BEGAN_FIELD))

    def _publish(self, export: _Export) -> None:
        writer: Any = self._writer
        step = export.step
        try:
            version = self._key_frames.publish(
                self.exchange,
                writer,
                export.snapshot,
                whole=export.whole,
                group=self.group,
                step=step,
                extras=export.extras,
                **writer.described,
            )
            self._pause.succeeded()
            self.published = step
            self.totals["published"] += 1
            self.totals["bytes"] += version.num_bytes
            self.last_num_bytes = version.num_bytes
        except versions.VersionExistsError:
            self.published = step
            _log.info("Version %d was published before.", step)
        except claim.ERRORS:
            pass  # Logged once, and raised in the training thread.
        except (versions.ExportError, server_bundle.NotFiniteError) as error:
            self.totals["failed"] += 1
            cause = error.__cause__ or error
            if isinstance(cause, server_bundle.NotFiniteError):
                # No fault of the storage: it ends the training, elsewhere.
                self.model.trainer.fail(f"{cause.name} at step {step}")
                _log.warning("Step %d was not exported: %s", step, error)
                return
            if not isinstance(cause, ValueError):
                self._pause.failed()
            _log.warning(
                "Step %d was not exported, training continues: %s", step, error
            )


def _averages(optimizer: keras.Optimizer, step: int) -> Mapping[int, tf.Tensor]:
    """What versions hold in place of weights: averages of `use_ema`.

    At the start there are none.
    """
    pairs = keras_internals.moving_averages(optimizer) if step else ()
    return {id(v): tf.convert_to_tensor(mean.value) for v, mean in pairs}


def _check_mixed(variables_dtype: str | None, *, adapts: bool) -> None:
    if variables_dtype in quantized.DTYPES:
        raise ValueError(
            "Versions that are mixed must be floats; received "
            f"variables_dtype={variables_dtype!r}."
        )
    if adapts:
        raise ValueError(
            "`every_steps` must be a number beside a callback that mixes "
            'versions; received "auto".'
        )


def _check_offset(offset_steps: int | None, every_steps: int) -> None:
    if offset_steps is None:
        return
    is_number = isinstance(offset_steps, int)
    if not is_number or not 0 <= offset_steps < every_steps:
        raise ValueError(
            "`offset_steps` must be None or a whole number >= 0 and < "
            f"`every_steps`, {every_steps}; received {offset_steps!r}."
        )
