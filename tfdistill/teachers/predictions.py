"""The other groups as teachers, by what they predict of the same batch.

All groups read the same batches in the same order, and send each other their
predictions in each step (Anil et al. 2018, section 2.1, discuss it as the
alternative to exchanging checkpoints). Nothing of a peer is run here.
"""

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.cluster import replicas
from tfdistill.exchange import publisher
from tfdistill.follow import follower
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.predictions import mailbox as mailbox_lib
from tfdistill.system import run_files
from tfdistill.teachers import labels
from tfdistill.teachers import peers as peers_lib
from tfdistill.teachers import teacher

# Without an answer, after which a peer that is alive counts as absent.
_MOST_STEPS = 16


class PeerPredictions(teacher.Teacher):
    """Exchanges predictions for the same batch with all peers.

    All groups must read `data.group_shard(..., mode="coordinated")`. A step
    waits for its peers for at most `wait_secs`, and continues without missing
    predictions. XLA cannot compile such a step.

    It can't run under parameter servers, where each worker is at its own step.

    Example:
        >>> PeerPredictions(wait_secs=0.1).name
        'peer_predictions'
    """

    def __init__(
        self,
        exchange: publisher.Exchange | None = None,
        *,
        peers: Sequence[int] | None = None,
        weight: float = 1.0,
        wait_secs: float = 0.05,
        encoding: forms.Form | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            exchange: Where groups find each other's addresses. Default: the
                environment's.
            peers: Groups to learn from, which must learn from this one.
                Default: all others of the run.
            weight: Weight of each peer, >= 0. Default 1.
            wait_secs: The longest wait of a step for the predictions of its
                peers, >= 0. Default 0.05.
            encoding: What is sent of predictions: a `tfdistill.labels.Form`.
                Default: all, in float32.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(weight=weight)
        if exchange is not None:
            publisher.check_exchange(exchange)
        if not 0 <= wait_secs < math.inf:
            raise ValueError(
                f"`wait_secs` must be finite and >= 0; received {wait_secs}."
            )
        if encoding is not None and not isinstance(encoding, forms.Form):
            raise ValueError(
                "`encoding` must be a tfdistill.labels.Form; received "
                f"{encoding!r}."
            )
        self.exchange: Any = exchange
        self._peers = None if peers is None else follower.checked_groups(peers)
        self._wait_secs = wait_secs
        self._encoding = encoding or forms.Form()
        # Made when the first peer is attached.
        self.mailbox: Any = None
        # By replica, the last step and what peers said of its batch.
        self._answers: dict[int, tuple[int, list[Any]]] = {}

    def members(self, cluster: identity.Cluster) -> Sequence[teacher.Teacher]:
        """Returns a teacher for each group."""
        self._cluster = cluster
        groups = cluster.peers if self._peers is None else self._peers
        self.exchange = peers_lib.exchange_for(self.exchange, groups, cluster)
        self._groups = follower.checked_groups(groups, own=cluster.group)
        return [PredictedPeer(group, self) for group in groups]

    def attach(self, student: teacher.Student) -> None:
        """Makes the mailbox; the first of the peers asks for it."""
        if self.mailbox is not None:
            return
        if student.on_servers:
            raise ValueError(
                "Peers teach by their predictions of the same batch, which "
                "workers of parameter servers don't have: each is at its own "
                "step. Received PeerPredictions. Learn from versions with "
                "teachers.Peers(), or from servers' labels with "
                "teachers.LabelTeacher(...)."
            )
        cluster = self._cluster
        local = tuple(replicas.local_replicas(student.strategy))
        self._locks = {replica: threading.Lock() for replica in local}
        self.mailbox = mailbox_lib.Mailbox(
            self.exchange,
            group=cluster.group,
            worker=local[0] // len(local),
            replicas=local,
            host=(cluster.address or "").rpartition(":")[0].strip("[]"),
            peers=self._groups,
            wait_secs=self._wait_secs,
        )

    def start(self) -> None:
        """Opens the mailbox."""
        self._answers.clear()
        if self.mailbox is not None:
            self.mailbox.start()

    def stop(self) -> None:
        """Closes the mailbox."""
        if self.mailbox is not None:
            self.mailbox.stop()

    # ---- in the step ----

    def answer(self, batch: teacher.Batch, group: int) -> list[tf.Tensor]:
        """Returns what a peer says of a batch; NaN if it says nothing.

        The first peer that is asked sends the student's predictions for the
        batch, and waits for all.
        """
        own = batch.flat
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context else 0
        if self._encoding.top_k is not None:
            for loss in batch.losses:
                labels.check_classes("peers", loss)
        used = [labels.form_for(loss, self._encoding) for loss in batch.losses]
        kept = [f.encode(o) for f, o in zip(used, own, strict=True)]
        arrays, classes = tf.nest.flatten(kept), tuple(map(_num_classes, own))
        # In this process, wherever the student runs. A function of Python:
        # nothing in a graph waits no longer than it should.
        answers, *received = tf.numpy_function(
            functools.partial(self._swap, self._groups.index(group), classes),
            [batch.step, replica, attached.fingerprint(batch.inputs), *arrays],
            [tf.bool, *[array.dtype for array in arrays]],
        )
        answers.set_shape([])
        for array, like in zip(received, arrays, strict=True):
            array.set_shape(like.shape)
        parts = tf.nest.pack_sequence_as(kept, received)
        said = [
            form.decode(part, num_classes=like.shape[-1])
            for form, part, like in zip(used, parts, own, strict=True)
        ]
        return [tf.where(answers, output, float("nan")) for output in said]

    def _swap(
        self,
        index: int,
        classes: tuple[int, ...],
        step: np.ndarray,
        replica: np.ndarray,
        batch: np.ndarray,
        *arrays: np.ndarray,
    ) -> list[Any]:
        with self._locks[int(replica)]:
            of_step, answers = self._answers.get(int(replica), (-1, []))
            if of_step != step:
                own = self.mailbox.send(
                    step=int(step),
                    replica=int(replica),
                    batch=batch.tobytes(),
                    classes=classes,
                    arrays=arrays,
                )
                answers = self.mailbox.answers(own)
                self._answers[int(replica)] = int(step), answers
        found = answers[index]
        return [np.array(found is not None), *(found or arrays)]


class PredictedPeer(teacher.Teacher):
    """One other group: what it has sent, and whether it answers."""

    # Rows that a peer did not send aren't a version's fault.
    answers_every_row = False

    def __init__(self, group: int, swap: PeerPredictions) -> None:
        """Takes a peer, with which `swap` swaps predictions."""
        super().__init__(name=run_files.group_name(group), weight=swap.weight)
        self.group, self.exchange = group, swap.exchange
        self._swap = swap

    def attach(self, student: teacher.Student) -> None:
        """Makes the mailbox that all peers share, once."""
        self._swap.attach(student)

    def ask(self, batch: teacher.Batch) -> list[tf.Tensor]:
        """Takes what it says of the same batch."""
        return self._swap.answer(batch, self.group)

    def doubt(self) -> str:
        """Returns why it should not count, by the student's batches, or ""."""
        return self.score.doubt(self.label, self.waits)

    def status(self) -> dict[str, Any]:
        """Describes the peer, for logs: its answers in place of versions."""
        peer = self._swap.mailbox.peer(self.group)
        age_steps = peer.last_asked - peer.last_answer
        answers = (
            peer.last_answer >= 0
            and not peer.is_silent
            and age_steps <= _MOST_STEPS
        )
        return {
            **super().status(),
            "step": peer.last_answer,
            "health": teacher.GOOD if answers else teacher.ABSENT,
            "reason": "" if answers else f"it sends no predictions: {peer.why}",
            "share": float(answers),
            "age_steps": age_steps if answers else None,
            "bytes": peer.received_bytes,
            "last_bytes": peer.last_bytes,
            "num_quarantined": sum(peer.num_refused.values()),
            "quarantined": dict(peer.refused),
            "refused": dict(peer.num_refused),
            "num_answers": peer.num_answers,
            "num_missed": peer.num_missed,
            "num_unsent": peer.num_unsent,
            # Summed over all peers: their senders are unknown.
            "num_forged": sum(self._swap.mailbox.num_forged.values()),
            "sent_bytes": peer.sent_bytes,
        }


def _num_classes(output: tf.Tensor) -> int:
    """The size of the last axis; 1 of an output with one number a row."""
    return int(output.shape[-1] or 0) if output.shape.rank > 1 else 1
