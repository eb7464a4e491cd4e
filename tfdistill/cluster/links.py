"""Ends a task that no longer reaches another task of its group.

A host that is cut off closes no connection. With parameter servers TensorFlow
waits for it without a limit; workers notice only whether they reach the first
of them. So tasks connect to each other every second, besides.
"""

import threading
import time
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdistill.cluster import ending
from tfdistill.cluster import signs
from tfdistill.system import processes

# After which a task that does not answer counts as cut off.
LOST_SECS = 8.0
_LOOK_SECS = 1.0


def watch(
    task: str,
    others: Mapping[str, str],
    *,
    end: Callable[[int, str], Any] = ending.leave,
) -> threading.Event:
    """Ends this task with code 75 if one of the others is cut off.

    One that refuses, or whose name is not known, may be about to start again.
    The event that is returned ends the watch.

    Args:
        task: This task's name.
        others: Addresses by name.
        end: Takes the exit code and the reason.
    """
    over = threading.Event()

    def look(other: str, address: str) -> None:
        # By what it was asked, since this thread may have no turn for a while.
        since: float | None = None
        while not over.wait(_LOOK_SECS):
            asked = time.monotonic()
            # A network that is only slow has as long for one answer.
            answer = processes.ask(address, timeout_secs=LOST_SECS)
            if answer is not processes.Answer.SILENT:
                since = None
                continue
            since = asked if since is None else since
            silent_secs = time.monotonic() - since
            if silent_secs >= LOST_SECS and not over.is_set():
                end(
                    signs.EXIT_RETRY,
                    f"{task} ends: {other} at {address} has not answered for "
                    f"{LOST_SECS:g} s. Check the network between their hosts, "
                    "and start the group again; it resumes from its backup.",
                )
                return

    for item in others.items():
        threading.Thread(
            target=look, args=item, name="tfdistill-links", daemon=True
        ).start()
    return over
