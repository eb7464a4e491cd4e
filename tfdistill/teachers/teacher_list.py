"""All teachers of one student: attached, asked, refreshed, and reported."""

import logging
import math
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import losses as losses_lib
from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.cluster import replicas
from tfdistill.exports import student_graph
from tfdistill.follow import agreement
from tfdistill.follow import follower
from tfdistill.teachers import canary
from tfdistill.teachers import fixed
from tfdistill.teachers import labels as labels_lib
from tfdistill.teachers import on_servers
from tfdistill.teachers import own_past
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import predictions
from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import scale
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import term as term_lib
from tfdistill.teachers import worth
from tfdistill.teachers import yardstick
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# What a step reports of each teacher: the share of rows that it taught, and the
# version that did.
_TAUGHT, _VERSIONS = labels_lib.TAUGHT_ROWS, "versions"
# A version that answers NaN or infinity before so many refreshes in a row is
# dropped: one may be the student's own overflow.
_MAX_BAD = 3
_CHIEFS = "see the log of the group's chief for the reason."
_ATTACHED = (
    "Teachers serve one student; {} is attached already. Make new teachers, "
    "and a new CodistillModel."
)


def checked(teachers: Any) -> list[teacher_lib.Teacher]:
    """Returns what `CodistillModel(teachers=...)` was given as a list."""
    if teachers is None:
        return []
    is_list = isinstance(teachers, list | tuple)
    found = list(teachers) if is_list else [teachers]
    for each in found:
        if not isinstance(each, teacher_lib.Teacher):
            raise ValueError(
                "`teachers` must be a tfdistill.teachers.Teacher or a list of "
                f"them; received {each!r:.100}. For other groups, pass the "
                "object tfdistill.teachers.Peers(); for a model or a path, "
                "tfdistill.teachers.FixedTeacher(model_or_path)."
            )
    if len(set(map(id, found))) != len(found):
        raise ValueError(
            "`teachers` must contain each teacher once; received "
            f"{[each.name for each in found]}. To count a teacher twice, "
            "double its `weight`."
        )
    return found


class TeacherList:
    """The teachers of one student, which `CodistillModel.teachers` is.

    Attributes:
        loss, weight: The distillation loss that the model was compiled with,
            and its weight as a function of the step.
        generation: Counts loaded graphs: the training step is traced again
            for each.
        has_exporter: Whether the `fit` in progress has a `StudentExporter`.
        validation_data: The data of the `fit` in progress.
        remote: What the executions of a parameter-server group take along;
            None in any other.
    """

    def __init__(self, teachers: object, cluster: identity.Cluster) -> None:
        """Takes the teachers; makes nothing yet.

        `teachers` is None, a teacher, or a list of them. ValueError if two
        have the same name.
        """
        self._given = _chosen(checked(teachers), cluster.method)
        self._teachers = [
            member for given in self._given for member in given.members(cluster)
        ]
        _give_names(self._teachers)
        self._peers = [
            t for t in self._teachers if isinstance(t, peers_lib.Peer)
        ]
        self.loss: Any = None
        self.weight: Any = None
        self._term: term_lib.DistillationTerm | None = None
        self._student: Any = None
        self._following: follower.Following | None = None
        self.remote: on_servers.RemoteTeachers | None = None
        self.generation = 0
        self.has_exporter = False
        self.validation_data: Any = None
        # The last step's report, and for each teacher the number of successive
        # reports with rows that weren't finite.
        self._report: Any = None
        self._num_bad = [0] * len(self._teachers)
        self._task_loss: Any = None
        self._reports: worth.Reports | None = None
        # Up to which step of the student its teachers were counted.
        self._counted = 0

    def __len__(self) -> int:
        return len(self._teachers)

    def __iter__(self) -> Iterator[teacher_lib.Teacher]:
        return iter(self._teachers)

    @property
    def names(self) -> list[str]:
        """The name of each teacher."""
        return [each.name for each in self._teachers]

    @property
    def needs_versions(self) -> bool:
        """Whether other groups teach by their versions."""
        return bool(self._peers)

    @property
    def unheard(self) -> list[int]:
        """Groups of which no version has come, to be used or refused."""
        followers = [peer.follower for peer in self._peers]
        return [
            each.group
            for each in followers
            if each.current < 0 and not each.rejected
        ]

    @property
    def swaps_predictions(self) -> bool:
        """Whether peers teach by what they predict in the same step."""
        return self._has(predictions.PredictedPeer)

    @property
    def follows_peers(self) -> bool:
        """Whether other groups teach, by versions or by predictions."""
        return self.needs_versions or self.swaps_predictions

    @property
    def are_trained(self) -> bool:
        """Whether some change while the student trains."""
        return self.follows_peers or self._has(own_past.OwnPast)

    @property
    def read_secs(self) -> float:
        """How long reading a version of each peer takes; 0 if unknown."""
        secs = sum(peer.follower.read_secs for peer in self._peers)
        return secs and secs + follower.POLL_SECS

    @property
    def heard_secs(self) -> float:
        """How long the slowest peer takes to get a version, as it reports."""
        return max((peer.hears_secs for peer in self._peers), default=0.0)

    @property
    def past_moves_at_refreshes(self) -> bool:
        """Whether refreshes, not exports, move the student's own past."""
        return self._has(own_past.OwnPast) and not self.has_exporter

    def _has(self, kind: type[teacher_lib.Teacher]) -> bool:
        return any(isinstance(each, kind) for each in self._teachers)

    # ---- before training ----

    def compile(
        self,
        loss: object,
        weight: Callable[[tf.Tensor], Any],
        *,
        task_loss: object,
        output_names: Sequence[str] | None,
        **options: Any,
    ) -> None:
        """Takes what `CodistillModel.compile` was given."""
        self.loss, self.weight, self._task_loss = loss, weight, task_loss
        self._term = term_lib.DistillationTerm(
            loss, task_loss=task_loss, output_names=output_names, **options
        )

    def begin(self, *, validation_data: object, has_exporter: bool) -> None:
        """Takes what the `fit` that begins was given."""
        self.validation_data = validation_data
        self.has_exporter = has_exporter

    def forget(self) -> None:
        """Forgets an earlier training, whose versions are not of this one."""
        if self._student is None:
            return
        for held_out in self._student.held_out_losses.values():
            held_out.forget()
        for peer in self._peers:
            peer.forget()
        self._show()

    def attach(
        self,
        graph: student_graph.StudentGraph,
        strategy: tf.distribute.Strategy,
        last: steps.LastExecution,
    ) -> None:
        """Makes the teachers and their variables for one student, once.

        If the same student was compiled again, only what is frozen is updated.
        """
        if self._term:
            self._term.settle(graph.output_spec, graph.ends)
        if self._student is not None:
            if graph is not self._student.graph:
                raise RuntimeError(_ATTACHED.format(", ".join(self.names)))
            for peer in self._peers:
                peer.compiled_again()
            return
        losses = self._term.losses if self._term else ()
        scale.check_own_ends(graph.ends, losses)
        last.also["teacher_loss"] = math.nan
        if replicas.on_servers(strategy):
            self.remote = on_servers.RemoteTeachers(self._teachers)
        has_canaries = all(peer.canary is not None for peer in self._peers)
        student = self._student = teacher_lib.Student(
            graph,
            strategy,
            # As the last `compile` has it.
            weight=self.weight and (lambda step: self.weight(step)),
            losses=losses,
            last=last,
            names=self.names,
            yardstick=yardstick.of_task(self._task_loss),
            remote=self.remote,
            held_out=None
            if has_canaries
            else canary.of_validation(self.validation_data),
        )
        if student.yardstick and student.is_chief:
            self._reports = worth.Reports(student.yardstick)
        with strategy.scope():
            if not self.remote:
                self._standings = replicas.told(
                    student.strategy,
                    tf.zeros([len(self._teachers), 3], tf.float64),
                    name="standings",
                )
            for each in self._teachers:
                if each.is_attached:
                    raise RuntimeError(_ATTACHED.format(each.name))
                each.is_attached = True
                each.attach(student)
        self._values = replicas.WorkerValues(strategy)
        self._agreement = agreement.Agreement(
            student.strategy, [peer.follower for peer in self._peers]
        )
        self._show()

    # ---- in the step ----

    def checked_rows(self, agree_on: object) -> Any:
        """Returns which rows to ask about; ValueError if a teacher can't."""
        found = rows_lib.checked(agree_on)
        bound = [each.name for each in self if not each.answers_every_row]
        if bound and found != rows_lib.BATCH:
            raise ValueError(
                f"`agree_on` must be 'batch' beside {', '.join(bound)}, which "
                "may not have answers for other rows; received "
                f"{agree_on!r:.100}."
            )
        return found

    def term(
        self,
        tape: tf.GradientTape,
        step: tf.Tensor,
        batch: rows_lib.Rows,
        *,
        agree_on: object,
        run: Callable[[Any], tuple[Any, Any]],
        dtype: tf.DType | str,
        labels: Mapping[str, Any],
    ) -> term_lib.Term:
        """Asks the teachers about one replica's batch, and compares.

        `agree_on` and `run` are passed to `rows.asked`, `dtype` is the loss's,
        and `labels` are teachers' predictions that came with the batch. The
        teachers run in inference mode, and no gradient reaches them.
        """
        if not self._teachers or self._term is None or self.weight is None:
            nothing = {"teacher_staleness": tf.constant(float("nan"))}
            return term_lib.Term(None, tf.zeros([], dtype), nothing)
        rows = rows_lib.asked(agree_on, batch, run, step)
        with tape.stop_recording():
            weight = tf.cast(self.weight(step), dtype)
            soft = self.ask(
                teacher_lib.Batch(
                    inputs=rows.inputs,
                    outputs=rows.outputs,
                    labels=labels,
                    step=tf.cast(step, tf.int64),
                    losses=self._term.losses,
                ),
                active=weight > 0,
            )
            report = []
            if self._student.yardstick and rows.targets is not None:
                report = rows_lib.reported(
                    rows.targets,
                    rows.outputs,
                    rows.sample_weight,
                    soft.is_asked,
                    soft.outputs,
                )
        with losses_lib.at_step(tf.cast(step, tf.int64)), rows.count.scope():
            loss = self._term(soft, rows.taught, rows.sample_weight)
        weight *= tf.cast(soft.strength, dtype)
        logs = {
            "teacher_staleness": soft.staleness,
            **steps.hidden(rows_lib.REPORT, report),
            **steps.hidden(_TAUGHT, [soft.taught_rows]),
            **steps.hidden(_VERSIONS, [soft.steps]),
        }
        return term_lib.Term(loss, weight, logs)

    def ask(
        self, batch: teacher_lib.Batch, *, active: tf.Tensor
    ) -> soft_targets.SoftTargets:
        """Asks all teachers about one replica's batch, in inference mode.

        A teacher that is not in use costs nothing, and no gradient is kept.
        `active`, a bool scalar, is False to leave all teachers out.
        """
        known = self.remote.standings if self.remote else self._standings
        return soft_targets.ask(self._teachers, known, batch, active=active)

    # ---- between steps ----

    def count(self, step: int, *, begins: bool = False) -> None:
        """Notes which teachers counted in the steps up to one of the student.

        What counts changes only between steps, by calls of this class, each of
        which is preceded by this one. `begins` where a training does.
        """
        since, self._counted = step - self._counted, step
        if begins or since < 1 or self.weight is None:
            return
        if not float(self.weight(tf.constant(step - 1, tf.int64))) > 0:
            return
        for each in self._teachers:
            each.num_due += since
            counts = each.standing().share > 0 and not each.waits
            each.num_taught += since * counts

    def start(self) -> None:
        """Starts to look for versions in the background, or for messages."""
        for given in self._given:
            given.start()
        self._start_following()

    def _start_following(self) -> None:
        if self._student is None or not self._peers or self._following:
            return
        for held_out in self._student.held_out_losses.values():
            held_out.take()
        self._following = follower.Following(
            [peer.follower for peer in self._peers],
            proposes=self._student.is_chief,
            also=self._look_further,
        )
        self._following.start()

    def _look_further(self) -> None:
        if self._student.is_chief:
            for held_out in self._student.held_out_losses.values():
                held_out.look()
            for places in {peer.places for peer in self._peers}:
                places.look()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        for given in self._given:
            given.stop()
        self._stop_following()

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.stop()
            self._following = None

    def refresh(self, *, step: int | None = None) -> list[str]:
        """Lets the group agree on versions and swaps in what all have.

        Every worker calls it at the same step, once `fit` has made the
        teachers' variables. It neither reads files nor waits for them, except
        to load a graph that differs from the student's. By the student's step,
        teachers that have become too old are found. Returns the names of the
        teachers that were swapped.
        """
        if step is not None:
            self.count(step)
        for held_out in self._student.held_out_losses.values():
            held_out.take(step)
        self._read_report(step or 0)
        doubts = [each.doubt() for each in self._teachers]
        chiefs = self._agreement.chiefs
        news = self._agreement.exchange_news(
            bad=[count >= _MAX_BAD for count in self._num_bad],
            doubted=chiefs([bool(doubt) for doubt in doubts]),
            moves=chiefs([peer.next_group() for peer in self._peers]),
        )
        self._show_loss()
        for index, each in enumerate(self._teachers):
            is_doubted = news.sums["doubted"][index]
            self._doubt(each, (doubts[index] or _CHIEFS) if is_doubted else "")
            if news.sums["bad"][index]:
                self._num_bad[index] = 0
                each.drop(
                    "its outputs were NaN or infinite in the batches before "
                    f"{_MAX_BAD} refreshes in a row."
                )
        ready = self._load_graphs(news.ready)
        self._swap(ready, step)
        for index, peer in enumerate(self._peers):
            # All workers have the same in use, and have refused the same since
            # the news, so all announce the same.
            newest, follower = news.newest[index], peer.follower
            is_good = newest not in follower.rejected
            if is_good and newest > follower.current and follower.announced < 0:
                follower.announce(newest)
        for peer, group in zip(self._peers, news.sums["moves"], strict=True):
            if group >= 0:
                peer.follow(group)
        if not self.has_exporter:
            for each in self._teachers:
                each.exported(step or 0, {})
        for each in self._teachers:
            each.refresh(step)
        self._show()
        return [self._peers[index].label for index in ready]

    def _read_report(self, step: int) -> None:
        """Looks at what the last step reported on the versions in use."""
        last = self._student.last
        rows, versions = last.detail(_TAUGHT), last.detail(_VERSIONS)
        if rows is None or versions is None or rows is self._report:
            return
        self._report, shares = rows, np.asarray(rows[0])
        in_use = np.asarray(versions[0]) == [t.standing().step for t in self]
        report = last.detail(rows_lib.REPORT)
        if report and self._reports:
            indices = map(int, np.flatnonzero(in_use))
            wanted = {index: self._teachers[index] for index in indices}
            self._reports.read(report, wanted, step)
        for index in map(int, np.flatnonzero(in_use & ~np.isnan(shares))):
            each = self._teachers[index]
            # Rows that a peer did not send aren't a version's fault.
            is_bad = each.answers_every_row and each.weight > 0
            is_bad &= bool(shares[index] < 1)
            self._num_bad[index] = self._num_bad[index] + 1 if is_bad else 0

    def _show_loss(self) -> None:
        """Logs the mean task loss of the teachers in use; NaN for none."""
        found = [
            each.record.status()["teacher_loss"]
            for each in self._teachers
            if each.standing().share
        ]
        known = [loss for loss in found if loss is not None]
        loss = np.float32(np.mean(known) if known else np.nan)
        # Only the chief has found any.
        also = self._student.last.also
        also["teacher_loss"] = self._values.chiefs(float(loss))

    def _doubt(self, each: teacher_lib.Teacher, doubt: str) -> None:
        if doubt and not each.waits:
            _log.warning(
                "%s isn't used as a teacher until it publishes a better "
                "version: %s",
                each.label,
                doubt,
            )
        elif each.waits and not doubt:
            _log.info("%s is used as a teacher again.", each.label)
        each.waits = doubt

    def _load_graphs(self, ready: Sequence[int]) -> Sequence[int]:
        """Loads the graphs that versions need, on all workers or on none."""
        wanted = [i for i in ready if self._peers[i].needs_graph]
        if not wanted:
            return ready
        loaded = self._agreement.confirm(
            {i: self._peers[i].load_graph() for i in wanted}
        )
        return [i for i in ready if i not in wanted or i in loaded]

    def _swap(self, ready: Sequence[int], step: int | None = None) -> None:
        for index in ready:
            self.generation += self._peers[index].swap(step)
            self._num_bad[self._teachers.index(self._peers[index])] = 0
        if self.remote and ready:
            self.remote.swapped()

    def note_export(self, step: int, averages: Mapping[int, Any]) -> None:
        """Passes the student's present values to the teachers, as a version.

        Every worker calls it at the same step, whether or not the version is
        written. `averages` are the values it holds in place of weights, by the
        `id` of the weights.
        """
        self.count(step)
        for each in self._teachers:
            each.exported(step, averages)
        if self._student is not None:
            self._show()

    def _show(self) -> None:
        """Shows the traced step what the teachers count."""
        if self.remote:
            # Travels with each execution.
            self.remote.show()
        else:
            self._standings.assign(soft_targets.standings(self._teachers))

    def status(self) -> list[dict[str, Any]]:
        """Describes each teacher, for logs.

        Returns:
            For each teacher what its `Teacher.status` returned. For peers that
            send predictions, `step` is the last answer's, refused messages are
            counted as quarantined, and there are `num_answers`, `num_missed`
            (batches without an answer), `num_unsent`, `num_forged`,
            `sent_bytes`, and the number `refused` by kind. For labels, `share`
            is the share of the last step's rows that had a usable label.
        """
        if self._student is None:
            return []
        return [each.status() for each in self._teachers]

    # ---- for a backup ----

    @property
    def variables(self) -> list[tf.Variable]:
        """What backups keep of the teachers beside `state`."""
        return [v for each in self._teachers for v in each.variables]

    def state(self) -> dict[str, Any]:
        """Returns by name what each teacher keeps, as JSON."""
        return {
            each.name: {
                **each.state(),
                "on_trial": each.waits,
                "record": {"reports": each.record.reports.tolist()},
                "num_steps": [each.num_taught, each.num_due],
            }
            for each in self._teachers
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned, before training, as if just refreshed.

        Every worker calls it at the same point, once `fit` has made the
        teachers' variables: from `on_train_begin` on. It waits until all
        workers have read the versions that were in use. One that is gone,
        refused or cannot be read by all is left out, with a warning.
        """
        lost = sorted(set(state).difference(self.names))
        if lost:
            _log.warning("%s are no longer teachers.", ", ".join(lost))
        # The reading thread may be at another version.
        was_following = self._following is not None
        self._stop_following()
        # A version that was good enough then is good enough now.
        for held_out in self._student.held_out_losses.values():
            held_out.forget()
        wanted = {
            index: peer.recall(state[peer.name])
            for index, peer in enumerate(self._peers)
            if peer.name in state
        }
        if self._peers:
            self._swap(self._load_graphs(self._agreement.read(wanted)))
        for each in self._teachers:
            if (known := state.get(each.name)) is not None:
                each.restore(known)
                each.waits = known.get("on_trial", "")
                if "record" in known:
                    each.record = worth.Record(known["record"]["reports"])
                each.num_taught, each.num_due = known.get("num_steps", (0, 0))
        self._show_loss()
        if was_following:
            self._start_following()
        self._show()


def _chosen(
    given: list[teacher_lib.Teacher], chosen: method.Method | None
) -> list[teacher_lib.Teacher]:
    """Returns the teachers of a comparison's method, if there is one."""
    if chosen is None:
        return given
    if chosen.teachers == method.OWN_PAST:
        return [own_past.OwnPast()]
    if chosen.teachers == method.NOBODY:
        return []
    if chosen.teachers == method.PREDICTIONS:
        return [predictions.PeerPredictions()]
    kinds = peers_lib.Peers, predictions.PeerPredictions
    found = [each for each in given if isinstance(each, kinds)]
    return list(found or [peers_lib.Peers()])


def _give_names(teachers: Sequence[teacher_lib.Teacher]) -> None:
    """Numbers fixed teachers of one name; ValueError if a group comes twice."""
    taken: set[str] = set()
    for number, each in enumerate(teachers):
        if each.name in taken:
            if not isinstance(each, fixed.FixedTeacher):
                raise ValueError(
                    "Each teacher must have its own name; received "
                    f"{each.name!r} twice. Leave out one of them, or pass "
                    "`name`."
                )
            each.name = f"{each.name}_{number}"
        taken.add(each.name)
