"""Watches, all along a round, what must hold whatever the fault.

Versions are whole and never go backwards, one publisher at a time; teachers
are versions that were whole; answers of peers are of steps that were made; no
version is mixed twice; losses are finite.
"""

import collections
import contextlib
import json
import math
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import tfdistill
from benchmarks.punish import run_view
from tfdistill.exchange import versions
from tfdistill.system import run_files

# What was read just before it was damaged may be put in place later.
_DAMAGE_GRACE_SECS = 10.0


class Watch:
    """Looks at a run again and again; `violations` says what was wrong.

    Attributes:
        violations: One line for each thing that should not have been.
        num_versions: Versions that were read and verified.
        num_records: Lines of the groups' logs that were checked.
        num_mixes: Mixes of versions that were checked.
    """

    def __init__(self, view: run_view.RunView) -> None:
        """Looks at nothing yet.

        Args:
            view: The run.
        """
        self._view = view
        self._exchange = tfdistill.Exchange(view.exchange, key=view.key)
        # By group and step: whose version it is, and when we damaged it.
        self._published: dict[tuple[int, int], str] = {}
        self._damaged: dict[tuple[int, int], float] = {}
        groups = range(view.num_groups)
        self._publishers: list[list[str]] = [[] for _ in groups]
        self._newest = [-1 for _ in groups]
        self._oldest = [
            max(self._exchange.steps(group), default=-1) for group in groups
        ]
        self._last_steps: list[int | None] = [None for _ in groups]
        self._last_times = [0.0 for _ in groups]
        # Groups whose disk was full since they started: lines may be lost, also
        # one that tells of a start.
        self._filled = set[int]()
        self._stores = [
            tfdistill.Exchange(view.group_dir(group) / "backup", key=None)
            for group in groups
        ]
        # Of each group, the steps that it has backed up, and since when.
        self._backups: list[dict[int, float]] = [{} for _ in groups]
        # Group, its peer and the peer's version: known uses, and new ones.
        self._uses: set[tuple[int, int, int]] = set()
        self._to_check: list[tuple[float, tuple[int, int, int]]] = []
        # Of groups whose peers send predictions, what they last said of these.
        self._peers: dict[int, list[dict[str, Any]]] = {}
        self.violations: list[str] = []
        self.num_versions = 0
        self.num_records = 0
        self.num_mixes = 0

    def damaged(self, group: int, step: int) -> None:
        """Takes in that a version's files were damaged just now."""
        self._damaged[group, step] = time.time()

    def filled(self, group: int) -> None:
        """Takes in that a group's disk is full from now on for a while."""
        self._filled.add(group)

    def num_answers(self, group: int) -> list[int] | None:
        """Returns how often each peer of a group has sent predictions.

        None for a group that has peers of another kind.
        """
        peers = self._peers.get(group)
        return (
            None if peers is None else [peer["num_answers"] for peer in peers]
        )

    def tell(self, violation: str) -> None:
        """Adds a violation, once."""
        if violation not in self.violations:
            self.violations.append(violation)

    def look_at_versions(self) -> None:
        """Verifies each version that is there for the first time."""
        for group in range(self._view.num_groups):
            with contextlib.suppress(OSError):  # Root away for a moment.
                for step in self._exchange.steps(group):
                    self._look_at(group, step)

    def _look_at(self, group: int, step: int) -> None:
        place = group, step
        known = self._published.get(place)
        if known is not None and place not in self._damaged:
            return
        try:
            version = self._exchange.open(group, step)
            incarnation = version.manifest.incarnation
            if known == incarnation:
                return  # Damaged by us, and still the same.
            self._exchange.verify(version)
        except versions.VersionNotFoundError:
            return
        except versions.CorruptVersionError as error:
            if known is None and self._is_still_broken(group, step):
                self.tell(f"a broken version is visible: {error}")
            return
        self.num_versions += 1
        self._published[place] = incarnation
        self._damaged.pop(place, None)
        if known is None:
            self._check_order(group, step, incarnation)

    def _is_still_broken(self, group: int, step: int) -> bool:
        """Whether it is after a while, neither removed nor damaged by us."""
        time.sleep(0.5)
        try:
            self._exchange.verify(self._exchange.open(group, step))
        except versions.VersionNotFoundError:
            return False
        except versions.CorruptVersionError:
            return (group, step) not in self._damaged
        return False

    def _check_order(self, group: int, step: int, incarnation: str) -> None:
        publishers = self._publishers[group]
        if not publishers or publishers[-1] != incarnation:
            if incarnation in publishers:
                self.tell(
                    f"group {group} has two publishers at a time: version "
                    f"{step} is from {incarnation} again"
                )
            publishers.append(incarnation)
        if step < self._newest[group]:
            self.tell(
                f"version {step} of group {group} appeared after "
                f"{self._newest[group]}"
            )
        self._newest[group] = max(step, self._newest[group])

    def look_at_logs(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Checks what the groups have logged, and yields it, by group."""
        for group in range(self._view.num_groups):
            for record in self._view.metrics(group):
                # A group that goes on from a backup rewrites its log up to
                # there: those lines are known.
                when = record.get("time", 0.0)
                if when > self._last_times[group]:
                    self._last_times[group] = when
                    self.num_records += 1
                    self._check_record(group, record)
                    yield group, record

    def _check_record(self, group: int, record: dict[str, Any]) -> None:
        step, last = record.get("step"), self._last_steps[group]
        if not isinstance(step, int):
            self.tell(f"group {group} logged no step: {record}")
            return
        if record.get("event") == "start":
            # It has no teacher yet; what it takes from now on counts anew.
            self._uses = {use for use in self._uses if use[0] != group}
            self._filled.discard(group)
            self._check_resume(group, step, record["time"])
        elif last is not None and step < last and group not in self._filled:
            self.tell(f"group {group} logged step {step} after {last}")
        self._last_steps[group] = step
        loss = record.get("loss", 0.0)
        if loss is None or not math.isfinite(loss):
            self.tell(f"group {group} has the loss {loss} at step {step}")
        teachers = record.get("teachers", ())
        peers = [teacher for teacher in teachers if "num_answers" in teacher]
        if peers:
            self._peers[group] = peers
        for teacher in teachers:
            version = int(teacher["step"])
            peer = run_files.group_of(str(teacher["name"]))
            if teacher in peers:
                if version > step:
                    self.tell(
                        f"group {group} has an answer of step {version} at "
                        f"step {step}"
                    )
            elif version >= 0 and peer is not None:
                use = group, peer, version
                if use not in self._uses:
                    self._uses.add(use)
                    self._to_check.append((record["time"], use))

    def look_at_backups(self) -> None:
        """Notes the backups that are complete now."""
        for store, known in zip(self._stores, self._backups, strict=True):
            for step in store.steps(0):
                known.setdefault(step, time.time())

    def _check_resume(self, group: int, step: int, when: float) -> None:
        """Checks that a start of a group lost no backup of the one before."""
        known = self._backups[group]
        due = max((s for s, seen in known.items() if seen < when), default=0)
        if step < due:
            self.tell(
                f"group {group} resumed at {step}, with a backup of {due}"
            )
        # What was trained after that step is no more.
        for later in [s for s in known if s > step]:
            del known[later]

    def check_teachers(self) -> None:
        """Checks the versions that groups have begun to learn from.

        Call it after `look_at_versions`, which must have seen them.
        """
        for when, (group, *place) in self._to_check:
            peer, version = place
            damaged = self._damaged.get((peer, version), math.inf)
            learns = f"group {group} learns from {version} of group {peer}"
            if when - damaged > _DAMAGE_GRACE_SECS:
                self.tell(f"{learns}, damaged {when - damaged:.0f} s before")
            elif (
                damaged == math.inf
                and (peer, version) not in self._published
                and version > self._oldest[peer]
            ):
                self.tell(f"{learns}, which nobody has seen published")
        self._to_check.clear()

    def check_mixes(self, group: int) -> None:
        """Checks what a group has mixed, at the end."""
        path = self._view.group_dir(group) / "backup" / "mixes.jsonl"
        mixes = _mixes(path) if path.exists() else {}
        self.num_mixes += sum(map(bool, mixes.values()))
        uses = collections.Counter(
            use for versions in mixes.values() for use in versions.items()
        )
        for name, version in (use for use, count in uses.items() if count > 1):
            self.tell(f"group {group} mixed version {version} of {name} again")


def _mixes(path: pathlib.Path) -> dict[int, dict[str, int]]:
    """Versions by group and step; of steps that were repeated, the last."""
    found = {}
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError):  # A crash has cut it short.
            entry = json.loads(line)
            found[int(entry["step"])] = dict(entry["versions"])
    return found
