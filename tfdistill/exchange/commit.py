"""How a version becomes visible as a whole, and how it is removed."""

import contextlib
import dataclasses
import functools
import logging
import tempfile
import uuid
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

from tfdistill.exchange import claim
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import signing
from tfdistill.exchange import versions

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Retention:
    """Which versions of a group may go.

    A version may go once `max_to_keep` newer ones exist and `min_keep_secs`
    have passed since this process first saw a newer one, by its own clock.
    Times written by other machines play no part, and a restarted publisher
    starts counting again.
    """

    max_to_keep: int
    min_keep_secs: float
    clock: Callable[[], float]

    def __post_init__(self) -> None:
        """Checks the numbers."""
        if type(self.max_to_keep) is not int or self.max_to_keep < 2:
            raise ValueError(
                "`max_to_keep` must be an integer >= 2, or the version that a "
                "peer is reading could be removed as the next one appears; "
                f"received {self.max_to_keep!r}."
            )
        if not self.min_keep_secs >= 0:
            raise ValueError(
                "`min_keep_secs` must be >= 0 seconds; received "
                f"{self.min_keep_secs!r}."
            )

    def expired(
        self, since: dict[Any, float], unneeded: Iterable[Any]
    ) -> set[Any]:
        """Returns which names have been unneeded for `min_keep_secs`.

        `since` holds since when each has been, from call to call.
        """
        now, before = self.clock(), dict(since)
        since.clear()
        since.update({name: before.get(name, now) for name in unneeded})
        return {n for n, t in since.items() if now - t >= self.min_keep_secs}


def sweep(file_system: filesystem.FileSystem, directory: str) -> None:
    """Removes from a group's directory what crashed publishers left."""
    try:
        names = file_system.list_dir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in sorted(names):
        path = f"{directory}/{name}"
        if name.startswith((".trash-", ".tmp-")) or (
            versions.step_of_name(name) is not None
            and is_committed(file_system, path) is False
        ):
            _try_to(file_system.remove_tree, path)


def remove_version(file_system: filesystem.FileSystem, directory: str) -> None:
    """Removes a version so that no reader ever takes a part for the whole."""
    parent, _, name = directory.rpartition("/")
    trash = f"{parent}/.trash-{name}-{uuid.uuid4().hex}"
    if file_system.move(directory, trash):
        file_system.remove_tree(trash)
        return
    try:
        file_system.remove(f"{directory}/{manifest.FILE_NAME}")
    except FileNotFoundError:
        pass  # A part of a version: what never was published.
    file_system.remove_tree(directory)


def try_to_remove_version(
    file_system: filesystem.FileSystem, directory: str
) -> None:
    """Removes a version; if that fails, only warns."""
    _try_to(functools.partial(remove_version, file_system), directory)


def is_committed(
    file_system: filesystem.FileSystem, directory: str
) -> bool | None:
    """Whether a directory has a manifest; None for what is foreign."""
    try:
        if not file_system.stat(directory).is_dir:
            return None
    except FileNotFoundError:
        return None
    try:
        found = file_system.stat(f"{directory}/{manifest.FILE_NAME}")
        return found.is_file or None
    except FileNotFoundError:
        return False


def committed(
    file_system: filesystem.FileSystem, directory: str, steps: Iterable[int]
) -> list[int]:
    """Returns the steps of a directory that are versions, as far as is seen."""
    found = []
    for step in steps:
        with contextlib.suppress(OSError):
            if is_committed(file_system, f"{directory}/{step}"):
                found.append(step)
    return found


def _try_to(
    call: Callable[[str], None], path: str, what: str = "remove"
) -> None:
    try:
        call(path)
    except OSError as error:
        _log.warning("Could not %s %s: %s", what, path, error)


class Staging:
    """A temporary directory that becomes a version, or leaves no trace.

    If directories can be renamed it lies beside the version, so that one
    rename publishes it. Otherwise it is a local directory (`TMPDIR` says
    where), copied file by file with the manifest last.
    """

    def __init__(
        self,
        file_system: filesystem.FileSystem,
        final: str,
        *,
        incarnation: str,
    ) -> None:
        self._target = file_system
        self._final = final
        self._parent, _, name = final.rpartition("/")
        self._source: filesystem.FileSystem = filesystem.LocalFileSystem()
        if file_system.renames_atomically:
            self._source = file_system
            self.path = f"{self._parent}/.tmp-{name}-{incarnation}"
            file_system.remove_tree(self.path)
            file_system.make_dirs(self.path)
        else:
            self.path = tempfile.mkdtemp(prefix="tfdistill-export-")

    def files(self) -> dict[str, manifest.FileEntry]:
        """Returns size and checksum of each regular file, and syncs them."""
        entries = {}
        directories = [self.path]
        for name, found in filesystem.walk(self._source, self.path):
            path = f"{self.path}/{name}"
            if found.is_dir:
                directories.append(path)
                continue
            manifest.check_file_name(name)
            entries[name] = versions.checksum(self._source, path)
            self._sync(path)
        for directory in reversed(directories):
            self._sync(directory)
        return entries

    def commit(
        self, checked: manifest.Manifest, *, confirm: Callable[[], None]
    ) -> None:
        """Makes the version visible, with the entries that `files` returned.

        `confirm` is called before anything in sight is changed, and again
        right before the version comes into sight. What it raises ends the
        publication; after a `ClaimLostError` nothing in sight is touched.
        """
        text = checked.to_json().encode()
        confirm()
        self._clear()
        if self._source is self._target:
            self._target.write(f"{self.path}/{manifest.FILE_NAME}", [text])
            self._sync(self.path)
            confirm()
            if self._target.move(self.path, self._final):
                # Readers see the version by now: it can no longer fail.
                _try_to(self._target.sync, self._parent, "sync")
                return
        try:
            for name in sorted(checked.files):
                blocks = self._source.blocks(f"{self.path}/{name}")
                self._target.write(f"{self._final}/{name}", blocks)
            confirm()
            self._target.write(f"{self._final}/{manifest.FILE_NAME}", [text])
        except claim.ClaimLostError:
            raise  # Files there may be the new owner's by now.
        except BaseException:
            try_to_remove_version(self._target, self._final)
            raise

    def discard(self) -> None:
        """Removes the temporary directory if it is still there."""
        _try_to(self._source.remove_tree, self.path)

    def _clear(self) -> None:
        try:
            found = self._target.stat(self._final)
        except FileNotFoundError:
            return
        if not found.is_dir:
            raise NotADirectoryError(
                f"{self._final} must be absent or a directory, and is neither."
            )
        remove_version(self._target, self._final)

    def _sync(self, path: str) -> None:
        # Files copied elsewhere need not survive a crash here.
        if self._source is self._target:
            self._source.sync(path)


def publish(
    file_system: filesystem.FileSystem,
    path: str,
    write: Callable[[str], None],
    draft: manifest.Manifest,
    *,
    signer: signing.Signer | None,
    confirm: Callable[[], None],
) -> manifest.Manifest:
    """Makes a version of what `write` leaves in a directory.

    Returns the manifest with its files, signed if there is a signer; `confirm`
    is as for `Staging.commit`.
    """
    stage = Staging(file_system, path, incarnation=draft.incarnation)
    try:
        write(stage.path)
        files = stage.files()
        if not files:
            raise versions.ExportError(
                f"`write` must leave at least one file in {stage.path}; it "
                "left no file."
            )
        checked = dataclasses.replace(draft, files=files)
        if signer is not None:
            checked = signer.sign(checked)
        stage.commit(checked, confirm=confirm)
    finally:
        stage.discard()
    return checked
