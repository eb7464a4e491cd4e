"""Teachers of a parameter-server group: tables on servers, the rest on workers.

A teacher's tables lie in shards beside the student's, each with room for two
versions: one in use, one being read. Its dense weights are kept by every
worker, which fetches them once for each version. Which version and which half
are in force travels with each execution, so a swap stops nobody, and one
execution never mixes two versions.
"""

import contextlib
import time
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfdistill import remote_slot
from tfdistill import soft_targets
from tfdistill import student_graph
from tfdistill import teacher_options
from tfdistill import worker_variable

_FREE_TIMEOUT_SECS, _FREE_POLL_SECS = 600.0, 0.02
# What travels for each teacher: version, whether it is in use, which half, and
# what it counts by its age in seconds, in millionths.
_NUM_FIELDS, _SHARE_UNIT = 4, 1_000_000


class RemoteTeachers:
    """What the executions of a group need to know of its teachers."""

    def __init__(self, options: teacher_options.TeacherOptions) -> None:
        """Makes no slot yet.

        Args:
            options: Of the teachers.
        """
        self.state = soft_targets.TeacherState.of(
            options,
            shared=worker_variable.WorkerVariable,
            of_replica=worker_variable.WorkerVariable,
        )
        self.slots: list[remote_slot.RemoteSlot] = []
        self._max_bad_batches = options.max_bad_batches
        self._bad = np.zeros([options.num_teachers], bool)
        self._num_scheduled = self._num_done = 0
        self._swapped_at = 0

    def make_slot(
        self, name: str, graph: student_graph.StudentGraph
    ) -> remote_slot.RemoteSlot:
        """Makes the place of one more teacher, in the strategy's scope."""
        slot = remote_slot.RemoteSlot(
            name, graph, wait_until_free=self._wait_until_free
        )
        self.slots.append(slot)
        return slot

    # ---- on the coordinator ----

    def arguments(self) -> tf.Tensor:
        """Returns what the next execution is to use, int64 `[teachers, 4]`."""
        self._num_scheduled += 1
        return tf.constant(
            [
                [
                    slot.step,
                    int(slot.in_use),
                    slot.half,
                    round(slot.health.share_by_secs * _SHARE_UNIT),
                ]
                for slot in self.slots
            ],
            tf.int64,
            shape=[len(self.slots), _NUM_FIELDS],
        )

    def note(self, report: np.ndarray) -> None:
        """Takes what an execution reported, in the order of their scheduling.

        Args:
            report: What `reported` returned on the worker.
        """
        self._num_done += 1
        bad, steps = report.reshape(2, -1)
        for index, slot in enumerate(self.slots):
            if int(steps[index]) == slot.step and slot.in_use:
                self._bad[index] |= bad[index] >= self._max_bad_batches

    def sum(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Answers as `agreement.Agreement` does, for one coordinator."""
        bad, self._bad = self._bad, np.zeros_like(self._bad)
        return values, bad

    def swapped(self) -> None:
        """Notes that executions from now on use other versions."""
        self._swapped_at = self._num_scheduled

    def _wait_until_free(self) -> None:
        deadline = time.monotonic() + _FREE_TIMEOUT_SECS
        while self._num_done < self._swapped_at:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "An execution that uses the version before has not ended "
                    f"in {_FREE_TIMEOUT_SECS:g} s."
                )
            time.sleep(_FREE_POLL_SECS)

    # ---- on a worker ----

    @contextlib.contextmanager
    def on_worker(self, arguments: tf.Tensor) -> Iterator[None]:
        """Puts the versions of an execution in force while it is traced.

        Args:
            arguments: What `arguments` returned.
        """
        variables = [
            *self.state.variables,
            *(v for slot in self.slots for v in slot.worker_variables),
        ]
        with worker_variable.opened(variables):
            self.state.assign(
                steps=arguments[:, 0],
                in_use=arguments[:, 1] > 0,
                shares=arguments[:, 3] / _SHARE_UNIT,
            )
            for index, slot in enumerate(self.slots):
                slot.use(arguments[index])
            yield

    def reported(self) -> tf.Tensor:
        """Returns, at its end, what an execution has to say: float64."""
        steps = tf.convert_to_tensor(self.state.variables[0])
        return tf.cast(
            tf.concat([self.state.bad_in_a_row(), steps], axis=0), tf.float64
        )
