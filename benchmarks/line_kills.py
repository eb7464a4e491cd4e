"""Kills promotions and rollbacks again and again, and counts what readers see.

Each command runs in a process that is killed by SIGKILL at a random moment, and
then once more to its end. Meanwhile a reader polls models.config as TensorFlow
Serving does, and compares the files of the version it names with their SHA-256.
Processes are forked from a warm one, so that a kill costs milliseconds. Neither
TensorFlow nor NumPy is imported.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from absl import logging

from benchmarks import forks
from tfdistill.exchange import publisher
from tfdistill.line import store
from tfdistill.system import programs

_KEY = b"the key of a run, long enough"
_FILES = {"saved_model.pb": 30, "variables/index": 1, "variables/data": 200}
# Versions that differ in each file, so that no mixture of two is whole.
_NUM_SOURCES = 3
_ROLLBACKS = 1 / 3


@dataclasses.dataclass
class Counts:
    """What was done, and what was seen.

    Attributes:
      kills: Commands killed before their end.
      promotions: Those that were run to their end, after a kill or not.
      rollbacks: The same.
      interrupted: Kills after which the pointer had moved, or files lay about.
      reads: Versions that the reader verified.
      torn: Reads of a pointer or a version that were not whole.
      backwards: Reads of a lower version, other than after a rollback.
      wrong: Commands after which the line was not as it should be.
      faults: The first few of these three, in words.
      rollback_secs: Of those that were not killed, with a fork.
      switch_secs: Of these, until readers saw the other version.
    """

    kills: int = 0
    promotions: int = 0
    rollbacks: int = 0
    interrupted: int = 0
    reads: int = 0
    torn: int = 0
    backwards: int = 0
    wrong: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)
    rollback_secs: list[float] = dataclasses.field(default_factory=list)
    switch_secs: list[float] = dataclasses.field(default_factory=list)

    def add_fault(self, kind: str, fault: str) -> None:
        """Counts something bad."""
        setattr(self, kind, getattr(self, kind) + 1)
        self.faults = [*self.faults, f"{kind}: {fault}"][:5]


def _sources(directory: str) -> list[str]:
    """Exports a few versions, and returns their directories."""
    run = pathlib.Path(directory)
    run.mkdir()
    (run / "exchange.key").write_bytes(_KEY)
    (run / "exchange.key").chmod(0o600)
    exchange = publisher.Exchange(
        run / "exchange", key=_KEY, max_to_keep=_NUM_SOURCES
    )
    found = []
    for number in range(_NUM_SOURCES):

        def write(place: str, number: int = number) -> None:
            for name, size in _FILES.items():
                path = pathlib.Path(place, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"%d" % number * 500 * size)

        found.append(exchange.publish(write, group=0, step=number).path)
    return found


class _Reader:
    """Polls the pointer with nothing of the library, and checks versions."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._seen = 0
        self.counts = Counts()

    def look(self) -> None:
        text = pathlib.Path(self._root, "models.config").read_text()
        found = re.search(r"specific \{ versions: (\d+) \}", text)
        if not found:
            if "model_config_list {}" not in text:
                self.counts.add_fault("torn", f"models.config is {text!r}")
            return
        number = int(found[1])
        try:
            event = json.loads(text.partition("\n")[0].removeprefix("#"))
            if event["version"] != number or not text.endswith("}\n"):
                raise ValueError(f"models.config is {text!r}")
            path = pathlib.Path(self._root, "versions", str(number))
            manifest = json.loads((path / "manifest.json").read_bytes())
            for name, entry in manifest["files"].items():
                content = (path / name).read_bytes()
                if hashlib.sha256(content).hexdigest() != entry["sha256"]:
                    raise ValueError(f"{path / name} differs")
            if not (path / "README.md").stat().st_size:
                raise ValueError(f"{path} has no card")
        except (OSError, ValueError, KeyError) as error:
            self.counts.add_fault("torn", f"version {number}: {error}")
            return
        if number < self._seen and event["what"] != "rollback":
            self.counts.add_fault("backwards", f"{self._seen} to {number}")
        self._seen = number
        self.counts.reads += 1


class _Killer:
    """Runs the commands of one line, and kills most of them first."""

    def __init__(self, directory: str, *, seed: int) -> None:
        self.line = store.Line.init(f"{directory}/line", workload="/x/w.py")
        self.counts = Counts()
        self._sources = _sources(f"{directory}/run")
        self._rng = random.Random(seed)
        # How long the last commands took, by their kind.
        self._secs: dict[str, list[float]] = {"promote": [], "rollback": []}
        self._next = 1

    def turn(self) -> None:
        """Kills one command, if it does not end before, and runs it again."""
        before = self.line.pointer()
        can_go_back = before["what"] == "promote" and before["before"]
        if can_go_back and self._rng.random() < _ROLLBACKS:
            what, expected = "rollback", before["before"][-1]
        else:
            what, expected, self._next = "promote", self._next, self._next + 1

        def work() -> None:
            if what == "rollback":
                self.line.rollback(why="a reason")
            else:
                source = self._sources[expected % _NUM_SOURCES]
                self.line.promote(expected, source, why="a reason")

        self._kill(work, what)
        began = time.time()
        _, status = os.waitpid(forks.fork(work), 0)
        secs = time.time() - began
        # Of these many, the moments of later kills are chosen.
        self._secs[what] = [*self._secs[what], secs][-20:]
        if what == "rollback":
            self.counts.rollbacks += 1
            # A rename changes it.
            seen = os.stat(f"{self.line.root}/models.config").st_ctime - began
            self.counts.rollback_secs.append(secs)
            self.counts.switch_secs.append(seen)
        else:
            self.counts.promotions += 1
        found = self.line.pointer()
        left = [
            name
            for place in ("", "events", "versions")
            for name in os.listdir(f"{self.line.root}/{place}")
            if name.endswith(".part") or name.startswith(".promoting")
        ]
        if (
            status
            or left
            or (found["what"], found["version"]) != (*(what, expected),)
        ):
            self.counts.add_fault(
                "wrong", f"{what} {expected}: {status}, {found}, {left}"
            )

    def _kill(self, work: Callable[[], None], what: str) -> None:
        known = self._secs[what]
        if not known:
            return
        event = self.line.pointer()["event"]
        pid = forks.fork(work)
        time.sleep(self._rng.uniform(0, sorted(known)[len(known) // 2]))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return
        self.counts.kills += 1
        aside = any(name.startswith(".") for name in os.listdir(self._versions))
        moved = self.line.pointer()["event"] != event
        self.counts.interrupted += aside or moved

    @property
    def _versions(self) -> str:
        path = f"{self.line.root}/versions"
        os.makedirs(path, exist_ok=True)
        return path

    def check_log(self) -> None:
        """Checks that each move of the pointer is in the log, once."""
        events = self.line.events()
        numbers = [event["event"] for event in events]
        version, before = None, list[int]()
        for event in events[1:]:
            if event["what"] == "promote":
                before = [*before, version] if version else []
            else:
                before = before[: -len(event["undone"])]
            version, before = event["version"], before[-100:]
            if before != event["before"]:
                self.counts.add_fault("wrong", f"the log: {event}")
                return
        moves = self.counts.promotions + self.counts.rollbacks
        if numbers != [*range(1, moves + 2)]:
            self.counts.add_fault("wrong", f"{len(numbers)} events of {moves}")


def _command_secs(root: str) -> float:
    """Returns how long a rollback takes as a command of its own."""
    command = [sys.executable, "-c", "from tfdistill.commands import line; "]
    command[-1] += "line.PROGRAM.start()"
    began = time.monotonic()
    subprocess.run(
        [*command, "rollback", root],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.monotonic() - began


def run(directory: str, *, kills: int, seed: int) -> Counts:
    """Kills this many commands of a new line, and returns what was seen."""
    killer = _Killer(directory, seed=seed)

    def read() -> Any:
        reader = _Reader(killer.line.root)
        return reader.look, lambda: dataclasses.asdict(reader.counts)

    reader = forks.Reader(read)
    try:
        told = 0
        while killer.counts.kills < kills:
            killer.turn()
            if killer.counts.kills >= told + max(1, kills // 10):
                told = killer.counts.kills
                logging.info("%d of %d commands killed", told, kills)
    finally:
        told_by_reader = reader.stop()
    counts = killer.counts
    killer.check_log()
    if told_by_reader is None:
        counts.add_fault("torn", "the reader failed")
        return counts
    seen = Counts(**told_by_reader)
    counts.reads, counts.torn = seen.reads, counts.torn + seen.torn
    counts.backwards, counts.faults = (
        seen.backwards,
        counts.faults + seen.faults,
    )
    return counts


def _add_options(options: programs.Flags) -> None:
    options.add("kills", "how many commands are killed", 2000, quick=100)
    options.add("seed", "of the moments of the kills", 0)


def _run(options: programs.Options) -> int:
    """Returns 0 if nothing bad was seen, else 1."""
    record: dict[str, Any] = {"benchmark": "line_kills"}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = run(directory, kills=options.kills, seed=options.seed)
        record |= dataclasses.asdict(found)
        line = store.Line(f"{directory}/line")
        _promote_two(line, f"{directory}/run/exchange/group_0")
        record["rollback_command_secs"] = round(_command_secs(line.root), 3)
    for name in ("rollback_secs", "switch_secs"):
        record[name] = _quantiles(record[name])
    record["secs"] = round(time.monotonic() - begin, 1)
    # Only now: with NumPy's threads this process could not fork safely.
    from benchmarks import measure

    record["machine"] = measure.machine()
    print(json.dumps(record))
    return 1 if found.torn or found.backwards or found.wrong else 0


def _quantiles(secs: Sequence[float]) -> dict[str, float]:
    """Returns what half, 99% and all of them took at most."""
    ordered = sorted(secs)
    places = {"half": 0.5, "99%": 0.99, "slowest": 1.0}
    return {
        name: round(ordered[round(place * (len(ordered) - 1))], 3)
        for name, place in places.items()
        if ordered
    }


def _promote_two(line: store.Line, exported: str) -> None:
    for step in range(2):
        line.promote(line.next_number(), f"{exported}/{step}")


PROGRAM = programs.Program(
    name="python -m benchmarks.line_kills",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
