"""Scheduled work of a parameter-server group: a short window of it in flight.

The coordinator keeps every worker busy with a few executions and takes their
results in the order in which they were scheduled. An execution counts once,
when its result has arrived: one that was cut short by a lost worker is run
again elsewhere, with the same step numbers, and still counts once.
"""

import collections
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# Enough that a worker finds its next execution waiting, and few enough that
# callbacks see the training as it stands.
_IN_FLIGHT_PER_WORKER = 2


class Executions:
    """Schedules functions on the workers and yields what they return."""

    def __init__(self, coordinator: Any, *, num_workers: int) -> None:
        """Schedules nothing yet.

        Args:
            coordinator: A `tf.distribute.coordinator.ClusterCoordinator`.
            num_workers: Number of workers.
        """
        self._coordinator = coordinator
        self.limit = _IN_FLIGHT_PER_WORKER * num_workers
        self._pending: collections.deque[Any] = collections.deque()

    def __len__(self) -> int:
        return len(self._pending)

    def schedule(
        self, function: Any, args: Sequence[Any], *, tag: Any = None
    ) -> None:
        """Schedules one call on any worker.

        Args:
            function: A `tf.function` or its concrete function.
            args: Its arguments; per-worker iterators may be among them.
            tag: Returned with the result.
        """
        result = self._coordinator.schedule(function, args=tuple(args))
        self._pending.append((tag, result))

    def oldest(self) -> tuple[Any, Any]:
        """Waits for the oldest call.

        Returns:
            Its tag, and its result on this task.

        Raises:
            Exception: What a call raised, whichever it was; all others are
                cancelled.
        """
        tag, pending = self._pending.popleft()
        try:
            return tag, pending.get()
        except Exception:
            # It may only have been cancelled for the sake of another: what
            # went wrong first is what `join` raises.
            self._pending.clear()
            self._coordinator.join()
            raise

    def run(
        self, function: Callable[..., Any], arguments: Sequence[Sequence[Any]]
    ) -> Iterator[Any]:
        """Calls a function once for each of `arguments`.

        Args:
            function: A `tf.function`.
            arguments: The arguments of each call.

        Yields:
            The results, in order.
        """
        for args in arguments:
            self.schedule(function, args)
        while self._pending:
            yield self.oldest()[1]

    def cancel(self) -> None:
        """Forgets what is in flight; waits until it has ended.

        An error among it is not raised: another is on its way already.
        """
        self._pending.clear()
        try:
            self._coordinator.join()
        except Exception as error:  # Whatever a user's function raises.
            tf.get_logger().debug("While leaving: %s", error)
