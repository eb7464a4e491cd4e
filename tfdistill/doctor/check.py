"""One check of the doctor: what it says, and how long it may take."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable

from tfdistill.system import untrusted

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Result:
    """What a check found; `remedy` is empty unless something is wrong."""

    status: str
    name: str
    seen: str
    remedy: str = ""
    secs: float = 0.0


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


def run(check: Check) -> tuple[list[Result], bool]:
    """Returns the results of a check so far, and whether it ended in time.

    A storage that hangs cannot be interrupted, so each check has a thread of
    its own, which is left behind if it does not end.
    """
    found: list[Result] = []
    start = time.monotonic()

    def make() -> None:
        begin = start
        try:
            for result in check.make():
                now = time.monotonic()
                found.append(dataclasses.replace(result, secs=now - begin))
                begin = now
        except Exception as error:  # A doctor that breaks has found a fault.
            text = untrusted.one_line(f"{type(error).__name__}: {error}")
            found.append(failed(check.name, text, check.remedy))

    thread = threading.Thread(target=make, daemon=True, name=check.name)
    thread.start()
    thread.join(check.limit_secs)
    ended = not thread.is_alive()
    results = list(found)
    if not ended:
        seen = f"it has not ended within {check.limit_secs:g} s"
        late = failed(check.name, seen, check.remedy, check.limit_secs)
        results.append(late)
    return results, ended
