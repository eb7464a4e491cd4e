"""All teachers of one student: attached, asked, refreshed, and reported."""

import logging
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.cluster import method
from tfdistill.cluster import replicas
from tfdistill.exports import student_graph
from tfdistill.teachers import fixed
from tfdistill.teachers import followed
from tfdistill.teachers import on_servers
from tfdistill.teachers import output_kinds
from tfdistill.teachers import own_past
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import predictions
from tfdistill.teachers import reports
from tfdistill.teachers import rows as rows_lib
from tfdistill.teachers import scorer
from tfdistill.teachers import soft_targets
from tfdistill.teachers import teacher as teacher_lib
from tfdistill.teachers import term as term_lib
from tfdistill.training import steps

_log = logging.getLogger(__name__)
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
        peers: The teachers that teach by versions.
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
        self.peers = followed.FollowedPeers(self._teachers)
        self.loss: Any = None
        self.weight: Any = None
        self._term: term_lib.DistillationTerm | None = None
        self._student: Any = None
        self.remote: on_servers.RemoteTeachers | None = None
        self.generation = 0
        self.has_exporter = False
        self.validation_data: Any = None
        self._task_loss: Any = None
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
    def swaps_predictions(self) -> bool:
        """Whether peers teach by what they predict in the same step."""
        return self._has(predictions.PredictedPeer)

    @property
    def follows_peers(self) -> bool:
        """Whether other groups teach, by versions or by predictions."""
        return bool(self.peers) or self.swaps_predictions

    @property
    def are_trained(self) -> bool:
        """Whether some change while the student trains."""
        return self.follows_peers or self._has(own_past.OwnPast)

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

    def begin_fit(self, *, validation_data: object, has_exporter: bool) -> None:
        """Takes what the `fit` that begins was given."""
        self.validation_data = validation_data
        self.has_exporter = has_exporter

    def forget(self) -> None:
        """Forgets an earlier training, whose versions are not of this one."""
        if self._student is None:
            return
        self.peers.forget_student()
        for peer in self.peers:
            peer.forget()
        self._shown.show()

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
            for peer in self.peers:
                peer.compiled_again()
            return
        losses = self._term.losses if self._term else ()
        output_kinds.check_own_ends(graph.ends, losses)
        if replicas.on_servers(strategy):
            self.remote = on_servers.RemoteTeachers(self._teachers)
        student = self._student = teacher_lib.Student(
            graph,
            strategy,
            # As the last `compile` has it.
            weight=self.weight and (lambda step: self.weight(step)),
            losses=losses,
            last=last,
            names=self.names,
            scorer=scorer.of_task(self._task_loss),
            remote=self.remote,
            held_out=self.peers.canary_in(self.validation_data),
        )
        self._reports = reports.Reports(self._teachers, student)
        with strategy.scope():
            self._shown = self.remote or soft_targets.Shown(
                self._teachers, student.strategy
            )
            for each in self._teachers:
                if each.is_attached:
                    raise RuntimeError(_ATTACHED.format(each.name))
                each.is_attached = True
                each.attach(student)
        self._values = replicas.WorkerValues(strategy)
        self.peers.attached(student)
        self._shown.show()

    # ---- in the step ----

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
            if self._student.scorer:
                report = rows_lib.reported(rows, soft.is_asked, soft.outputs)
        return self._term.compared(soft, rows, step, weight, report)

    def ask(
        self, batch: teacher_lib.Batch, *, active: tf.Tensor
    ) -> soft_targets.SoftTargets:
        """Asks all teachers about one replica's batch, in inference mode.

        A teacher that is not in use costs nothing, and no gradient is kept.
        `active`, a bool scalar, is False to leave all teachers out.
        """
        known = self._shown.standings
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
        self.peers.start()

    def stop(self) -> None:
        """Stops looking; waits for a read in progress, 30 s at most."""
        for given in self._given:
            given.stop()
        self.peers.stop()

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
        self.peers.note_student(step)
        self._reports.read(step or 0)
        doubts = [each.doubt() for each in self]
        chiefs = self.peers.agreement.chiefs
        news = self.peers.agreement.exchange_news(
            bad=[each.num_bad >= _MAX_BAD for each in self],
            doubted=chiefs([bool(doubt) for doubt in doubts]),
            moves=chiefs([peer.next_group() for peer in self.peers]),
            loss=chiefs([replicas.bits(self._reports.mean_loss())]),
        )
        self._reports.show_loss(replicas.from_bits(news.sums["loss"])[0])
        for each, doubt, is_doubted, is_bad in zip(
            self, doubts, news.sums["doubted"], news.sums["bad"], strict=True
        ):
            each.set_doubt((doubt or _CHIEFS) if is_doubted else "")
            if is_bad:
                each.num_bad = 0
                each.drop(
                    "its outputs were NaN or infinite in the batches before "
                    f"{_MAX_BAD} refreshes in a row."
                )
        labels = self._swapped(self.peers.use(news.ready, step))
        self.peers.agreement.announce(news.newest)
        self.peers.move(news.sums["moves"])
        if not self.has_exporter:
            for each in self:
                each.exported(step or 0, {})
        for each in self:
            each.refresh(step)
        self._shown.show()
        return labels

    def _swapped(self, swaps: Mapping[peers_lib.Peer, bool]) -> list[str]:
        """Notes which peers use another version, and whether of other graphs.

        Returns what logs call them.
        """
        self.generation += sum(swaps.values())
        for peer in swaps:
            peer.num_bad = 0
        if self.remote and swaps:
            self.remote.swapped()
        return [peer.label for peer in swaps]

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
            self._shown.show()

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
        return {each.name: each.kept() for each in self._teachers}

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
        was_following = self.peers.stop()
        self._swapped(self.peers.recall(state))
        for each in self._teachers:
            if (known := state.get(each.name)) is not None:
                each.take_kept(known)
        loss = self._values.chiefs(self._reports.mean_loss())
        self._reports.show_loss(loss)
        if was_following:
            self.peers.start()
        self._shown.show()


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
