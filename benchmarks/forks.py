"""Processes that are forked from this one, which import nothing again."""

import json
import os
import threading
from collections.abc import Callable
from typing import Any

_PAUSE_SECS = 0.001


def fork(work: Callable[[], None]) -> int:
    """Does the work in a child process, and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


class Reader:
    """A child that looks at something until it is stopped, and once more."""

    def __init__(
        self, make: Callable[[], tuple[Callable[[], None], Callable[[], Any]]]
    ) -> None:
        """Starts it.

        Args:
            make: Called in the child: returns what looks once, and what then
                gives the counts, as JSON.
        """
        stop, self._stopping = os.pipe()
        self._result, telling = os.pipe()

        def read() -> None:
            os.close(self._stopping)
            stopped = threading.Event()

            def wait() -> None:
                os.read(stop, 1)
                stopped.set()

            threading.Thread(target=wait, daemon=True).start()
            look, counts = make()
            while not stopped.wait(_PAUSE_SECS):
                look()
            look()
            os.write(telling, json.dumps(counts()).encode())

        self._pid = fork(read)
        os.close(telling)
        os.close(stop)

    def stop(self) -> Any:
        """Ends it and returns the counts; None if it had failed."""
        os.close(self._stopping)
        text = os.read(self._result, 1 << 20)
        os.close(self._result)
        os.waitpid(self._pid, 0)
        return json.loads(text) if text else None
