"""What the workers of a group decide about their teachers, all alike."""

import logging
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.teachers import peer
from tfdistill.teachers import staleness
from tfdistill.teachers import teacher as teacher_lib

_log = logging.getLogger(__name__)
# What workers say of each teacher: the version proposed, whether theirs is
# read, whether it failed; and the chief's verdict on the one in use (two
# numbers), and whether the one that was read is worse than the student.
NUM_FIELDS = 6
# How long storage that fails is tried for a version that was asked for, and the
# time between two tries.
_READ_TIMEOUT_SECS, _RETRY_SECS = 60.0, 0.2

# Sums the workers' int64 vectors, and the vectors that their replicas have;
# every worker calls it at the same step.
Sum = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def collective_sum(
    strategy: tf.distribute.Strategy,
    replica_values: Callable[[], tf.Tensor],
    *,
    size: int,
) -> Sum:
    """Makes one small collective for workers' vectors of length `size`.

    `replica_values` returns each replica's int64 vector, in graph.
    """
    num_local = strategy.num_replicas_in_sync // replicas.num_workers(strategy)

    def in_replica(values: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        first = context.replica_id_in_sync_group % num_local == 0
        both = tf.concat(
            [
                tf.where(first, values, tf.zeros_like(values)),
                tf.cast(replica_values(), tf.int64),
            ],
            axis=0,
        )
        return context.all_reduce(tf.distribute.ReduceOp.SUM, both)

    @tf.function(input_signature=[tf.TensorSpec([size], tf.int64)])
    def summed(values: tf.Tensor) -> tf.Tensor:
        return strategy.run(in_replica, args=(values,))

    def sum_over_group(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        result = summed(tf.constant(values, tf.int64))
        local = strategy.experimental_local_results(result)[0].numpy()
        return local[:size], local[size:]

    return sum_over_group


class Agreement:
    """Moves the teachers of all workers alike; all call at the same step."""

    def __init__(
        self,
        teachers: Sequence[teacher_lib.Teacher],
        sum_over_group: Sum,
        *,
        num_workers: int,
        is_chief: bool,
    ) -> None:
        """Takes the teachers, in the same order on all workers.

        `sum_over_group` gets `NUM_FIELDS` numbers for each teacher, and has
        for each how many replicas want to be rid of it.
        """
        self._teachers = teachers
        self._sum = sum_over_group
        self._num_workers = num_workers
        self._is_chief = is_chief

    def _no_news(self) -> np.ndarray:
        return np.zeros([NUM_FIELDS, len(self._teachers)], np.int64)

    def exchange_news(self, bad: str) -> list[teacher_lib.Teacher]:
        """Agrees on verdicts and versions; drops bad teachers, for the reason.

        Returns the teachers whose next version every worker has read. Verdicts
        are the chief's.
        """
        news = self._no_news()
        for index, teacher in enumerate(self._teachers):
            if self._is_chief:
                news[3:5, index] = teacher.found.encoded()
                news[5, index] = teacher.found_next_worse
            if teacher.reader:
                state = teacher.reader.state
                if self._is_chief:
                    news[0, index] = teacher.reader.proposal + 1
                news[1, index] = state == peer.READY
                news[2, index] = state == peer.FAILED
        summed, is_bad = self._sum(news.reshape(-1))
        news = summed.reshape(NUM_FIELDS, -1)
        proposals, ready, failed = news[:3]
        for index, teacher in enumerate(self._teachers):
            if is_bad[index]:
                teacher.drop(bad)
            teacher.verdict = staleness.decoded(news[3, index], news[4, index])
            teacher.next_is_worse = bool(news[5, index])
            if not teacher.reader:
                continue
            if failed[index]:
                teacher.reader.reject(teacher.reader.announced)
            if teacher.reader.announced < 0 and proposals[index] > 0:
                teacher.reader.announce(int(proposals[index]) - 1)
        return [
            teacher
            for index, teacher in enumerate(self._teachers)
            if teacher.reader and ready[index] == self._num_workers
        ]

    def load_graphs(
        self, teachers: Sequence[teacher_lib.Teacher]
    ) -> list[teacher_lib.Teacher]:
        """Loads the graphs that versions need, on all workers or on none.

        Returns those of `teachers` that can be swapped on every worker.
        """
        if not any(teacher.needs_graph for teacher in teachers):
            return list(teachers)
        news = self._no_news()
        reasons = {}
        for index, teacher in enumerate(self._teachers):
            if teacher in teachers and teacher.needs_graph:
                reasons[teacher.name] = teacher.load_graph()
                news[0, index] = reasons[teacher.name] is not None
        summed, _ = self._sum(news.reshape(-1))
        usable = []
        for index, teacher in enumerate(self._teachers):
            if teacher in teachers and not summed[index]:
                usable.append(teacher)
            elif teacher in teachers and teacher.reader:
                teacher.reader.reject(
                    teacher.reader.announced, reasons.get(teacher.name)
                )
        return usable

    def read_versions(
        self, wanted: Mapping[str, int]
    ) -> list[teacher_lib.Teacher]:
        """Has every worker read the versions that the chief asks for.

        By the names of teachers. It waits for the reads, so it is for the
        time before training. Returns the teachers that can be swapped.
        """
        news = self._no_news()
        for index, teacher in enumerate(self._teachers):
            if self._is_chief:
                news[0, index] = wanted.get(teacher.name, -1) + 1
        proposals, _ = self._sum(news.reshape(-1))
        news = np.zeros_like(news)
        for index, teacher in enumerate(self._teachers):
            if teacher.reader and proposals[index] > 0:
                teacher.reader.announce(int(proposals[index]) - 1)
                state = _read_now(teacher.reader)
                news[1, index] = state == peer.READY
                news[2, index] = state == peer.FAILED
        summed, _ = self._sum(news.reshape(-1))
        _, ready, failed = summed.reshape(NUM_FIELDS, -1)[:3]
        usable = []
        for index, teacher in enumerate(self._teachers):
            if not teacher.reader or proposals[index] <= 0:
                continue
            if ready[index] == self._num_workers:
                usable.append(teacher)
                continue
            _log.warning(
                "The version %d of the teacher %s, which was in use before, "
                "is left out: %d of %d workers could read it.",
                teacher.reader.announced,
                teacher.name,
                ready[index],
                self._num_workers,
            )
            if failed[index]:
                teacher.reader.reject(teacher.reader.announced)
            teacher.reader.announce(-1)
        return self.load_graphs(usable)


def _read_now(reader: peer.PeerReader) -> int:
    """Reads what was announced, here and now; returns the reader's state."""
    deadline = time.monotonic() + _READ_TIMEOUT_SECS
    while True:
        reader.stage()
        if reader.state != peer.PENDING or time.monotonic() > deadline:
            return reader.state
        time.sleep(_RETRY_SECS)
