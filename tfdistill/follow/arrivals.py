"""What the versions of one peer showed of the link as they arrived."""

import math
import time
from typing import Any

from tfdistill.exchange import versions
from tfdistill.follow import screen


class Arrivals:
    """Counts the versions that a follower took, for logs.

    Attributes:
        hears_secs: In how many seconds the peer reads this group's versions,
            as its last one reports; 0 if that is unknown.
    """

    def __init__(self) -> None:
        self._num_versions = self._num_bytes = self._num_unheard = 0
        self._last_num_bytes: int | None = None
        self._lag_secs: float | None = None
        self.start_over()

    def start_over(self) -> None:
        """Knows nothing of the group that is followed from now on."""
        # How many versions it had published before the last one.
        self._count: int | None = None
        self.hears_secs = 0.0

    def add(self, version: versions.Version) -> None:
        """Counts a version that is put in use now."""
        self._num_versions += 1
        self._last_num_bytes = version.num_bytes
        self._num_bytes += version.num_bytes
        self._lag_secs = time.time() - version.manifest.created
        hears, count = (
            version.manifest.extras.get(name)
            for name in (screen.HEARS_FIELD, screen.COUNT_FIELD)
        )
        if isinstance(hears, int | float) and 0 <= hears < math.inf:
            self.hears_secs = float(hears)
        if type(count) is int:
            # A group that was started again counts from 0.
            if self._count is not None:
                self._num_unheard += max(count - self._count - 1, 0)
            self._count = count

    def status(self) -> dict[str, Any]:
        """Describes them; see `Teacher.status`."""
        return {
            "swaps": self._num_versions,
            "bytes": self._num_bytes,
            "last_bytes": self._last_num_bytes,
            "num_unheard": self._num_unheard,
            "lag_secs": self._lag_secs,
        }
