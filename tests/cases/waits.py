"""Waits of tests, which end by progress and not by the clock.

What a test waits for is done by other threads, or by processes that it has
started. A wait fails once none of them has done anything for a while, however
slow the machine is, and then it tells what they were doing.
"""

import contextlib
import os
import pathlib
import re
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import TypeVar

import psutil
import pytest

from tfdistill.cluster import signs

# How long nothing may happen, and how long something may.
QUIET_SECS, MOST_SECS = 120.0, 600.0
# What processes of a test inherit, which conftest.py's `no_process_left` sets.
TOKEN_NAME = "TEST_PROCESS_TOKEN"
# Has processes of tests write the stacks of their threads to their log; see
# bare/sitecustomize.py.
STACKS = signal.SIGUSR2
# Less of a processor is no work: loops that look whether there is some.
_LEAST_SHARE = 0.02
_MOST_TAIL = 4000
_Value = TypeVar("_Value")


def _started() -> list[psutil.Process]:
    """What this process has started, with what daemons start for its test."""
    found = psutil.Process().children(recursive=True)
    return list({*found, *marked(os.environ.get(TOKEN_NAME, ""))})


def marked(token: str) -> list[psutil.Process]:
    """Living processes, orphans too, that inherited a test's token."""
    found = []
    for process in psutil.process_iter() if token else ():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid():
                continue
            # A zombie has ended; only its parent has not yet asked how.
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(TOKEN_NAME) == token:
                found.append(process)
    return found


def _log(process: psutil.Process) -> pathlib.Path | None:
    """The file that a process prints to, whoever has started it."""
    try:
        path = pathlib.Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        return path if path.is_file() else None
    except OSError:
        return None


def _reports(log: pathlib.Path) -> Iterator[tuple[str, str]]:
    """What the tasks whose logs are in one directory say they are at."""
    for path in sorted(log.parent.glob("ready/*.progress")):
        line = signs.read_progress(path.with_suffix(""))
        # A server says twice a second that it serves, whether anybody asks.
        if line is not None and line.phase != signs.SERVING:
            yield path.stem, f"{line.phase}, report {line.count}"


def _news(processes: list[psutil.Process]) -> set[object]:
    """Has more, or other, elements whenever a process has done something."""
    logs = set(filter(None, map(_log, processes)))
    found: set[object] = {process.pid for process in processes}
    for log in logs:
        try:
            found.add((log, log.stat().st_size))
        except OSError:
            pass  # It is gone.
    for directory in {log.parent: log for log in logs}.values():
        found.update((directory, report) for report in _reports(directory))
    return found


def _secs(processes: list[psutil.Process], *, own: bool) -> dict[int, float]:
    """Processor time of each process, and of each thread of this one."""
    found = {}
    for process in processes:
        try:
            found[process.pid] = sum(process.cpu_times()[:2])
        except psutil.Error:
            pass  # It has ended.
    this = threading.main_thread().native_id
    for thread in psutil.Process().threads():
        if own or thread.id != this:
            found[thread.id] = thread.user_time + thread.system_time
    return found


class Watch:
    """Fails a test that waits for what does not happen."""

    def __init__(
        self, what: str, *, most_secs: float = MOST_SECS, own: bool = False
    ) -> None:
        """Begins to wait; `own` counts the work of the main thread, too."""
        self._what, self._most_secs, self._own = what, most_secs, own
        self._begun = self._seen = time.monotonic()
        self._quiet = 0.0
        self._news: set[object] = set()
        self._secs: dict[int, float] = {}

    def look(self) -> None:
        """Looks at what has happened, now and then; fails if nothing has."""
        now = time.monotonic()
        passed = now - self._seen
        if passed < QUIET_SECS / 8:
            return
        self._seen = now
        processes = _started()
        news, secs = _news(processes), _secs(processes, own=self._own)
        works = any(
            spent - self._secs.get(key, 0.0) > _LEAST_SHARE * passed
            for key, spent in secs.items()
        )
        # A machine that stood still itself is no test that does.
        self._quiet += min(passed, QUIET_SECS / 2)
        if works or news != self._news:
            self._quiet = 0.0
        self._news, self._secs = news, secs
        why = ""
        if self._quiet >= QUIET_SECS:
            why = f"nothing has happened for {self._quiet:.0f} s"
        elif now - self._begun > self._most_secs:
            why = f"it took more than {self._most_secs:.0f} s"
        if why:
            pytest.fail(f"{self._what}: {why}.\n{doing()}", pytrace=True)


def until(
    condition: Callable[[], _Value],
    what: str = "waiting",
    *,
    pause_secs: float = 0.01,
) -> _Value:
    """Returns a condition's value once that is true, or fails the test."""
    watch = Watch(what)
    while not (value := condition()):
        watch.look()
        time.sleep(pause_secs)
    return value


def _shows_stacks(process: psutil.Process) -> bool:
    try:
        text = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return False
    found = re.search(r"SigCgt:\s*(\w+)", text)
    return bool(found and int(found[1], 16) >> (STACKS - 1) & 1)


def doing() -> str:
    """What the processes that this one has started are doing: for a failure.

    Last lines of their logs, with the stacks of their threads.
    """
    processes = _started()
    for process in filter(_shows_stacks, processes):
        try:
            process.send_signal(STACKS)
        except psutil.Error:
            pass
    time.sleep(1.0)
    parts, logs = [], set()
    for process in processes:
        try:
            words = " ".join(process.cmdline())[:200]
        except psutil.Error:
            continue
        log = _log(process)
        parts.append(f"--- {process.pid}: {words} > {log}")
        if log is not None and log not in logs:
            parts.append(log.read_text(errors="replace")[-_MOST_TAIL:])
            logs.add(log)
    for log in {log.parent: log for log in logs}.values():
        parts += [f"{name}: {said}" for name, said in _reports(log)]
    return "\n".join(parts) or "It had started no process that still runs."
