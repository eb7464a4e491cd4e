"""The faults that can be injected, each undone or outlived by the run."""

import contextlib
import dataclasses
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import ClassVar
from typing import TypeVar

from benchmarks.punish import messages
from benchmarks.punish import run_view
from tfdistill.cluster import signs
from tfdistill.exchange import filesystem
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import run_files

_T = TypeVar("_T")


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

    SPREAD: ClassVar[float] = 0.2
    number: int
    due_secs: float
    fault: str
    group: int
    draw: float


def plan(
    faults: Sequence[str],
    *,
    num_groups: int,
    seed: int,
    duration_secs: float,
    every_secs: float,
) -> list[Injection]:
    """Draws the faults of a round.

    Each fault comes equally often, in shuffled order, and the groups take
    turns in shuffled order too: a short round has them all.

    Args:
        faults: Names to draw from.
        num_groups: Number of groups in the run.
        seed: The same seed gives the same round.
        duration_secs: Length of the round.
        every_secs: Mean time between two faults; each comes up to
            `Injection.SPREAD` of it early or late.

    Returns:
        The faults, by time.
    """
    rng = random.Random(seed)
    count = max(1, int(duration_secs / every_secs))
    names = _shuffled_rounds(faults, count, rng)
    groups = _shuffled_rounds(range(num_groups), count, rng)
    return [
        Injection(
            number=number,
            due_secs=every_secs
            * (number + rng.uniform(-1, 1) * Injection.SPREAD * (number > 0)),
            fault=names[number],
            group=groups[number],
            draw=rng.random(),
        )
        for number in range(count)
    ]


def _shuffled_rounds(
    values: Sequence[_T], count: int, rng: random.Random
) -> list[_T]:
    drawn: list[_T] = []
    while len(drawn) < count:
        drawn += rng.sample(values, len(values))
    return drawn[:count]


# A frozen task is the launcher's to find; one it has not found by then is
# woken up, and told of.
FROZEN_LIMIT_SECS = 60.0
# TensorFlow alone takes seconds to import, many more on a busy machine.
DUPLICATE_LIMIT_SECS = 150.0
TERM_LIMIT_SECS = 15.0
_DISK_FULL_SECS = 5.0
# Less than any export or backup, and more than a semaphore: Python's are files
# in memory, to which the limit applies as well, and a full disk does not.
_DISK_FULL_BYTES = 4096
# A disk as small as this was made for the run, to be filled.
_SMALL_DISK_BYTES = 256 * 1024**2
# Shorter than the time after which the launcher takes a task for frozen.
_LATE_SECS = _PAUSE_SECS = 2.0
_MESSAGES_SECS = 2.0
_RESTART_LIMIT_SECS = 60.0


@dataclasses.dataclass(kw_only=True)
class Outcome:
    """What an injection did.

    Attributes:
        target: The task, or the file, that was hit; empty if none was there.
        ends_group: Whether the group must stop and come back.
        violation: What should not have happened; empty if nothing.
        damaged: The version whose files were damaged: group and step.
        refused: Whether the group must count messages that it has refused.
    """

    target: str = ""
    ends_group: bool = False
    violation: str = ""
    damaged: tuple[int, int] | None = None
    refused: bool = False


_Inject = Callable[[run_view.RunView, Injection], Outcome]


def _pick(view: run_view.RunView, injection: Injection) -> run_view.Task | None:
    tasks = sorted(view.tasks(injection.group), key=lambda task: task.name)
    return tasks[int(injection.draw * len(tasks))] if tasks else None


def _signalled(
    view: run_view.RunView,
    injection: Injection,
    number: signal.Signals,
) -> tuple[Outcome, run_view.Process | None]:
    task = _pick(view, injection)
    if task is None or not task.process.send(number):
        return Outcome(), None
    return Outcome(target=task.name, ends_group=True), task.process


def _kill(view: run_view.RunView, injection: Injection) -> Outcome:
    return _signalled(view, injection, signal.SIGKILL)[0]


def _stop(view: run_view.RunView, injection: Injection) -> Outcome:
    outcome, process = _signalled(view, injection, signal.SIGSTOP)
    if process and not _ends(process, FROZEN_LIMIT_SECS):
        outcome.violation = (
            f"{outcome.target} was frozen for {FROZEN_LIMIT_SECS:g} s and "
            "nobody ended it"
        )
        process.send(signal.SIGCONT)
    return outcome


def _term(view: run_view.RunView, injection: Injection) -> Outcome:
    outcome, process = _signalled(view, injection, signal.SIGTERM)
    if process and not _ends(process, TERM_LIMIT_SECS):
        outcome.violation = (
            f"{outcome.target} did not end within {TERM_LIMIT_SECS:g} s of "
            "SIGTERM"
        )
    return outcome


def _late(view: run_view.RunView, injection: Injection) -> Outcome:
    """Kills a task and holds up the one that comes in its place."""
    outcome, process = _signalled(view, injection, signal.SIGKILL)
    deadline = time.monotonic() + _RESTART_LIMIT_SECS
    while process and time.monotonic() < deadline:
        for task in view.tasks(injection.group):
            if task.name == outcome.target and task.process != process:
                task.process.send(signal.SIGSTOP)
                time.sleep(_LATE_SECS)
                task.process.send(signal.SIGCONT)
                return outcome
        time.sleep(0.05)
    if process:
        outcome.violation = (
            f"{outcome.target} was not started again within "
            f"{_RESTART_LIMIT_SECS:g} s"
        )
    return outcome


def _pause(view: run_view.RunView, injection: Injection) -> Outcome:
    """Freezes a task for less than it takes to be noticed."""
    outcome, process = _signalled(view, injection, signal.SIGSTOP)
    if process:
        time.sleep(_PAUSE_SECS)
        process.send(signal.SIGCONT)
    return Outcome(target=outcome.target)


def _disk_full(view: run_view.RunView, injection: Injection) -> Outcome:
    """Lets a chief write no file beyond its first bytes for a while."""
    task = view.chief(injection.group)
    if task is None:
        return Outcome()
    pid = task.process.pid
    try:
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        limit = (_DISK_FULL_BYTES, before[1])
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
        time.sleep(_DISK_FULL_SECS)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
    except ProcessLookupError:
        return Outcome(
            target=task.name,
            ends_group=True,
            violation=f"{task.name} ended while its disk was full",
        )
    return Outcome(target=task.name)


def _launcher_disk(view: run_view.RunView, injection: Injection) -> Outcome:
    """Kills a task while the launcher can write nothing."""
    if view.launcher is None or not view.launcher.alive:
        return Outcome()
    with _full_disk(view, view.launcher.pid):
        task = _pick(view, injection)
        before = _of_task(view, task.name) if task else set()
        outcome, process = _signalled(view, injection, signal.SIGKILL)
        deadline = time.monotonic() + _RESTART_LIMIT_SECS
        # A keeper and its task.
        while process and len(_of_task(view, outcome.target) - before) < 2:
            if time.monotonic() < deadline and view.launcher.alive:
                time.sleep(0.02)
                continue
            outcome.violation = (
                f"{outcome.target} was not started again within "
                f"{_RESTART_LIMIT_SECS:g} s while the launcher's disk was full"
            )
            break
    if not view.launcher.alive:
        outcome.violation = "the launcher ended while its disk was full"
    return outcome


@contextlib.contextmanager
def _full_disk(view: run_view.RunView, launcher: int) -> Iterator[None]:
    """Fills a disk that is the run's alone; others get a quota in its place."""
    if shutil.disk_usage(view.workdir).total <= _SMALL_DISK_BYTES:
        filler = view.workdir / "punish" / "filler"
        with contextlib.suppress(OSError):
            with filler.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        yield
        filler.unlink()
        return
    before = resource.prlimit(launcher, resource.RLIMIT_FSIZE)
    # Files that are there already cannot grow, and new ones stay empty.
    resource.prlimit(launcher, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        # What was started meanwhile has inherited it: that fault is not its.
        value = str(view.workdir)
        heirs = run_view.with_variable("TFDISTILL_WORKDIR", value)
        for pid in [launcher, *(process.pid for process in heirs)]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def _of_task(view: run_view.RunView, name: str) -> set[run_view.Process]:
    """Returns the processes of a task; launch.json may be out of date."""
    path = view.workdir / "logs" / "ready" / name.removeprefix("group_")
    return set(run_view.with_variable(signs.VARIABLE, str(path)))


def _corrupt(view: run_view.RunView, injection: Injection) -> Outcome:
    """Damages one file of the newest version of a group."""
    storage, root = filesystem.for_root(view.exchange)
    directory = f"{root}/{run_files.group_name(injection.group)}"
    # Peers must notice by the manifest's sums; a broken manifest is a version
    # that is not there.
    try:
        names = storage.list_dir(directory)
        steps = [versions.step_of_name(name) for name in names]
        step = max((s for s in steps if s is not None), default=-1)
        found = filesystem.walk(storage, f"{directory}/{step}")
        files = sorted(name for name, stat in found if stat.is_file)
        if not files:
            return Outcome()
        kinds = (_cut, _flip, _zero, _remove, _add)
        name = files[int(injection.draw * len(files))]
        kind = kinds[int(injection.draw * len(files) * len(kinds)) % len(kinds)]
        kind(storage, f"{directory}/{step}/{name}", injection.draw)
    except FileNotFoundError:  # Nothing yet, or pruned meanwhile.
        return Outcome()
    path = f"{run_files.group_name(injection.group)}/{step}/{name}"
    return Outcome(
        target=f"{kind.__name__.strip('_')} {path}",
        damaged=(injection.group, step),
    )


def _content(storage: filesystem.FileSystem, path: str) -> bytearray:
    return bytearray(b"".join(storage.blocks(path)))


def _cut(storage: filesystem.FileSystem, path: str, draw: float) -> None:
    content = _content(storage, path)
    storage.write(path, [bytes(content[: int(draw * len(content))])])


def _flip(storage: filesystem.FileSystem, path: str, draw: float) -> None:
    content = _content(storage, path)
    content[int(draw * len(content))] ^= 1 << int(draw * 8)
    storage.write(path, [bytes(content)])


def _zero(storage: filesystem.FileSystem, path: str, draw: float) -> None:
    storage.write(path, [bytes(len(_content(storage, path)))])


def _remove(storage: filesystem.FileSystem, path: str, draw: float) -> None:
    storage.remove(path)


def _add(storage: filesystem.FileSystem, path: str, draw: float) -> None:
    parent = path.rpartition("/")[0]
    storage.write(f"{parent}/foreign-{draw:.6f}", [b"nobody's"])


def _duplicate(view: run_view.RunView, injection: Injection) -> Outcome:
    """Starts the group a second time, as one task of another run."""
    if view.chief(injection.group) is None:
        return Outcome()
    topology = view.topology
    log = view.workdir / "punish" / f"duplicate_{injection.number}.log"
    with log.open("wb") as output:
        second = subprocess.Popen(
            topology["command"],
            env=_duplicate_environment(view, injection.group),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    outcome = Outcome(target=f"a second group {injection.group}")
    try:
        code = second.wait(timeout=DUPLICATE_LIMIT_SECS)
    except subprocess.TimeoutExpired:
        outcome.violation = (
            f"{outcome.target} ran for {DUPLICATE_LIMIT_SECS:g} s beside the "
            f"first, see {log}"
        )
        os.killpg(second.pid, signal.SIGKILL)
        second.wait()
        return outcome
    if code == 0:
        outcome.violation = f"{outcome.target} ended as if all were well"
    return outcome


def _duplicate_environment(
    view: run_view.RunView, group: int
) -> Mapping[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if name != "TF_CONFIG"
    }
    environment |= view.topology["env"]
    environment |= {
        "TFDISTILL_EXCHANGE": view.exchange,
        "TFDISTILL_GROUP": str(group),
        "TFDISTILL_NUM_GROUPS": str(view.num_groups),
        # Of the same run it would rightly take the group over.
        "TFDISTILL_WORKDIR": str(view.workdir / "punish" / "another_run"),
    }
    if not signing.has_key(environment):
        environment[signing.FILE_VARIABLE] = str(view.workdir / "exchange.key")
    return environment


def _forged(view: run_view.RunView, injection: Injection) -> Outcome:
    target = messages.find(view, injection.group, injection.draw)
    if target is None:
        return Outcome()
    admitted = messages.forged(target)
    return Outcome(
        target=target.name,
        refused=target.is_logged,
        violation=admitted and f"{target.name}: let in a stream {admitted}",
    )


def _to_mailbox(attack: Callable[..., None], *, refused: bool) -> _Inject:
    def inject(view: run_view.RunView, injection: Injection) -> Outcome:
        target = messages.find(view, injection.group, injection.draw)
        if target is None:
            return Outcome()
        attack(target, secs=_MESSAGES_SECS)
        return Outcome(target=target.name, refused=refused and target.is_logged)

    return inject


def _ends(process: run_view.Process, within_secs: float) -> bool:
    deadline = time.monotonic() + within_secs
    while process.alive:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


# For groups that learn from each other's predictions; others have no mailbox.
MESSAGE_FAULTS: Mapping[str, tuple[_Inject, str]] = {
    "forged": (_forged, "strangers send predictions to a worker"),
    "wrong": (
        _to_mailbox(messages.wrong, refused=True),
        "a peer sends predictions of another step, batch, dtype, shape, number "
        "of classes or replica, and NaN",
    ),
    "flood": (
        _to_mailbox(messages.flood, refused=True),
        "a peer sends as many messages as go through",
    ),
    "half_open": (
        _to_mailbox(messages.half_open, refused=False),
        "connections to a worker that say nothing",
    ),
}
FAULTS: Mapping[str, tuple[_Inject, str]] = {
    "kill": (_kill, "SIGKILL to any task"),
    "stop": (_stop, "SIGSTOP to any task, which the launcher must find"),
    "term": (_term, "SIGTERM to any task, as a preemption"),
    "late": (_late, "SIGKILL, and the task in its place comes late"),
    "pause": (_pause, "SIGSTOP to any task, which goes on after a moment"),
    "disk_full": (_disk_full, "a chief can write no file for a while"),
    "launcher_disk": (
        _launcher_disk,
        "SIGKILL to any task while the launcher's disk is full",
    ),
    "corrupt": (_corrupt, "a file of a group's newest version is damaged"),
    "duplicate": (_duplicate, "another run starts the group"),
    **MESSAGE_FAULTS,
}
