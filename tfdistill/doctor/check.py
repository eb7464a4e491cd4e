"""One check of the doctor: what it says, and how long it may take."""

import dataclasses
import threading
import time
from collections.abc import Callable
from collections.abc import Iterable

from tfdistill.system import untrusted

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a check.

    Attributes:
        name: Of the check; its row in docs/doctor.md.
        status: `ok`, `warning`, `failed` or `skipped`.
        seen: What was found.
        remedy: What to do; empty where nothing need be done.
        secs: How long it took.
    """

    name: str
    status: str
    seen: str
    remedy: str = ""
    secs: float = 0.0

    def __post_init__(self) -> None:
        """Checks that a failure says what to do."""
        if self.status in (FAILED, WARNING) and not self.remedy:
            raise ValueError(
                f"A check that finds fault must say the remedy; {self.name} "
                f"says none for: {self.seen}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """A check that is still to be made.

    Attributes:
        name: Of the check.
        limit_secs: Longest time it may take.
        make: Makes it. It yields, or returns a list of, results: one for each
            thing looked at; each with the check's name.
        remedy: What to do where it takes too long.
    """

    name: str
    limit_secs: float
    make: Callable[[], Iterable[Result]]
    remedy: str


def ok(name: str, seen: str) -> Result:
    """Returns the result of a check that found no fault."""
    return Result(name=name, status=OK, seen=seen)


def warning(name: str, seen: str, remedy: str) -> Result:
    """Returns the result of a check that found what may be a fault."""
    return Result(name=name, status=WARNING, seen=seen, remedy=remedy)


def failed(name: str, seen: str, remedy: str) -> Result:
    """Returns the result of a check that found a fault."""
    return Result(name=name, status=FAILED, seen=seen, remedy=remedy)


def skipped(name: str, seen: str) -> Result:
    """Returns the result of a check that does not apply."""
    return Result(name=name, status=SKIPPED, seen=seen)


def run(check: Check) -> tuple[list[Result], bool]:
    """Makes a check, within its time.

    A storage that hangs cannot be interrupted, so each check has a thread of
    its own, which is left behind where it does not end.

    Args:
        check: The check.

    Returns:
        The results as far as they have come, and whether it has ended.
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
            found.append(
                failed(
                    check.name,
                    untrusted.one_line(f"{type(error).__name__}: {error}"),
                    check.remedy,
                )
            )

    thread = threading.Thread(target=make, daemon=True, name=check.name)
    thread.start()
    thread.join(check.limit_secs)
    ended = not thread.is_alive()
    results = list(found)
    if not ended:
        late = failed(
            check.name,
            f"it has not ended within {check.limit_secs:g} s",
            check.remedy,
        )
        results.append(dataclasses.replace(late, secs=check.limit_secs))
    return results, ended
