"""Teachers whose predictions arrive by value: nothing of them is run here."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill import losses
from tfdistill.cluster import identity
from tfdistill.cluster import replicas
from tfdistill.exchange import publisher
from tfdistill.exports import student_graph
from tfdistill.labels import attached
from tfdistill.labels import forms
from tfdistill.predictions import mailbox
from tfdistill.system import run_files
from tfdistill.teachers import options as options_lib
from tfdistill.teachers import soft_targets
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher

if typing.TYPE_CHECKING:
    from tfdistill.labels import service

# What a step reports of each teacher: the share of rows that it taught; of
# labels, the newest version, and how many steps older it is than the student.
TAUGHT_ROWS, VERSION, AGE = "taught_rows", "label_version", "label_age_steps"

# Without an answer, after which a peer that is alive counts as absent.
_MOST_STEPS = 16
# Losses of outputs that are not one distribution over classes.
_OF_NUMBERS = (
    losses.BinarySoftTargetCrossEntropy,
    losses.LogitsMeanSquaredError,
)


class LabelTeacher(teacher.Teacher):
    """The place of a teacher whose predictions come with the data."""

    # What a parameter-server group asks of its teachers: it keeps nothing.
    half = 0
    worker_variables: tuple[Any, ...] = ()

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
        *,
        last: Callable[[str], float] = lambda what: math.nan,
        asker: "service.Teachers | None" = None,
    ) -> None:
        """Waits for labels.

        `last` says what the last step reported, and `asker` is what asks
        servers for the labels, if that is known.
        """
        super().__init__(name, graph, options)
        self._last = last
        self._asker = asker
        self._is_group = run_files.group_of(name) is not None

    def use(self, arguments: tf.Tensor) -> None:
        """Has nothing to fetch."""

    def ask(self, question: soft_targets.Question) -> list[tf.Tensor]:
        """Finds the labels of the batch; NaN where none counts."""
        label = self._label(question)
        count = attached.that_count(
            label,
            step=question.step,
            num_rows=tf.shape(question.outputs[0])[0],
        )
        # Of servers of other models, versions are any numbers.
        if self._is_group or "expires_step" in label:
            newest = attached.newest_version(label)
            count &= ~_is_burn_in(newest, question)
        return [
            _where(count, self._decoded(kept, like, loss))
            for kept, like, loss in zip(
                label["outputs"],
                question.outputs,
                question.losses,
                strict=True,
            )
        ]

    @property
    def status(self) -> dict[str, Any]:
        """Describes the labels of the last step, for logs."""
        rows, version = self._last(TAUGHT_ROWS), self._last(VERSION)
        asked = self._asker.status() if self._asker else None
        found = super().status
        if not math.isnan(version):
            age = int(self._last(AGE))
            found.update(step=int(version), age_steps=age)
        if not math.isnan(rows):
            found["share"] = rows
        if rows == 0:
            found["health"] = staleness.ABSENT
            found["reason"] = "no row has a label that counts"
            step = found["step"]
            if step >= 0 and self.weight is not None:
                if staleness.in_burn_in(self.weight, step):
                    found["health"] = staleness.BURN_IN
                    found["reason"] = staleness.burn_in_reason(step)
        if asked:
            found |= {
                "num_answers": asked["batches"] - asked["absent_batches"],
                "num_missed": asked["absent_batches"],
                "num_quarantined": sum(asked["refused"].values()),
            }
        if asked and rows == 0:
            found["reason"] += "".join(
                f"; {server['address']}: {server['problem']}"
                for server in asked["servers"]
                if server["problem"]
            )
        return found

    def _label(self, question: soft_targets.Question) -> Any:
        label = question.labels.get(self.name)
        if label is None:
            raise ValueError(
                f"The data must carry labels of the teacher {self.name!r}; "
                f"received those of {sorted(question.labels)}. Map the data "
                "set with tfdistill.labels, or leave the name out of "
                "TeacherSet(labels=...)."
            )
        if len(label["outputs"]) != len(question.outputs):
            raise ValueError(
                f"The labels of {self.name!r} must have the student's "
                f"{len(question.outputs)} outputs; received "
                f"{len(label['outputs'])}."
            )
        if label["version"].shape.rank != 1:
            raise ValueError(
                f"The labels of {self.name!r} must have one version for each "
                f"row of a batch; received {label['version'].shape}. Label "
                "batches: call `batch` first, and once."
            )
        return label

    def _decoded(
        self, kept: Any, like: tf.Tensor, loss: losses.DistillationLoss | None
    ) -> tf.Tensor:
        if "whole" not in kept:
            _check_classes(self.name, loss)
        form = _form_for(loss, forms.Form())
        output = form.decode(kept, num_classes=like.shape[-1])
        if not output.shape.is_compatible_with(like.shape):
            raise ValueError(
                f"The labels of {self.name!r} must have the shape of the "
                f"student's output, {like.shape}; received {output.shape}."
            )
        return output


class Swap:
    """Predictions for predictions of the same batch, with all peers at once."""

    def __init__(
        self,
        exchange: publisher.Exchange,
        options: options_lib.TeacherOptions,
        *,
        strategy: tf.distribute.Strategy,
        cluster: identity.Cluster,
    ) -> None:
        """Opens nothing yet."""
        local = tuple(replicas.local_replicas(strategy))
        self.mailbox = mailbox.Mailbox(
            exchange,
            mailbox.Place(
                group=cluster.group,
                worker=local[0] // len(local),
                replicas=local,
                host=(cluster.address or "").rpartition(":")[0].strip("[]"),
            ),
            peers=options.peers,
            others=cluster.peers,
            wait_secs=options.wait_secs,
        )
        self._options = options
        self._form = options.form or forms.Form()

    def teachers(
        self, graph: student_graph.StudentGraph
    ) -> Iterator["PredictionTeacher"]:
        """Makes a teacher of each peer."""
        for group, name in self._options.names_of_peers.items():
            yield PredictionTeacher(
                name, graph, self._options, group=group, mailbox=self.mailbox
            )

    def labels(
        self, question: soft_targets.Question, *, active: tf.Tensor
    ) -> dict[str, list[tf.Tensor]]:
        """Sends what the student has said of a batch, and waits for the peers.

        Outside the branches in which teachers are asked, which share nothing.
        By name of the teacher, its outputs; NaN if it does not answer.
        """
        names = self._options.names_of_peers.values()
        own = question.outputs
        said = tf.cond(
            active,
            lambda: self._said(question),
            lambda: [tf.zeros_like(o, tf.float32) for _ in names for o in own],
        )
        return {
            name: said[index * len(own) :][: len(own)]
            for index, name in enumerate(names)
        }

    def _said(self, question: soft_targets.Question) -> list[tf.Tensor]:
        own = question.outputs
        context = tf.distribute.get_replica_context()
        replica = context.replica_id_in_sync_group if context else 0
        seed = tf.stack(
            [tf.cast(question.step, tf.int32), tf.cast(replica, tf.int32)]
        )
        if not self._form.is_whole:
            for loss in question.losses:
                _check_classes("peers", loss)
        by_output = [_form_for(loss, self._form) for loss in question.losses]
        kept = [
            form.encode(output, seed=seed)
            for form, output in zip(by_output, own, strict=True)
        ]
        arrays = tf.nest.flatten(kept)
        peers = self.mailbox.learns_from
        # In this process, wherever the student runs. A function of Python:
        # nothing in a graph waits no longer than it should.
        answered, *received = tf.numpy_function(
            functools.partial(self._swap, tuple(map(_num_classes, own))),
            [question.step, replica, fingerprint(question.inputs), *arrays],
            [tf.bool, *[array.dtype for _ in peers for array in arrays]],
        )
        answered.set_shape([len(peers)])
        found = []
        for index in range(len(peers)):
            of_peer = received[index * len(arrays) :][: len(arrays)]
            for array, like in zip(of_peer, arrays, strict=True):
                array.set_shape(like.shape)
            found += [
                tf.where(
                    answered[index],
                    form.decode(part, num_classes=like.shape[-1]),
                    float("nan"),
                )
                for form, part, like in zip(
                    by_output,
                    tf.nest.pack_sequence_as(kept, of_peer),
                    own,
                    strict=True,
                )
            ]
        return found

    def _swap(
        self,
        classes: tuple[int, ...],
        step: np.ndarray,
        replica: np.ndarray,
        batch: np.ndarray,
        *arrays: np.ndarray,
    ) -> list[Any]:
        own = self.mailbox.send(
            step=int(step),
            replica=int(replica),
            batch=batch.tobytes(),
            classes=classes,
            arrays=arrays,
        )
        answers = self.mailbox.answers(own)
        received = [array for found in answers for array in found or arrays]
        return [np.array([found is not None for found in answers]), *received]


class PredictionTeacher(teacher.Teacher):
    """The place of a peer that sends what it predicts of the same batch."""

    def __init__(
        self,
        name: str,
        graph: student_graph.StudentGraph,
        options: options_lib.TeacherOptions,
        *,
        group: int,
        mailbox: mailbox.Mailbox,
    ) -> None:
        """Takes a peer, with which a `Swap` swaps predictions."""
        super().__init__(name, graph, options)
        self._group = group
        self._mailbox = mailbox

    def ask(self, question: soft_targets.Question) -> list[tf.Tensor]:
        """Takes this peer's part of what the swap has brought."""
        return question.labels[self.name]

    @property
    def status(self) -> dict[str, Any]:
        """Describes the peer, for logs: its answers in place of versions."""
        peer = self._mailbox.peer(self._group)
        age_steps = peer.last_asked - peer.last_answer
        answers = (
            peer.last_answer >= 0
            and not peer.is_silent
            and age_steps <= _MOST_STEPS
        )
        return {
            **super().status,
            "step": peer.last_answer,
            "health": staleness.GOOD if answers else staleness.ABSENT,
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
            # Of all peers: nobody knows whom they come from.
            "num_forged": sum(self._mailbox.num_forged.values()),
            "sent_bytes": peer.sent_bytes,
        }


def _is_burn_in(
    version: tf.Tensor, question: soft_targets.Question
) -> tf.Tensor:
    """Whether a version, NaN if unknown, was made in the burn-in, in graph.

    The student's own is over by now, so none that is ahead of it was.
    """
    if question.weight is None:
        return tf.constant(False)
    is_before = version < tf.cast(question.step, version.dtype)
    step = tf.cast(tf.where(is_before, version, 0.0), tf.int64)
    return is_before & tf.equal(question.weight(step), 0.0)


def _form_for(
    loss: losses.DistillationLoss | None, form: forms.Form
) -> forms.Form:
    """The form of an output, of which the loss says whether it is logits."""
    from_logits = loss is None or loss.from_logits is not False
    return dataclasses.replace(form, from_logits=from_logits)


def _check_classes(name: str, loss: losses.DistillationLoss | None) -> None:
    if isinstance(loss, _OF_NUMBERS):
        raise ValueError(
            f"The predictions of {name!r} must be whole for "
            f"{type(loss).__name__}, which compares each number by itself; "
            "received top classes or a sample of them. Leave `top_k` and "
            "`num_samples` out."
        )


def fingerprint(inputs: Any) -> tf.Tensor:
    """Returns a hash of a batch's inputs, uint8 `[8]`."""
    # Of the batch, not of each example as in labels/files.py: batches may have
    # ragged and sparse inputs, which have no bytes of an example.
    leaves = tf.nest.flatten(inputs, expand_composites=True)
    parts = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
    return tf.fingerprint(tf.concat(parts, axis=-1))[0]


def _num_classes(output: tf.Tensor) -> int:
    """The size of the last axis; 1 of an output with one number a row."""
    return int(output.shape[-1] or 0) if output.shape.rank > 1 else 1


def _where(count: tf.Tensor, output: tf.Tensor) -> tf.Tensor:
    """An output with NaN in the rows that do not count."""
    rows = tf.reshape(count, [-1, *[1] * (output.shape.rank - 1)])
    return tf.where(rows, output, float("nan"))
