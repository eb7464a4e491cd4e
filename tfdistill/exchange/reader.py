"""The newest version of each group, looked for without a wait."""

import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping

from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.system import untrusted

# Between two looks.
_INTERVAL_SECS = 1.0


class NewestVersions:
    """The newest version of each group, looked for without a wait.

    For people, so whoever signed it. A thread reads, because a storage that
    hangs must not stop its user.
    """

    def __init__(
        self,
        root: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        file_system: filesystem.FileSystem | None = None,
    ) -> None:
        """Touches no storage yet; the first version makes the directory."""
        # Why the last look failed, and which groups it has seen.
        self.problem = ""
        self.groups: Collection[int] = ()
        self._root = root
        self._clock = clock
        self._file_system = file_system
        self._thread = threading.Thread()
        self._began = -float("inf")
        self._found: Mapping[int, versions.Version] = {}

    def look(
        self, *, limit_secs: float = 0.0
    ) -> Mapping[int, versions.Version]:
        """Returns what the last look has found, and starts one if it is due.

        Waits up to `limit_secs` for the present look.
        """
        is_due = self._clock() - self._began >= _INTERVAL_SECS
        if is_due and not self._thread.is_alive():
            self._began = self._clock()
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        if limit_secs:
            self._thread.join(limit_secs)
        waited = self._clock() - self._began
        if self._thread.is_alive() and waited >= (limit_secs or _INTERVAL_SECS):
            self.problem = f"{self._root} has not answered for {waited:.0f} s"
        return dict(self._found)

    def _look(self) -> None:
        try:
            exchange = publisher.Exchange(
                self._root, key=None, file_system=self._file_system
            )
            groups = exchange.groups()
            newest = [exchange.latest(group) for group in groups]
        except (ImportError, OSError, ValueError) as error:
            self.problem = untrusted.one_line(f"{self._root}: {error}")
            return
        found = {version.group: version for version in newest if version}
        self.groups, self._found, self.problem = groups, found, ""
