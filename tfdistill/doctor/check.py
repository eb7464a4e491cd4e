"""One check of the doctor: what it says, and how long it may take."""

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator

from tfdistill.system import untrusted

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
EXIT_FAILED = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What a check found; `remedy` is empty unless something is wrong."""

    status: str
    name: str
    seen: str
    remedy: str = ""


ok = functools.partial(Result, OK)
warning = functools.partial(Result, WARNING)
failed = functools.partial(Result, FAILED)
skipped = functools.partial(Result, SKIPPED)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check to be made; `make` yields a result for each thing it looks at."""

    name: str
    make: Callable[[], Iterable[Result]]
    limit_secs: float
    remedy: str = "Raise --limit_secs if this machine is only slow."


def run(check: Check) -> Iterator[Result]:
    """Yields the results of a check.

    A storage that hangs cannot be interrupted: a check that does not end in
    time is reported, and ends the process.
    """
    timer = threading.Timer(check.limit_secs, _give_up, [check])
    timer.daemon = True
    timer.start()
    try:
        yield from check.make()
    except Exception as error:  # A doctor that breaks has found a fault.
        yield failed(
            check.name, f"{type(error).__name__}: {error}", check.remedy
        )
    finally:
        timer.cancel()


def _give_up(check: Check) -> None:
    seen = f"it has not ended within {check.limit_secs:g} s"
    show(failed(check.name, seen, check.remedy))
    sys.stdout.flush()
    os._exit(EXIT_FAILED)


def show(result: Result) -> None:
    """Prints one result: its status, what was seen, and the remedy."""
    seen, remedy = (
        untrusted.one_line(text, max_chars=2000)
        for text in (result.seen, result.remedy)
    )
    print(f"{result.status:<7}  {result.name}: {seen}", flush=True)
    if remedy:
        print(f"         remedy: {remedy}", flush=True)
