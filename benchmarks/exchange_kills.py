"""Kills a publisher again and again, and counts what readers see of it.

A writer claims its group and publishes small versions as fast as it can, until
it is killed by SIGKILL at a random moment; the next one goes on. Meanwhile a
reader verifies the newest version in a loop, and after each kill every version
in sight is verified. Half of the kills happen where directories are renamed,
half where they cannot be and the manifest comes last; or all of them in an
object store, whose bucket must exist and where each version is verified after
one kill only. Writers are forked from a warm process,
so that a kill costs milliseconds. TensorFlow is not imported.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import tempfile
import time
import uuid
from typing import Any

from absl import logging

from benchmarks import forks
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.system import programs

_FILES = {"saved_model.pb": 3, "variables/index": 1, "variables/data": 20}
_LONGEST_LIFE_SECS = 0.03
# In a store, where each file is a request, and so is each look at it.
_LONGEST_LIFE_IN_STORE_SECS = 1.2


class _NoRename(filesystem.LocalFileSystem):
    """A mount that renames files and no directories."""

    def move(self, source: str, target: str) -> bool:
        """Returns False."""
        return False


@dataclasses.dataclass
class Counts:
    """What was done to writers, and what was seen of them.

    Attributes:
      kills: Writers killed.
      versions: Versions that were published.
      interrupted: Kills that left something unfinished behind.
      reads: Versions that the reader beside the writers verified.
      bad: Versions in sight that contradicted their manifest, and times at
        which the newest version was older than before.
      faults: The first few of these, in words.
    """

    kills: int = 0
    versions: int = 0
    interrupted: int = 0
    reads: int = 0
    bad: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def add_fault(self, fault: str) -> None:
        """Counts something bad."""
        self.bad += 1
        self.faults = [*self.faults, fault][:5]


def _write(root: str, storage: filesystem.FileSystem, ready: int) -> None:
    # Nothing here cuts the power, and a busy disk would make kills rarer.
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    hub = publisher.Exchange(
        root, key=None, file_system=storage, max_to_keep=2, min_keep_secs=0.05
    )
    hub.claim(0)
    latest = hub.latest(0)
    step = latest.step + 1 if latest else 0
    os.write(ready, b".")
    while True:

        def write(directory: str, step: int = step) -> None:
            for name, num_blocks in _FILES.items():
                path = pathlib.Path(directory, name)
                path.parent.mkdir(exist_ok=True)
                with path.open("wb", buffering=0) as file:
                    for _ in range(num_blocks):
                        file.write(b"%d" % step * 500)

        hub.publish(write, group=0, step=step)
        step += 1


class _Reader:
    """Verifies the newest version."""

    def __init__(self, root: str, storage: filesystem.FileSystem) -> None:
        self._exchange = publisher.Exchange(root, key=None, file_system=storage)
        self._newest = -1
        self.counts = Counts()

    def look(self) -> None:
        found = self._exchange.latest(0)
        if found is None:
            return
        try:
            self._exchange.verify(found)
        except versions.VersionNotFoundError:
            return
        except versions.CorruptVersionError as error:
            self.counts.add_fault(str(error))
        if found.step < self._newest:
            self.counts.add_fault(
                f"step {found.step} after step {self._newest}"
            )
        self._newest = max(self._newest, found.step)
        self.counts.reads += 1


def _kill_one(
    root: str,
    storage: filesystem.FileSystem,
    rng: random.Random,
    longest_secs: float,
) -> None:
    ready, wrote = os.pipe()
    pid = forks.fork(lambda: _write(root, storage, wrote))
    os.close(wrote)
    try:
        began = os.read(ready, 1)  # Ends with the child, too.
        time.sleep(rng.uniform(0, longest_secs))
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if not began or not os.WIFSIGNALED(status):
        raise RuntimeError("a writer ended before it was killed.")


def _check(
    root: str, storage: filesystem.FileSystem, counts: Counts, newest: int
) -> int:
    reader = publisher.Exchange(root, key=None, file_system=storage)
    steps = reader.steps(0)
    in_store = isinstance(storage, filesystem.ObjectStore)
    for step in steps:
        if in_store and step < newest:
            continue  # Verified before; each file is a request.
        try:
            reader.verify(reader.open(0, step))
        except versions.CorruptVersionError as error:
            counts.add_fault(str(error))
    if max(steps, default=-1) < newest:
        counts.add_fault(f"newest step {steps} after step {newest}")
    names = set(storage.list_dir(reader.group_path(0)))
    names -= {"owner.json", *map(str, steps)}
    counts.interrupted += bool(names)
    return max(steps, default=newest)


def _check_apart(
    root: str, storage: filesystem.FileSystem, counts: Counts, newest: int
) -> int:
    """Checks in a child: a process that used a store cannot fork safely."""
    result, telling = os.pipe()

    def check() -> None:
        found = _check(root, storage, counts, newest)
        told = [found, dataclasses.asdict(counts)]
        os.write(telling, json.dumps(told).encode())

    child = forks.fork(check)
    os.close(telling)
    with open(result, "rb") as file:
        newest, told = json.loads(file.read())
    os.waitpid(child, 0)
    vars(counts).update(told)
    return newest


def run(
    root: str,
    *,
    kills: int,
    seed: int,
    storage: filesystem.FileSystem,
) -> Counts:
    """Kills writers of one exchange.

    Args:
        root: The exchange's directory, to be made.
        kills: How many writers to kill.
        seed: Chooses the moments.
        storage: What the root is on.

    Returns:
        What was seen.
    """
    rng, counts, newest = random.Random(seed), Counts(), -1
    in_store = isinstance(storage, filesystem.ObjectStore)
    longest_secs = (
        _LONGEST_LIFE_IN_STORE_SECS if in_store else _LONGEST_LIFE_SECS
    )
    check = _check_apart if in_store else _check

    def read() -> Any:
        looking = _Reader(root, storage)
        return looking.look, lambda: dataclasses.asdict(looking.counts)

    reader = forks.Reader(read)
    try:
        for number in range(1, kills + 1):
            _kill_one(root, storage, rng, longest_secs)
            counts.kills += 1
            newest = check(root, storage, counts, newest)
            if number % max(1, kills // 10) == 0:
                logging.info("%d of %d writers killed", number, kills)
    finally:
        told = reader.stop()
    counts.versions = newest + 1
    if told is None:
        counts.add_fault("the reader failed")
        return counts
    seen = Counts(**told)
    counts.reads, counts.bad = seen.reads, counts.bad + seen.bad
    counts.faults += seen.faults
    return counts


def _add_options(options: programs.Flags) -> None:
    options.add("kills", "how often a writer is killed", 2000, quick=100)
    options.add("seed", "of the moments of the kills", 0)
    options.add(
        "exchange",
        "<URL>: an object store to use, such as s3://bucket; the benchmark "
        "removes what it writes there. Default: a temporary directory",
    )


def _places(
    url: str | None, stack: contextlib.ExitStack
) -> dict[str, tuple[filesystem.FileSystem, str]]:
    if url:
        storage, root = filesystem.for_root(url)
        root = f"{root}/kills-{uuid.uuid4().hex}"
        stack.callback(storage.remove_tree, root)
        return {"store": (storage, root)}
    directory = stack.enter_context(tempfile.TemporaryDirectory())
    return {
        "rename": (filesystem.LocalFileSystem(), f"{directory}/rename"),
        "manifest_last": (_NoRename(), f"{directory}/manifest_last"),
    }


def _run(options: programs.Options) -> int:
    """Returns 0 if nothing bad was seen, else 1."""
    record: dict[str, Any] = {"benchmark": "exchange_kills"}
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        places = _places(options.exchange, stack)
        for name, (storage, root) in places.items():
            kills, seed = options.kills // len(places), options.seed
            found = run(root, kills=kills, seed=seed, storage=storage)
            record[name] = dataclasses.asdict(found)
    record["secs"] = round(time.monotonic() - begin, 1)
    for name in ("kills", "versions", "interrupted", "reads", "bad"):
        record[name] = sum(record[place][name] for place in places)
    # Only now: with NumPy's threads this process could not fork safely.
    from benchmarks import measure

    record["machine"] = measure.machine()
    print(json.dumps(record))
    return 1 if record["bad"] else 0


PROGRAM = programs.Program(
    name="python -m benchmarks.exchange_kills",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
