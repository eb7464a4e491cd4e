"""Where a group's backups lie, and the one that all its workers resume from.

The chief chooses and shares its choice by a collective. So does each worker
that fails, so that none is left waiting for it.
"""

import dataclasses
import json
import logging
import os
import pathlib
import typing
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdistill.exchange import commit
from tfdistill.exchange import filesystem
from tfdistill.exchange import publisher
from tfdistill.exchange import versions
from tfdistill.exports import server_bundle
from tfdistill.training import steps

_log = logging.getLogger(__name__)
# What is no variable, and a copy of what the manifest says.
HOST, _COPY = "host.json", "backup.json"
# Begins the names of a checkpoint's files.
PREFIX = "state"


class State(typing.Protocol):
    """All that a training changes, as a checkpoint in a directory.

    `replicas.ReplicaState`, and under parameter servers `ServerState`.
    """

    def specs(self) -> dict[str, dict[str, Any]]:
        """Returns shape and dtype of each tensor by its key."""

    def snapshot(self) -> Any:
        """Takes the current values, between two steps."""

    def write(self, directory: str, snapshot: Any) -> None:
        """Writes what `snapshot` returned, in a directory that exists."""

    def read(self, directory: str) -> Any:
        """Reads what `write` wrote, as a snapshot; changes nothing."""

    def assign(self, snapshot: Any) -> None:
        """Gives the variables the values that `read` returned."""


def point_of(version: versions.Version) -> steps.TrainingPoint:
    """Returns where training stood at a backup."""
    found = version.manifest.extras
    return steps.TrainingPoint(
        step=version.step,
        epoch=found["epoch"],
        batch=found["batch"],
        # One of them; the other says nothing under the strategy of then.
        metric_sums=tuple(found.get("metric_sums", ())),
        data=dict(found.get("data", {})),
    )


def _extras(point: steps.TrainingPoint) -> dict[str, Any]:
    return {
        "epoch": point.epoch,
        "batch": point.batch,
        "metric_sums": list(point.metric_sums),
        "data": dict(point.data),
    }


class BackupStore(publisher.Exchange):
    """Backups on disk, as versions of an exchange with one group.

    A backup is put together out of sight, checksummed, and becomes visible by
    one rename.

    Attributes:
        num_written, num_failed: Backups that `save` wrote, and could not write.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_to_keep: int = 2
    ) -> None:
        """Touches no storage; `directory` is this group's own."""
        if filesystem.in_object_store(directory):
            raise ValueError(
                "A backup's directory must be one that TensorFlow's own "
                f"checkpoints can be read from; received {directory}. Give a "
                "directory that all workers share; only the exchange may be "
                "in such a store."
            )
        super().__init__(
            directory,
            max_to_keep=max_to_keep,
            min_keep_secs=0.0,
            # The group's own files outlive the run and its key.
            key=None,
        )
        self.num_written = self.num_failed = 0
        # The weight, and the step, of a backup that was refused for it.
        self.not_finite: str | None = None

    def save(
        self,
        state: State,
        snapshot: Any,
        point: steps.TrainingPoint,
        *,
        host: Mapping[str, Any],
    ) -> None:
        """Writes a backup, then prunes the oldest; counts and logs a failure.

        `host` is what is no variable, as JSON.
        """
        step, variables, extras = point.step, state.specs(), _extras(point)

        def write(directory: str) -> None:
            state.write(directory, snapshot)
            # Checksums guard the files, and nothing the manifest itself.
            said = _said(step, variables, extras)
            for name, content in ((HOST, host), (_COPY, said)):
                path = pathlib.Path(directory, name)
                path.write_text(json.dumps(content), encoding="utf-8")

        try:
            self.publish(
                write,
                group=0,
                step=step,
                variables=variables,
                extras=extras,
            )
            self.num_written += 1
        except versions.VersionExistsError:
            _log.info("Step %d was backed up before.", step)
        except versions.ExportError as error:
            self.num_failed += 1
            goes_on = ", training goes on"
            if isinstance(error.__cause__, server_bundle.NotFiniteError):
                self.not_finite = f"{error.__cause__.name} at step {step}"
                goes_on = ""
            _log.warning(
                "Step %d was not backed up%s: %s", step, goes_on, error
            )

    def newest(self) -> versions.Version | None:
        """Returns the newest complete backup, all of whose bytes were checked.

        Those that are newer and damaged are logged and removed: they can
        never be used, and would push complete ones out when the next are kept.
        None if there is no complete one.
        """
        damaged, committed = [], self.steps(0)
        for step in reversed(self._listed(0)):
            if step not in committed:
                _log.warning(
                    "Trying the backup before: %s has no manifest.",
                    self.version_path(0, step),
                )
                continue
            try:
                version = self.open(0, step)
                self.verify(version)
                self._check_manifest(version)
            except versions.CorruptVersionError as error:
                _log.warning("Trying the backup before: %s", error)
                damaged.append(self.version_path(0, step))
                continue
            for path in damaged:
                self._remove(path)
            return version
        if damaged:
            _log.warning(
                "No complete backup is left in %s: training starts at step 0.",
                self.group_path(0),
            )
        return None

    def _check_manifest(self, version: versions.Version) -> None:
        blocks = self._file_system.blocks(f"{version.path}/{_COPY}")
        found = version.manifest
        said = _said(version.step, found.variables, found.extras)
        if json.loads(b"".join(blocks)) != json.loads(json.dumps(said)):
            raise versions.CorruptVersionError(
                f"The manifest of {version.path} differs from its copy in "
                f"{_COPY}."
            )

    def _remove(self, path: str) -> None:
        try:
            commit.remove_version(self._file_system, path)
        except OSError as error:
            _log.warning("Could not remove %s: %s", path, error)


def _said(step: int, variables: Any, extras: Any) -> dict[str, Any]:
    return {
        "step": step,
        "variables": {key: dict(entry) for key, entry in variables.items()},
        "extras": dict(extras),
    }


def check_same(version: versions.Version, state: State) -> None:
    """Checks that a backup is of this model and optimizer, by their specs."""
    theirs, ours = version.manifest.variables, state.specs()
    found = {key: dict(entry) for key, entry in theirs.items()}
    if found == ours:
        return
    keys = sorted(found.keys() ^ ours.keys()) or [
        key for key in sorted(ours) if found[key] != ours[key]
    ]
    raise ValueError(
        f"The backup {version.path} must be of this model and optimizer; "
        f"received one that differs in {keys[:5]}. Use another directory, or "
        "the model and optimizer of the backup."
    )


_NONE = -1


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A backup to resume from: where training stood, what was in Python."""

    version: versions.Version
    point: steps.TrainingPoint
    host: dict[str, Any]


class BackupChoice:
    """Lets a group agree on a backup; all workers call at one point."""

    def __init__(
        self,
        store: BackupStore,
        gather: Callable[[int | bool], list[int]],
        *,
        is_chief: bool,
    ) -> None:
        """Reads nothing yet; `gather` returns the value of every worker."""
        self._store, self._gather, self._is_chief = store, gather, is_chief

    def choose(self) -> Chosen | None:
        """Returns the newest complete backup, the same on all workers.

        None if there is none. It is an error on all workers if one of them
        cannot read the backup that the chief has chosen.
        """
        version: versions.Version | None = None
        failure: Exception | None = None
        if self._is_chief:
            try:
                version = self._store.newest()
            except OSError as error:
                failure = error
        self.fail_together(failure)
        step = max(self._gather(version.step if version else _NONE))
        if step == _NONE:
            return None
        chosen = None
        try:
            chosen = read(version or self._store.open(0, step))
        except (
            KeyError,
            OSError,
            RuntimeError,
            ValueError,
            tf.errors.OpError,
        ) as error:
            failure = error
        self.fail_together(failure)
        return chosen

    def fail_together(self, failure: Exception | None) -> None:
        """Raises on all workers if one of them has a failure."""
        failed = self._gather(failure is not None)
        if failure is not None:
            raise RuntimeError(
                f"The backups in {self._store.root} must be readable on every "
                f"worker; received {type(failure).__name__}: {failure}. Give "
                "a directory that all of them see."
            ) from failure
        if any(failed):
            replicas = [i for i, is_bad in enumerate(failed) if is_bad]
            raise RuntimeError(
                f"The workers of the replicas {replicas} could not read the "
                f"backup in {self._store.root}; their logs say why."
            )


def read(version: versions.Version) -> Chosen:
    """Reads what a backup says of a training, but not its variables."""
    with tf.io.gfile.GFile(f"{version.path}/{HOST}") as file:
        host = json.loads(file.read())
    return Chosen(version, point_of(version), host)
