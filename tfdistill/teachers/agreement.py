"""What the workers of a group decide on their teachers, all alike."""

import logging
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.teachers import peer
from tfdistill.teachers import slot as teacher_slot

_log = logging.getLogger(__name__)
# What workers say of each teacher: the version proposed, whether theirs is
# read, whether it failed, and what the one in use counts by its seconds.
NUM_FIELDS = 4
# Sums are of whole numbers.
_SHARE_UNIT = 1_000_000
# How long storage that fails is tried for a version that was asked for, and the
# time between two tries.
_READ_TIMEOUT_SECS, _RETRY_SECS = 60.0, 0.2


class Agreement:
    """One small collective: sums over workers, and over replicas."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        replica_values: Callable[[], tf.Tensor],
        *,
        size: int,
    ) -> None:
        """Traces nothing yet.

        Args:
            strategy: The strategy in use.
            replica_values: Returns each replica's int64 vector, in graph.
            size: Length of the workers' vector.
        """
        self._strategy = strategy
        self._replica_values = replica_values
        num_workers = replicas.num_workers(strategy)
        num_local = strategy.num_replicas_in_sync // num_workers

        def in_replica(values: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            first = context.replica_id_in_sync_group % num_local == 0
            both = tf.concat(
                [
                    tf.where(first, values, tf.zeros_like(values)),
                    tf.cast(self._replica_values(), tf.int64),
                ],
                axis=0,
            )
            return context.all_reduce(tf.distribute.ReduceOp.SUM, both)

        @tf.function(input_signature=[tf.TensorSpec([size], tf.int64)])
        def summed(values: tf.Tensor) -> tf.Tensor:
            return strategy.run(in_replica, args=(values,))

        self._summed = summed
        self._size = size

    def sum(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums over the group; every worker must call it at the same step.

        Args:
            values: This worker's int64 vector of length `size`.

        Returns:
            The sum over the workers and the sum of the replicas' vectors.
        """
        result = self._summed(tf.constant(values, tf.int64))
        local = self._strategy.experimental_local_results(result)[0].numpy()
        return local[: self._size], local[self._size :]


class Decisions:
    """What a group decides on its teachers; every worker calls at one step."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        slots: Sequence[teacher_slot.TeacherSlot],
        agreement: Any,
    ) -> None:
        """Traces nothing yet.

        Args:
            strategy: The strategy in use.
            slots: The teachers, in the same order on all workers.
            agreement: Sums what the workers say, as `Agreement` does:
                `NUM_FIELDS` numbers for each teacher, and for each whether a
                replica wants to be rid of it.
        """
        self._slots = slots
        self._strategy = strategy
        self._num_workers = replicas.num_workers(strategy)
        self._proposes = replicas.is_chief(strategy)
        self._agreement = agreement

    def _no_news(self) -> np.ndarray:
        return np.zeros([NUM_FIELDS, len(self._slots)], np.int64)

    def drop_bad(self, reason: str) -> list[teacher_slot.TeacherSlot]:
        """Exchanges news, drops bad teachers, and finds what may be swapped.

        The chief's clock decides what a version counts by its seconds.

        Args:
            reason: Why a teacher is dropped, for the log.

        Returns:
            The teachers whose next version every worker has read.
        """
        news = self._no_news()
        for index, slot in enumerate(self._slots):
            if slot.reader:
                state = slot.reader.state
                if self._proposes:
                    share = slot.health.measured_share_by_secs()
                    news[0, index] = slot.reader.proposal + 1
                    news[3, index] = round(share * _SHARE_UNIT)
                news[1, index] = state == peer.READY
                news[2, index] = state == peer.FAILED
        summed, bad = self._agreement.sum(news.reshape(-1))
        proposals, ready, failed, shares = summed.reshape(NUM_FIELDS, -1)
        for index, slot in enumerate(self._slots):
            if bad[index]:
                slot.drop(reason)
            if not slot.reader:
                continue
            slot.health.share_by_secs = float(shares[index]) / _SHARE_UNIT
            if failed[index]:
                slot.reader.reject(slot.reader.announced)
            if slot.reader.announced < 0 and proposals[index] > 0:
                slot.reader.announce(int(proposals[index]) - 1)
        return [
            slot
            for index, slot in enumerate(self._slots)
            if slot.reader and ready[index] == self._num_workers
        ]

    def load_graphs(
        self, slots: Sequence[teacher_slot.TeacherSlot]
    ) -> list[teacher_slot.TeacherSlot]:
        """Loads graphs where versions need others; all workers, or none.

        Args:
            slots: What `drop_bad` returned.

        Returns:
            Those of `slots` that can be swapped on every worker.
        """
        if not any(slot.needs_graph for slot in slots):
            return list(slots)
        news = self._no_news()
        reasons = {}
        for index, slot in enumerate(self._slots):
            if slot in slots and slot.needs_graph:
                reasons[slot.name] = slot.load_graph(self._strategy)
                news[0, index] = reasons[slot.name] is not None
        summed, _ = self._agreement.sum(news.reshape(-1))
        usable = []
        for index, slot in enumerate(self._slots):
            if slot in slots and not summed[index]:
                usable.append(slot)
            elif slot in slots and slot.reader:
                slot.reader.reject(
                    slot.reader.announced, reasons.get(slot.name)
                )
        return usable

    def read(self, wanted: Mapping[str, int]) -> list[teacher_slot.TeacherSlot]:
        """Has every worker read the versions that the chief asks for.

        It waits for the reads, so it is for the time before training.

        Args:
            wanted: Versions by the names of teachers; what the chief says
                counts.

        Returns:
            The teachers whose version every worker has read.
        """
        news = self._no_news()
        for index, slot in enumerate(self._slots):
            if self._proposes:
                news[0, index] = wanted.get(slot.name, -1) + 1
        proposals, _ = self._agreement.sum(news.reshape(-1))
        news = np.zeros_like(news)
        for index, slot in enumerate(self._slots):
            if slot.reader and proposals[index] > 0:
                slot.reader.announce(int(proposals[index]) - 1)
                state = _read_now(slot.reader)
                news[1, index] = state == peer.READY
                news[2, index] = state == peer.FAILED
        summed, _ = self._agreement.sum(news.reshape(-1))
        _, ready, failed, _ = summed.reshape(NUM_FIELDS, -1)
        usable = []
        for index, slot in enumerate(self._slots):
            if not slot.reader or proposals[index] <= 0:
                continue
            if ready[index] == self._num_workers:
                usable.append(slot)
                continue
            _log.warning(
                "The version %d of the teacher %s, which was in use before, "
                "is left out: %d of %d workers could read it.",
                slot.reader.announced,
                slot.name,
                ready[index],
                self._num_workers,
            )
            if failed[index]:
                slot.reader.reject(slot.reader.announced)
            slot.reader.announce(-1)
        return self.load_graphs(usable)


def _read_now(reader: peer.PeerReader) -> int:
    """Reads what was announced, here and now; returns the reader's state."""
    deadline = time.monotonic() + _READ_TIMEOUT_SECS
    while True:
        reader.stage()
        if reader.state != peer.PENDING or time.monotonic() > deadline:
            return reader.state
        time.sleep(_RETRY_SECS)
