"""What happens between steps: exports of the student, news of teachers.

And the other callbacks that users add to `fit`, each of whose code is in its
room: `Backup`, `CodistillTensorBoard`, `HeldOutPredictions`,
`IgnoreStorageErrors`.
"""

import contextlib
import logging
import math
import pathlib
import time
import warnings
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

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
from tfdistill.exports import student_graph
from tfdistill.follow import agreement
from tfdistill.follow import screen
from tfdistill.held_out.callback import HeldOutPredictions
from tfdistill.mixing import mixer
from tfdistill.mixing import rules
from tfdistill.observe.storage_errors import IgnoreStorageErrors
from tfdistill.observe.summaries import CodistillTensorBoard
from tfdistill.system import background
from tfdistill.system import fits
from tfdistill.system import keras_internals
from tfdistill.system import run_files
from tfdistill.training import steps

# Exports that fail cost a snapshot each and may fill the disk's last bytes.
_FIRST_PAUSE_SECS = 1.0
_LONGEST_PAUSE_SECS = 30.0
# Longest wait for the last export at the end of training.
_FINISH_SECS = 600.0
# Steps that have certainly ended when so many later ones were begun.
_MOST_UNCOUNTED = 64
# File in a group's directory once the group has taken its first step.
_STARTED = "started"
_LOOK_SECS = 0.01
# The interval that adapts: its first and least steps, the steps of a refresh
# beside it, and how much longer it is than other groups take to read a version.
_AUTO, _FIRST_STEPS, _LEAST_STEPS, _REFRESH_STEPS = "auto", 100, 20, 5
_MARGIN = 1.5
# So often a group looks for the first versions of others once its burn-in is
# over, for so many of its intervals.
_SOON_STEPS, _SOON_INTERVALS = 5, 2
# Where groups wait for each other: for so long, however short the burn-in was.
_LEAST_WAIT_SECS = 10.0
# In a manifest's `extras`: an early step and the loss of the steps until then.
_BEGAN_FIELD = "began"
_log = logging.getLogger(__name__)
__all__ = [
    "Backup",
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
                every_steps=_compared(every_steps),
                wait_secs=method.TOGETHER_SECS,
            )
    if cluster.group_dir is not None:
        found.append(Backup(f"{cluster.group_dir}/backup"))
    return found


def _compared(every_steps: Any) -> Any:
    """Returns the steps between exports that a comparison asks for, if any."""
    chosen = strategy_lib.current_cluster().method
    return (chosen and chosen.every_steps) or every_steps


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
        exchange: Where it publishes, once training has begun.
        group: Whose versions these are, once training has begun.
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
        self._is_quantized = variables_dtype in quantized.DTYPES
        if self._is_quantized and choose is not None:
            raise ValueError(
                "`choose` picks changes of floats; received it with "
                f"variables_dtype={variables_dtype!r}. Leave one of them out."
            )
        every_steps = _compared(every_steps)
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
        self._pause = background.Backoff(
            first_secs=_FIRST_PAUSE_SECS, longest_secs=_LONGEST_PAUSE_SECS
        )
        self._last_step = -1
        self._looks_for_earlier = self._looks_for_twins = False
        self._began: list[float] | None = None
        self._burn_in: Any = None
        self._others: list[steps.SteppedCallback] = []
        # For the whole training, including earlier attempts: the examples
        # counted, and counts that the device may still be computing.
        self._num_examples = 0.0
        self._uncounted: list[Any] = []
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
        self._num_examples += sum(map(float, self._uncounted))
        self._uncounted.clear()
        every = self.model.optimizer.gradient_accumulation_steps
        return {
            "updates": self.step // (every or 1),
            "examples": self._num_examples,
        }

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

    def _offset(self, cluster: identity.Cluster) -> int:
        if self.offset_steps is not None:
            return self.offset_steps
        if self._is_mixed:
            return 0  # It mixes versions of all groups of the same step.
        every = self.every_steps
        # A group that was given may be none of the cluster.
        return self.group * every // cluster.num_groups % every

    def state(self) -> dict[str, Any]:
        """Returns how many examples were trained on."""
        return {"examples": self.counts["examples"]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self._num_examples = state["examples"]
        self._uncounted.clear()

    def on_train_begin(self, logs: Any = None) -> None:
        """Claims the group and starts the writing thread, on the chief."""
        super().on_train_begin(logs)
        if self.step == 0:
            self._last_step = -1
            self._num_examples = 0.0
            self._uncounted.clear()
            self._began = self.published = None
            self._key_frames.forget()
        strategy = self.codistilled.distribute_strategy
        cluster = strategy_lib.cluster_of(strategy)
        self._schedule = steps.EverySteps(
            self.every_steps, offset_steps=self._offset(cluster)
        )
        if self._is_mixed:
            self._key_frames.refuse_deltas()
            if self._is_quantized:
                raise ValueError(
                    "Versions that are mixed must be floats; received "
                    f"variables_dtype={self._variables_dtype!r}."
                )
            if self._adapts:
                raise ValueError(
                    "`every_steps` must be a number beside a callback that "
                    'mixes versions; received "auto".'
                )
        self._schedule.start(self.step)
        self._last_due = self.step, time.monotonic()
        if self._adapts:
            self._agreement = agreement.Agreement(strategy, [], every=1)
        self._peers = [g for g in cluster.peers if g != self.group]
        self._looks_for_earlier = self._looks_for_twins = self.step == 0
        if replicas.is_chief(strategy):
            if self.exchange.enabled:
                self._claim = self.exchange.claim(
                    self.group, run=cluster.workdir or ""
                )
            self._worker = background.OneJobThread("tfdistill-export")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes a snapshot when one is due."""
        super().on_train_batch_end(batch, logs)
        examples = self.model.trainer.last.examples
        if examples is not None:
            # Read later: its step may be running still.
            self._uncounted.append(examples)
            if len(self._uncounted) > _MOST_UNCOUNTED:
                self._num_examples += float(self._uncounted.pop(0))
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
        is_over: bool = self._burn_in.end == self.step > 0
        return is_over

    def on_train_end(self, logs: Any = None) -> None:
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
        """Waits until this step's version is published, or has failed.

        One that was skipped is taken now. Does nothing but on the chief.

        Args:
            timeout_secs: Longest wait.
        """
        deadline = time.monotonic() + timeout_secs
        self._take(self._values(), wait_secs=timeout_secs)
        if self._worker is not None:
            self._worker.wait_idle(max(0.0, deadline - time.monotonic()))

    def _adapt(self) -> None:
        """Sets the steps to the next export, as the chief says.

        By how long these last steps took; half as many or twice at most.
        """
        (step, then), now = self._last_due, time.monotonic()
        self._last_due = self.step, now
        teachers = self.codistilled.teachers
        is_known = teachers.heard_secs or not teachers.needs_versions
        every = 0 if self._worker is None else self.every_steps
        if every and is_known:
            secs = max(
                self.writes.last_secs or 0.0,
                teachers.read_secs,
                teachers.heard_secs,
            )
            wanted = _MARGIN * secs * (self.step - step) / (now - then)
            wanted = min(max(wanted, every / 2, _LEAST_STEPS), every * 2)
            every = math.ceil(wanted)
        news = self._agreement.exchange_news(every=[every])
        (every,) = news.said["every"]
        self.every_steps = every
        self._schedule = steps.EverySteps(every, offset_steps=self.step % every)
        self._schedule.start(self.step)

    def _export(self, *, wait: bool) -> None:
        # A collective, so it comes before anything that workers differ in.
        model = self.codistilled
        model.average_statistics()
        values = self._values()
        if self.step:
            model.teachers.note_export(self.step, values)
        self._take(values, wait_secs=_FINISH_SECS if wait else 0.0)

    def _values(self) -> Mapping[int, tf.Tensor]:
        """What versions hold in place of weights: averages of `use_ema`.

        At the start there are none.
        """
        if not self.step:
            return {}
        pairs = keras_internals.moving_averages(self.model.optimizer)
        return {id(v): tf.convert_to_tensor(mean.value) for v, mean in pairs}

    def _take(
        self, values: Mapping[int, tf.Tensor], *, wait_secs: float
    ) -> None:
        if self._worker is None or not self.exchange.enabled:
            return
        model = self.codistilled
        # It waits for a whole version, even after a delta of the step.
        whole = wait_secs > 0
        may_be_delta = self._key_frames.every > 1
        if self.step == self._last_step and not (whole and may_be_delta):
            return
        if not wait_secs and not self._pause.is_over:
            self.totals["skipped"] += 1
            return
        if self._writer is None or self._writer.graph is not model.graph:
            self._writer = saved_model.SavedModelWriter(
                model.graph, variables_dtype=self._variables_dtype
            )
        snapshot = self._writer.snapshot(values)
        step, extras = self.step, self._extras()
        submitted = self._worker.submit(
            lambda: self._write(snapshot, step, extras, whole),
            wait_secs=wait_secs,
        )
        if submitted:
            self._last_step = step
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
            found[_BEGAN_FIELD] = self._began
        if self.schema:
            found[screen.SCHEMA_FIELD] = self.schema
        for callback in self._others:
            found |= callback.manifest_extras()
        return found

    def _write(
        self,
        snapshot: saved_model.Snapshot,
        step: int,
        extras: dict[str, Any],
        whole: bool,
    ) -> None:
        # Here, since the training must not wait for it.
        if self._looks_for_earlier:
            self._looks_for_earlier = False
            self._tell_of_an_earlier_run()
        with self.writes.measured():
            self._publish(snapshot, step, extras, whole)
        began = extras.get(_BEGAN_FIELD)
        if self._looks_for_twins and began:
            # The later of two groups finds what the other has just published.
            self._looks_for_twins = False
            self._tell_of_twins(began)

    def _tell_of_twins(self, began: list[float]) -> None:
        for group in self._peers:
            with contextlib.suppress(OSError):
                found = self.exchange.latest(group)
                if found and found.manifest.extras.get(_BEGAN_FIELD) == began:
                    _log.warning(
                        "Group %d had this group's loss after step %d, %s: "
                        "both started with the same weights and data, so they "
                        "have nothing to teach each other. Give each group its "
                        "own seed, such as "
                        "keras.utils.set_random_seed(cluster.group), or its "
                        "own part of the data (tfdistill.data.group_shard).",
                        group,
                        *began,
                    )

    def _tell_of_an_earlier_run(self) -> None:
        try:
            earlier = self.exchange.steps(self.group)
        except OSError:
            return  # The export that follows reports it.
        if earlier:
            _log.warning(
                "This training started at step 0, but the exchange has "
                "versions of an earlier training, up to step %d: %s. They "
                "teach the other groups until this training passes that step. "
                "Use a new directory for a new run. To resume a run, add a "
                "tfdistill.callbacks.Backup.",
                earlier[-1],
                self.exchange.group_path(self.group),
            )

    def _publish(
        self,
        snapshot: saved_model.Snapshot,
        step: int,
        extras: dict[str, Any],
        whole: bool,
    ) -> None:
        writer: Any = self._writer
        graph = writer.graph
        try:
            version = self._key_frames.publish(
                self.exchange,
                writer,
                snapshot,
                whole=whole,
                group=self.group,
                step=step,
                graph_fingerprint=graph.fingerprint,
                inputs=student_graph.to_json(graph.input_spec, "inputs"),
                outputs=student_graph.to_json(graph.output_spec, "outputs"),
                variables=writer.variables,
                extras=extras,
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
            cause = error.__cause__ or error
            goes_on = ", training continues"
            if isinstance(cause, server_bundle.NotFiniteError):
                # No fault of the storage: it ends the training, elsewhere.
                self.model.trainer.not_finite = f"{cause.name} at step {step}"
                goes_on = ""
            elif not isinstance(cause, ValueError):
                self._pause.failed()
            self.totals["failed"] += 1
            _log.warning("Step %d was not exported%s: %s", step, goes_on, error)


def _check_offset(offset_steps: Any, every_steps: int) -> None:
    if offset_steps is None:
        return
    is_number = isinstance(offset_steps, int)
    if not is_number or not 0 <= offset_steps < every_steps:
        raise ValueError(
            "`offset_steps` must be None or a whole number >= 0 and < "
            f"`every_steps`, {every_steps}; received {offset_steps!r}."
        )


class TeacherLoader(steps.Loader):
    """Loads newer teachers at regular steps, the same on all workers.

    A background thread looks for versions and reads them, from the start of
    `fit` to its end. Between steps, training pays only for one small
    collective and, when a version is ready on all workers, for its assignment.

    Beside a `WaitForGroups`, training waits a second time, where the burn-in
    ends: until the first version of each other group is in use, or for as long
    as it has trained so far.
    """

    def __init__(self, *, every_steps: int) -> None:
        """Reads nothing yet.

        Args:
            every_steps: Steps between refreshes, >= 1.
        """
        super().__init__()
        own = steps.EverySteps(every_steps).every_steps
        # To look less often than there is news would hide the interval.
        self._schedule = steps.EverySteps(min(own, _compared(own)))
        self.num_refreshes = self._refreshed = 0
        self._burn_in: Any = None
        self._exporter: Any = None
        self._waits: WaitForGroups | None = None
        self.blocked = background.WorkTimes()
        # Time of the last refresh, and the pause before it.
        self._last_time, self._pause_secs = time.monotonic(), 0.0

    def meet(self, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        """Finds what ends the burn-in, and whether groups then wait."""
        self._burn_in = steps.first(callbacks, steps.BurnIn)
        self._exporter = steps.first(callbacks, steps.Exporter)
        self._waits = steps.first(callbacks, WaitForGroups)

    def manifest_extras(self) -> dict[str, Any]:
        """Returns how long this group takes to receive each peer's version."""
        secs = self.codistilled.teachers.read_secs
        if not secs:
            return {}
        # A version that was read is used at the next refresh.
        return {screen.HEARS_FIELD: round(secs + self._pause_secs, 3)}

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the reading thread."""
        super().on_train_begin(logs)
        self._schedule.start(self.step)
        model = self.codistilled
        teachers = model.teachers
        self._began = time.monotonic()
        self._values = replicas.WorkerValues(model.distribute_strategy)
        cluster = strategy_lib.cluster_of(model.distribute_strategy)
        num_peers = len(cluster.peers)
        if num_peers and not teachers.follows_peers:
            warnings.warn(
                f"`fit` got a TeacherLoader among {num_peers + 1} groups, but "
                "the model follows no other group. Pass "
                "teachers=tfdistill.teachers.Peers() to CodistillModel, or "
                "leave out the loader.",
                stacklevel=2,
            )
        teachers.start()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Swaps in what all workers have read, when a refresh is due."""
        super().on_train_batch_end(batch, logs)
        teachers = self.model.teachers
        # Fixed teachers bring no news, but may have to be dropped.
        is_due = self._schedule.due(self.step) or self._waits_for_first
        if len(teachers) and is_due:
            self._refresh()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Waits for the other groups where the burn-in has just ended."""
        super().on_train_batch_begin(batch, logs)
        # By now this group's exporter has seen the same step.
        if self._waits and self._burn_in and self._burn_in.end == self.step > 0:
            self._wait_for_first(self._waits)

    def _wait_for_first(self, waits: "WaitForGroups") -> None:
        """Publishes this step, and waits for the others' first versions."""
        if not self.model.teachers.lacks_versions:
            return
        start = time.monotonic()
        limit = max(_LEAST_WAIT_SECS, start - self._began)
        deadline = start + min(limit, waits.limit_secs)
        if self._exporter is not None:
            self._exporter.ensure_published(limit)
        is_over = False
        while not is_over:
            self._refresh()
            late = time.monotonic() > deadline
            is_over = late or not self.model.teachers.lacks_versions
            # All workers refresh as often as the chief.
            is_over = bool(self._values.gathered(int(is_over))[0])
            if not is_over:
                time.sleep(_LOOK_SECS)
        waits.waited_secs += time.monotonic() - start

    def _refresh(self) -> None:
        """Lets all workers agree on versions, and swaps in what all have."""
        teachers = self.model.teachers
        self._refreshed = self.step
        now, then = time.monotonic(), self._last_time
        self._last_time, self._pause_secs = now, now - then
        generation = teachers.generation
        with self.blocked.measured():
            if teachers.past_moves_at_refreshes:
                # The mean of the moving statistics that replicas keep apart.
                self.model.average_statistics()
            swapped = teachers.refresh(step=self.step)
            self.num_refreshes += len(swapped)
            if teachers.generation != generation:
                self.model.make_train_function(force=True)

    @property
    def _waits_for_first(self) -> bool:
        """Whether the burn-in is just over, and a peer has no version yet.

        Groups end theirs at different steps, and publish a version at once.
        """
        if self._burn_in is None or self.step - self._refreshed < _SOON_STEPS:
            return False
        since = self.step - self._burn_in.end
        is_soon = 0 <= since < _SOON_INTERVALS * self._schedule.every_steps
        return is_soon and self.model.teachers.lacks_versions

    def on_train_end(self, logs: Any = None) -> None:
        """Stops the reading thread."""
        self.model.teachers.stop()


class WaitForGroups(keras.callbacks.Callback):
    """Waits after the first step until every group has completed its own.

    Groups never wait for each other in a long training: the one that starts
    first has no teacher for a moment. A run of a minute would lose much of its
    time to start-up. The groups see each other's first steps in the workdir of
    the run.

    Example:
        ```python
        callbacks = [WaitForGroups(), *defaults(every_steps=50)]
        ```
    """

    # The other workers of the group wait for it in their next step.
    chief_only = True

    def __init__(
        self,
        cluster: identity.Cluster | None = None,
        *,
        limit_secs: float = 600.0,
    ) -> None:
        """Waits for nothing yet.

        Args:
            cluster: Says which group this is, and where the run's files are.
                Defaults to the environment's.
            limit_secs: Longest wait; then training continues without the
                others, with a warning. Default 600.

        Raises:
            ValueError: There are several groups and no workdir.
        """
        super().__init__()
        cluster = cluster or identity.Cluster.from_env()
        if cluster.num_groups > 1 and cluster.workdir is None:
            raise ValueError(
                "`cluster` must have a workdir, where groups see each other "
                f"start; it has no workdir and {cluster.num_groups} groups. "
                "Set TFDISTILL_WORKDIR, or pass tfdistill.Cluster(workdir=...)."
            )
        self._cluster = cluster
        self.limit_secs = limit_secs
        self._marker, self._number, self._has_started = _STARTED, 1, False
        self.waited_secs = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds which training of this process it is: each has a first step."""
        number = fits.number(
            f"{self._cluster.group_dir}/{_STARTED}", of=self.model.optimizer
        )
        self._marker = _STARTED if number == 1 else f"{_STARTED}_{number}"
        self._has_started = self._has_started and number == self._number
        self._number = number

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Announces this group's first step, and waits for the others'."""
        if self._has_started or self._cluster.workdir is None:
            return
        self._has_started = True
        if logs:
            float(logs["loss"])  # Steps may be running still.
        start = time.monotonic()
        workdir = pathlib.Path(self._cluster.workdir)
        markers = [
            workdir / run_files.group_name(group) / self._marker
            for group in range(self._cluster.num_groups)
        ]
        own = markers[self._cluster.group]
        try:
            own.parent.mkdir(parents=True, exist_ok=True)
            own.touch()
        except OSError as error:
            _log.warning(
                "This group could not report that it started: %s", error
            )
        while missing := [path for path in markers if not path.exists()]:
            if time.monotonic() - start > self.limit_secs:
                _log.warning(
                    "Waited %.0f s for the first step of %s; training "
                    "continues.",
                    self.limit_secs,
                    ", ".join(path.parent.name for path in missing),
                )
                break
            time.sleep(_LOOK_SECS)
        self.waited_secs += time.monotonic() - start
