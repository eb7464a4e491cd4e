"""The faults that can be injected, each undone or outlived by the run."""

import contextlib
import dataclasses
import random
import signal
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.punish import run_view
from tfdistill.exchange import filesystem
from tfdistill.exchange import versions
from tfdistill.system import run_files

# A frozen task is the launcher's to find; one it has not found by then is
# woken up, and told of.
_FROZEN_LIMIT_SECS = 60.0
_TERM_LIMIT_SECS = 15.0
_DISK_FULL_SECS = 5.0
# Less than any export or backup, and more than a semaphore: Python's are files
# in memory, to which the limit applies as well, and a full disk does not.
_DISK_FULL_BYTES = 4096
# Shorter than the time after which the launcher takes a task for stuck.
_PAUSE_SECS = 1.0


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault to come.

    Attributes:
        number: Its place in the order, from 0.
        due_secs: When, in seconds from the first moment with faults.
        fault: Name of the fault.
        group: Index of the group it hits.
        draw: Uniform in [0, 1); picks the task, the file and so on, among
            what there is at that time.
    """

    number: int
    due_secs: float
    fault: str
    group: int
    draw: float

    def pick(self, values: Sequence[Any]) -> Any:
        """Returns one of several; None if there is none."""
        return values[int(self.draw * len(values))] if values else None


def plan(
    faults: Sequence[str],
    *,
    num_groups: int,
    seed: int,
    duration_secs: float,
    mtbf_secs: float,
) -> list[Injection]:
    """Draws the faults of a round, by time.

    They come at any time, as often as not while a group still recovers: of a
    Poisson process with that mean time between faults, and with the mean
    number of them. Each fault comes equally often, in shuffled order, and the
    groups take turns in shuffled order too: a short round has them all. The
    same seed gives the same round.
    """
    rng = random.Random(seed)
    count = max(1, round(duration_secs / mtbf_secs))
    names = _shuffled(faults, count, rng)
    groups = _shuffled(range(num_groups), count, rng)
    # Given their number, its times are uniform.
    times = sorted(rng.uniform(0, duration_secs) for _ in range(count))
    return [
        Injection(
            number=number,
            due_secs=times[number],
            fault=names[number],
            group=groups[number],
            draw=rng.random(),
        )
        for number in range(count)
    ]


def _shuffled(values: Sequence[Any], count: int, rng: random.Random) -> Any:
    drawn: list[Any] = []
    while len(drawn) < count:
        drawn += rng.sample(values, len(values))
    return drawn[:count]


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What an injection did.

    Attributes:
        target: The task, or the file, that was hit; empty if none was there.
        halts: Whether the group makes no steps until it has got over it.
        violation: What should not have happened; empty if nothing.
        suspicion: A violation, unless another fault hit the group meanwhile.
        damaged: The version whose files were damaged: group and step.
    """

    target: str = ""
    halts: bool = False
    violation: str = ""
    suspicion: str = ""
    damaged: tuple[int, int] | None = None


_View = run_view.RunView


def _signal(
    view: _View, injection: Injection, number: signal.Signals, end_secs: float
) -> Outcome:
    """Sends a signal to a task, which must then end in time."""
    task = injection.pick(view.tasks(injection.group))
    if task is None:
        return Outcome()
    outcome = Outcome(target=task.name, halts=True)
    task.process.send_signal(number)
    deadline = time.monotonic() + end_secs
    while run_view.is_alive(task.process):
        if time.monotonic() >= deadline:
            outcome.violation = (
                f"{task.name} lived {end_secs:g} s after {number.name}"
            )
            task.process.send_signal(signal.SIGCONT)
            break
        time.sleep(0.02)
    return outcome


def _kill(view: _View, injection: Injection) -> Outcome:
    return _signal(view, injection, signal.SIGKILL, _TERM_LIMIT_SECS)


def _stop(view: _View, injection: Injection) -> Outcome:
    return _signal(view, injection, signal.SIGSTOP, _FROZEN_LIMIT_SECS)


def _kill_group(view: _View, injection: Injection) -> Outcome:
    """Kills all that is left of a group."""
    tasks = view.tasks(injection.group)
    for task in tasks:
        with contextlib.suppress(psutil.NoSuchProcess):
            task.process.kill()
    return Outcome(target=", ".join(t.name for t in tasks), halts=bool(tasks))


def _term(view: _View, injection: Injection) -> Outcome:
    return _signal(view, injection, signal.SIGTERM, _TERM_LIMIT_SECS)


def _pause(view: _View, injection: Injection) -> Outcome:
    """Freezes a task for less than it takes to be noticed."""
    task = injection.pick(view.tasks(injection.group))
    if task is None:
        return Outcome()
    task.process.send_signal(signal.SIGSTOP)
    time.sleep(_PAUSE_SECS)
    task.process.send_signal(signal.SIGCONT)
    return Outcome(target=task.name, halts=True)


def _disk_full(view: _View, injection: Injection) -> Outcome:
    """Lets a chief write no file beyond its first bytes for a while."""
    task = view.chief(injection.group)
    if task is None:
        return Outcome()
    try:
        _, most = task.process.rlimit(psutil.RLIMIT_FSIZE)
        task.process.rlimit(psutil.RLIMIT_FSIZE, (_DISK_FULL_BYTES, most))
        time.sleep(_DISK_FULL_SECS)
        # Not what it was: that may have been another fault's.
        task.process.rlimit(psutil.RLIMIT_FSIZE, (most, most))
    except psutil.NoSuchProcess:
        return Outcome(
            target=task.name,
            suspicion=f"{task.name} ended while its disk was full",
        )
    return Outcome(target=task.name)


def _corrupt(view: _View, injection: Injection) -> Outcome:
    """Damages one file of the newest version of a group."""
    storage, root = filesystem.for_root(view.exchange)
    group = run_files.group_name(injection.group)
    # Peers must notice by the manifest's sums; a broken manifest is a version
    # that is not there.
    try:
        names = storage.list_dir(f"{root}/{group}")
        steps = [versions.step_of_name(name) for name in names]
        step = max((s for s in steps if s is not None), default=-1)
        found = filesystem.walk(storage, f"{root}/{group}/{step}")
        files = sorted(name for name, stat in found if stat.is_file)
        if not files:
            return Outcome()
        rng = random.Random(injection.draw)
        path = f"{group}/{step}/{rng.choice(files)}"
        content = bytearray(b"".join(storage.blocks(f"{root}/{path}")))
        place, kind = rng.randrange(len(content)), rng.choice(("cut", "flip"))
        if kind == "cut":
            del content[place:]
        else:
            content[place] ^= 1 << rng.randrange(8)
        storage.write(f"{root}/{path}", [bytes(content)])
    except FileNotFoundError:  # Nothing yet, or pruned meanwhile.
        return Outcome()
    return Outcome(target=f"{kind} {path}", damaged=(injection.group, step))


FAULTS: Mapping[str, Callable[[_View, Injection], Outcome]] = {
    "kill": _kill,
    "kill_group": _kill_group,
    "stop": _stop,
    "term": _term,
    "pause": _pause,
    "disk_full": _disk_full,
    "corrupt": _corrupt,
}
