"""Where a group's backups lie, and the one that all its workers resume from.

The chief chooses and shares its choice by a collective. So does each worker
that fails, so that none is left waiting for it.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import typing
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import commit
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import server_bundle
from tfdistill.training import steps

_log = logging.getLogger(__name__)
_HOST = "host.json"
# Begins the names of a checkpoint's files.
PREFIX = "state"
_NONE = -1
# Returns the value of every worker; all call it at one point.
Gather: typing.TypeAlias = Callable[[int | bool], list[int]]


class State(typing.Protocol):
    """All that a training changes, as a checkpoint in a directory.

    `replicas.ReplicaState`, and under parameter servers `ServerState`.
    """

    def specs(self) -> dict[str, dict[str, Any]]:
        """Returns shape and dtype of each tensor by its key."""

    def layout(self) -> dict[str, Any]:
        """Returns, as JSON, what a later training may begin with.

        The `optimizer`'s class; by kind, the name of each key that is
        `carried` over, in the order of the variables; and for each of the
        `tables` the `sizes` of its fields, its `sharding`, and as `parts` the
        keys of its shards, and of each of their slots.
        """

    def snapshot(self) -> Any:
        """Takes the current values, between two steps."""

    def write(self, directory: str, snapshot: object) -> None:
        """Writes what `snapshot` returned, in a directory that exists."""

    def read(self, directory: str) -> Any:
        """Reads what `write` wrote, as a snapshot; changes nothing."""

    def assign(self, snapshot: object) -> None:
        """Gives the variables the values that `read` returned."""

    def begin_with(self, warm: object) -> None:
        """Gives them the values of a `warm_start.WarmStart`."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A backup to resume from: where training stood, what was in Python."""

    version: versions.Version
    point: steps.TrainingPoint
    host: dict[str, Any]

    def check_same(self, state: State) -> None:
        """Checks that it is of this model and optimizer, by their specs."""
        found, ours = self.host["variables"], state.specs()
        if found == ours:
            return
        keys = sorted(found.keys() ^ ours.keys()) or [
            key for key in sorted(ours) if found[key] != ours[key]
        ]
        raise ValueError(
            f"The backup {self.version.path} must be of this model and "
            f"optimizer; it differs in {keys[:5]}. Use another directory, or "
            "the model and optimizer of the backup."
        )


class BackupStore(publisher.Exchange):
    """Backups on disk, as versions of an exchange with one group.

    A backup is put together out of sight, checksummed, and becomes visible by
    one rename.

    Attributes:
        num_failed: Backups that `save` could not write.
        replaces: Whether `save` replaces one of the same step.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int = 2,
        removes_damaged: bool = True,
    ) -> None:
        """Touches no storage; `directory` is this group's own.

        Unless it `removes_damaged`, `newest` leaves all that is there.
        """
        if filesystem.in_object_store(directory):
            raise ValueError(
                "A backup's directory must be readable by TensorFlow's own "
                f"checkpoints; received {directory}. Use a directory that all "
                "workers share; only the exchange may be in such a store."
            )
        super().__init__(
            directory,
            max_to_keep=max_to_keep,
            min_keep_secs=0.0,
            # The group's own files outlive the run and its key.
            key=None,
        )
        self._removes_damaged = removes_damaged
        self.num_failed = 0
        self.replaces = False
        # The weight, and the step, of a backup that was refused for it.
        self.not_finite: str | None = None

    def save(
        self,
        state: State,
        snapshot: object,
        point: steps.TrainingPoint,
        *,
        host: Mapping[str, Any],
    ) -> None:
        """Writes a backup, then prunes the oldest; counts and logs a failure.

        `host` is the state kept outside of variables, as JSON.
        """
        step = point.step
        # Not in the manifest, which no checksum guards.
        said = {
            "point": dataclasses.asdict(point),
            "variables": state.specs(),
            "layout": state.layout(),
            **host,
        }

        def write(directory: str) -> None:
            try:
                state.write(directory, snapshot)
            except server_bundle.NotFiniteError as error:
                self.not_finite = f"{error.name} at step {step}"
                raise
            path = pathlib.Path(directory, _HOST)
            path.write_text(json.dumps(said), encoding="utf-8")

        try:
            self.publish(write, group=0, step=step)
        except versions.VersionExistsError:
            _log.info("Step %d was backed up before.", step)
        except versions.ExportError as error:
            self.num_failed += 1
            goes_on = "" if self.not_finite else ", training continues"
            _log.warning(
                "Step %d was not backed up%s: %s", step, goes_on, error
            )

    def _refuse_existing(self, group: int, step: int) -> None:
        if not self.replaces:
            super()._refuse_existing(group, step)

    def newest(self) -> versions.Version | None:
        """Returns the newest complete backup, all of whose bytes were checked.

        Those that are newer and damaged are logged and removed: they can
        never be used, and would push complete ones out when the next are kept.
        None if there is no complete one.
        """
        damaged = []
        for step in reversed(self.listed(0)):
            try:
                version = self.open(0, step)
                self.verify(version)
            except versions.VersionNotFoundError as error:
                _log.warning("Trying the backup before: %s", error)
            except versions.CorruptVersionError as error:
                _log.warning("Trying the backup before: %s", error)
                damaged.append(self.version_path(0, step))
            else:
                for path in damaged if self._removes_damaged else ():
                    commit.try_to_remove_version(self._file_system, path)
                return version
        if damaged:
            _log.warning(
                "There is no complete backup left in %s, so training starts "
                "at step 0.",
                self.group_path(0),
            )
        return None

    def read(self, version: versions.Version) -> Chosen:
        """Reads what a backup says of a training, but not its variables."""
        blocks = self._file_system.blocks(f"{version.path}/{_HOST}")
        host = json.loads(b"".join(blocks))
        point = host.pop("point")
        point["metric_sums"] = tuple(point["metric_sums"])
        return Chosen(version, steps.TrainingPoint(**point), host)


def choose(
    store: BackupStore, gather: Gather, *, is_chief: bool
) -> Chosen | None:
    """Returns the newest complete backup, the same on all workers.

    None if there is none. It is an error on all workers if one of them cannot
    read the backup that the chief has chosen.
    """
    version: versions.Version | None = None
    with together(store, gather):
        if is_chief:
            version = store.newest()
    step = max(gather(version.step if version else _NONE))
    if step == _NONE:
        return None
    with together(store, gather):
        chosen = store.read(version or store.open(0, step))
    return chosen


@contextlib.contextmanager
def together(store: BackupStore, gather: Gather) -> Iterator[None]:
    """Raises on all workers if one of them fails in it."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = gather(failure is not None)
    if failure is not None:
        raise RuntimeError(
            f"The backups in {store.root} must be readable on every worker; "
            f"received {type(failure).__name__}: {failure}. Use a directory "
            "that all workers can read."
        ) from failure
    if any(failed):
        workers = [i for i, is_bad in enumerate(failed) if is_bad]
        raise RuntimeError(
            f"The workers {workers} could not read the backup in {store.root}; "
            "their logs have the reason."
        )
