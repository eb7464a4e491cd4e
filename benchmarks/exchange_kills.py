"""Kills a publisher again and again, and counts what readers see of it.

A writer claims its group and publishes small versions as fast as it can, until
it is killed by SIGKILL at a random moment, the first one after its first
version; the next one goes on. Meanwhile a reader verifies the newest version in
a loop, and after each kill every version in sight is verified. Half of the
kills happen where directories are renamed, half where they cannot be and the
manifest comes last; or all of them in an object store, whose bucket must exist
and where each version is verified after one kill only. With --deltas four of
five versions are deltas, which the readers put into what they hold. Writers are
forked from a warm process, so that a kill costs milliseconds. TensorFlow is not
imported.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import logging

from tfdistill.exchange import deltas
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import store
from tfdistill.exchange import versions
from tfdistill.system import programs

_FILES = {"saved_model.pb": 3, "variables/index": 1, "variables/data": 20}
_LONGEST_LIFE_SECS = 0.03
# Between two looks of a reader.
_PAUSE_SECS = 0.001
# With deltas: every so many versions are whole.
_KEY_EVERY = 5
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


def _newest(hub: publisher.Exchange, with_deltas: bool) -> Any:
    """Returns the newest version, whole or a delta; None if there is none."""
    places = [hub, hub.deltas] if with_deltas else [hub]
    found = [version for place in places if (version := place.latest(0))]
    return max(found, key=lambda version: version.step, default=None)


def _write(
    root: str, storage: filesystem.FileSystem, ready: int, with_deltas: bool
) -> None:
    # Nothing here cuts the power, and a busy disk would make kills rarer.
    os.fsync = lambda descriptor: None  # type: ignore[assignment]
    hub = publisher.Exchange(
        root, key=None, file_system=storage, max_to_keep=2, min_keep_secs=0.05
    )
    hub.claim(0)
    latest = _newest(hub, with_deltas)
    publish = _Table().publish if with_deltas else _publish_whole
    step = latest.step + 1 if latest else 0
    if latest is None:
        # However slow the machine is, readers have something to see.
        publish(hub, step)
        step += 1
    os.write(ready, b".")
    while True:
        publish(hub, step)
        step += 1


def _publish_whole(hub: publisher.Exchange, step: int, **extras: Any) -> None:
    def write(directory: str) -> None:
        for name, num_blocks in _FILES.items():
            path = pathlib.Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            with path.open("wb", buffering=0) as file:
                for _ in range(num_blocks):
                    file.write(b"%d" % step * 500)

    hub.publish(write, group=0, step=step, extras=extras)


class _Table:
    """A table of which each step changes some rows, published and read.

    Whole versions have it in their manifest's step: it is a function of that.
    """

    def __init__(self) -> None:
        self._encoder: Any = None
        self._held: tuple[int | None, Any] = None, None

    @staticmethod
    def at(step: int) -> Any:
        rows = np.arange(200)[:, np.newaxis]
        # A row changes at every so many steps, the last ones seldom.
        return {"table": (step // (1 + rows // 8)) * 200 + rows + np.arange(4)}

    def publish(self, hub: publisher.Exchange, step: int) -> None:
        encoder = self._encoder
        if encoder is None or encoder.num_deltas == _KEY_EVERY - 1:
            _publish_whole(hub, step, **{deltas.KEY_EVERY_FIELD: _KEY_EVERY})
            self._encoder = deltas.Encoder(step, self.at(step))
            return
        field, blocks = encoder.encode(self.at(step))
        hub.deltas.publish_file(
            blocks, group=0, step=step, extras={deltas.FIELD: field}
        )

    def read(self, version: versions.Version) -> None:
        """Puts a delta into the version of its frame that it holds."""
        frame, held = deltas.frame_of(version.manifest), self._held
        if deltas.is_delta(version.manifest):
            if held[0] != frame:
                held = frame, self.at(frame or 0)
            path = pathlib.Path(version.path, deltas.FILE_NAME)
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                raise versions.VersionNotFoundError(str(path)) from None
            field = version.manifest.extras[deltas.FIELD]
            table = deltas.patched(field, content, held[1])
        else:
            table = self.at(version.step)
        if (table["table"] != self.at(version.step)["table"]).any():
            raise deltas.DeltaError(f"step {version.step} is another table")
        self._held = frame or version.step, table


class _Reader:
    """Verifies the newest version."""

    def __init__(
        self, root: str, storage: filesystem.FileSystem, with_deltas: bool
    ) -> None:
        self._exchange = publisher.Exchange(root, key=None, file_system=storage)
        self._table = _Table() if with_deltas else None
        self._newest = -1
        self.counts = Counts()

    def look(self) -> None:
        found = _newest(self._exchange, self._table is not None)
        if found is None:
            return
        try:
            self._exchange.verify(found)
            if self._table is not None:
                self._table.read(found)
        except versions.VersionNotFoundError:
            return
        except (versions.CorruptVersionError, deltas.DeltaError) as error:
            self.counts.add_fault(str(error))
        if found.step < self._newest:
            self.counts.add_fault(
                f"step {found.step} after step {self._newest}"
            )
        self._newest = max(self._newest, found.step)
        self.counts.reads += 1


def _fork(work: Callable[[], None]) -> int:
    """Does the work in a child process, which imports nothing again."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def _reading(make: Callable[[], _Reader]) -> Callable[[], Any]:
    """Looks in a child process until the result is called, and once more.

    That returns the reader's counts; None if it had failed.
    """
    stop, stopping = os.pipe()
    result, telling = os.pipe()

    def read() -> None:
        os.close(stopping)
        stopped = threading.Event()

        def wait() -> None:
            os.read(stop, 1)
            stopped.set()

        threading.Thread(target=wait, daemon=True).start()
        reader = make()
        while not stopped.wait(_PAUSE_SECS):
            reader.look()
        reader.look()
        os.write(
            telling, json.dumps(dataclasses.asdict(reader.counts)).encode()
        )

    pid = _fork(read)
    os.close(telling)
    os.close(stop)

    def end() -> Any:
        os.close(stopping)
        with open(result, "rb") as file:
            text = file.read()
        os.waitpid(pid, 0)
        return json.loads(text) if text else None

    return end


def _kill_one(
    root: str,
    storage: filesystem.FileSystem,
    rng: random.Random,
    longest_secs: float,
    with_deltas: bool,
) -> None:
    ready, wrote = os.pipe()
    pid = _fork(lambda: _write(root, storage, wrote, with_deltas))
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
    root: str,
    storage: filesystem.FileSystem,
    counts: Counts,
    newest: int,
    with_deltas: bool,
) -> int:
    hub = publisher.Exchange(root, key=None, file_system=storage)
    places = [hub, hub.deltas] if with_deltas else [hub]
    begun = [_check_in(place, counts, newest, _Table()) for place in places]
    found = max(steps for steps, _ in begun)
    if found < newest:
        counts.add_fault(f"newest step {found} after step {newest}")
    counts.interrupted += any(left for _, left in begun)
    return max(found, newest)


def _check_in(
    reader: store.VersionStore, counts: Counts, newest: int, table: _Table
) -> tuple[int, bool]:
    """Returns the newest step in sight, and whether something is unfinished."""
    steps = reader.steps(0)
    storage = reader._file_system
    in_store = isinstance(storage, filesystem.ObjectStore)
    for step in steps:
        if in_store and step < newest:
            continue  # Verified before; each file is a request.
        try:
            version = reader.open(0, step)
            reader.verify(version)
            if deltas.is_delta(version.manifest):
                table.read(version)
        except (versions.CorruptVersionError, deltas.DeltaError) as error:
            counts.add_fault(str(error))
    try:
        names = set(storage.list_dir(reader.group_path(0)))
    except FileNotFoundError:
        names = set()
    names -= {"owner.json", *map(str, steps)}
    return max(steps, default=-1), bool(names)


def _check_apart(
    root: str,
    storage: filesystem.FileSystem,
    counts: Counts,
    newest: int,
    with_deltas: bool,
) -> int:
    """Checks in a child: a process that used a store cannot fork safely."""
    result, telling = os.pipe()

    def check() -> None:
        found = _check(root, storage, counts, newest, with_deltas)
        told = [found, dataclasses.asdict(counts)]
        os.write(telling, json.dumps(told).encode())

    child = _fork(check)
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
    with_deltas: bool = False,
) -> Counts:
    """Kills writers of one exchange.

    Args:
        root: The exchange's directory, to be made.
        kills: How many writers to kill.
        seed: Chooses the moments.
        storage: What the root is on.
        with_deltas: Whether four of five versions are deltas.

    Returns:
        What was seen.
    """
    rng, counts, newest = random.Random(seed), Counts(), -1
    in_store = isinstance(storage, filesystem.ObjectStore)
    longest_secs = (
        _LONGEST_LIFE_IN_STORE_SECS if in_store else _LONGEST_LIFE_SECS
    )
    check = _check_apart if in_store else _check

    stop = _reading(lambda: _Reader(root, storage, with_deltas))
    try:
        for number in range(1, kills + 1):
            _kill_one(root, storage, rng, longest_secs, with_deltas)
            counts.kills += 1
            newest = check(root, storage, counts, newest, with_deltas)
            if number % max(1, kills // 10) == 0:
                logging.info("%d of %d writers killed", number, kills)
    finally:
        told = stop()
    counts.versions = newest + 1
    if told is None:
        counts.add_fault("the reader failed")
        return counts
    seen = Counts(**told)
    counts.reads, counts.bad = seen.reads, counts.bad + seen.bad
    counts.faults += seen.faults
    return counts


def _add_options(options: programs.Program) -> None:
    options.add("kills", "how often a writer is killed", 2000, quick=100)
    options.add("seed", "of the moments of the kills", 0)
    options.add("deltas", "four of five versions are deltas", False)
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
            found = run(
                root,
                kills=kills,
                seed=seed,
                storage=storage,
                with_deltas=options.deltas,
            )
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

if __name__ == "__main__":
    PROGRAM.start()
