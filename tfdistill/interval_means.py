"""The mean of the last steps, out of means that go on for an epoch."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any


class IntervalMeans:
    """Takes the steps before an interval out of Keras' means since the epoch.

    A mean over an epoch hides what changes late in it.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Has seen nothing yet.

        Args:
            names: Names of logs that are means over the epoch's steps.
        """
        self._names = list(names)
        self._before: tuple[int, dict[str, float]] | None = None

    def begin(self, num_done: int) -> None:
        """Begins an epoch, or goes on in its middle.

        Args:
            num_done: Steps of the epoch that the means hold already.
        """
        nothing = dict.fromkeys(self._names, 0.0)
        self._before = (0, nothing) if num_done == 0 else None

    def take(
        self, logs: Mapping[str, Any], *, num_done: int
    ) -> dict[str, float]:
        """Returns the means of the steps since the last call.

        Args:
            logs: With the means by now.
            num_done: Steps of the epoch done by now.

        Returns:
            Means by name; none at the first call in an epoch that was resumed
            in its middle, where those of the steps before are not known.
        """
        now = {name: float(logs[name]) for name in self._names if name in logs}
        before, self._before = self._before, (num_done, now)
        if before is None or num_done <= before[0]:
            return {}
        then, means = before
        return {
            name: (mean * num_done - means.get(name, 0.0) * then)
            / (num_done - then)
            for name, mean in now.items()
        }
