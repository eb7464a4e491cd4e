"""Published versions as a reader sees them: list, open, verify.

The directory `<root>/group_<g>/<step>/` is a version once it holds a valid
manifest, and whole once each file agrees with it; docs/protocol.md has the
rules. Nothing found there is trusted, and links are not followed.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import notes
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import run_files
from tfdistill.system import untrusted

_log = logging.getLogger(__name__)


class VersionReader:
    """Reads the versions of any group. Threads may share one."""

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        *,
        key: signing.KeyOption = "environment",
        file_system: filesystem.FileSystem | None = None,
    ) -> None:
        """Touches no storage but the key's file.

        Args:
          root: A directory, or a URL such as `s3://`, `gs://` or `az://` with
            the extra `cloud`. It need not exist.
            None, as for a single group without a launcher: nothing is ever
            found, and `enabled` is False.
          key: Versions that are not signed with it are refused; see
            `Exchange`.
          file_system: Used with `root` as it is. Default: what `root` asks for.
        """
        self.enabled = root is not None
        if root is None:
            file_system, root = filesystem.LocalFileSystem(), ""
        if file_system is None:
            file_system, root = filesystem.for_root(root)
        self.root = os.fspath(root)
        self._file_system = file_system
        self._signer = signing.signer_for(key) if self.enabled else None
        self._warns = key is not None
        self._passed_over: Counter[tuple[int, int]] = Counter()

    @property
    def signer(self) -> signing.Signer | None:
        """What signs and checks with this run's key.

        None without a key: then no signature is checked.
        """
        return self._signer

    def groups(self) -> list[int]:
        """Returns the groups that have a directory; OSError without a root."""
        found = map(run_files.group_of, self._file_system.list_dir(self.root))
        return sorted(group for group in found if group is not None)

    def notes(self, group: int) -> notes.Notes:
        """Returns the notes that a group's processes leave for others."""
        return notes.Notes(
            self._file_system,
            self.group_path(group),
            group=group,
            signer=self._signer,
        )

    def group_path(self, group: int) -> str:
        """Returns the directory of a group's versions."""
        name = run_files.group_name(versions.index("group", group))
        return f"{self.root}/{name}"

    def version_path(self, group: int, step: int) -> str:
        """Returns the directory of one version, whether it exists or not."""
        return f"{self.group_path(group)}/{versions.index('step', step)}"

    def steps(self, group: int) -> list[int]:
        """Returns the steps of the group's committed versions, ascending.

        A version counts once its manifest is there; what is not a version,
        and what cannot be looked at right now, is left out.

        Raises:
          OSError: If the group's directory is there and cannot be listed.
        """
        return [s for s in self._listed(group) if self._committed(group, s)]

    def open(self, group: int, step: int) -> versions.Version:
        """Returns a version by reading its manifest, and nothing else of it.

        Raises:
          VersionNotFoundError: If there is no such version.
          CorruptVersionError: If its manifest is not one to trust.
          OSError: If the storage fails.
        """
        path = self.version_path(group, step)
        try:
            for directory in (self.group_path(group), path):
                if not self._file_system.stat(directory).is_dir:
                    raise NotADirectoryError("links are not followed")
            text = filesystem.read(
                self._file_system,
                f"{path}/{manifest.FILE_NAME}",
                max_bytes=manifest.MAX_BYTES,
            )
            found = manifest.Manifest.from_json(text)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise versions.VersionNotFoundError(
                f"There is no version at {path}: {error}. It was not published "
                "yet, or was pruned."
            ) from error
        except (
            manifest.ManifestError,
            filesystem.NotRegularFileError,
        ) as error:
            raise versions.CorruptVersionError(
                f"{path}/{manifest.FILE_NAME} must be a valid manifest: {error}"
            ) from error
        if (found.group, found.step) != (group, step) or not found.files:
            raise versions.CorruptVersionError(
                f"The manifest of {path} must name its files, group {group} "
                f"and step {step}; received {len(found.files)} files, group "
                f"{found.group} and step {found.step}. Was it copied there?"
            )
        version = versions.Version(group, step, path, found)
        self._check_signature(version)
        return version

    def latest(
        self,
        group: int,
        *,
        newer_than: int = -1,
        wanted: Callable[[versions.Version], bool] = lambda version: True,
    ) -> versions.Version | None:
        """Returns the newest version whose files are all there, or None.

        Newest means the highest step. Sizes are compared and checksums are
        not: call `verify` before use. Versions that are incomplete, or whose
        manifest is not one to trust, are passed over with a warning if they
        stay so, and the next older one is taken.

        Args:
          group: The group.
          newer_than: Step that the version must exceed. Default: any version.
          wanted: Which versions count, by their manifests. Default: all.

        Raises:
          OSError: If the storage fails; what was found before may still hold.
        """
        for step in reversed(self._listed(group)):
            if step <= newer_than:
                break
            try:
                version = self.open(group, step)
                if wanted(version):
                    versions.check_listing(self._file_system, version)
                    return version
            except versions.VersionNotFoundError:
                continue
            except versions.CorruptVersionError as error:
                self._log_once(group, step, error)
        return None

    def verify(self, version: versions.Version) -> None:
        """Compares each file of a version with its manifest.

        Raises:
          CorruptVersionError: If a file is missing, is not a regular file,
            differs in size or checksum, or is not in the manifest: the message
            names the file and both values.
          VersionNotFoundError: If the version was pruned or replaced meanwhile.
          OSError: If the storage fails; the version may well be good.
        """
        try:
            versions.check_listing(self._file_system, version)
            versions.check_content(self._file_system, version)
        except versions.CorruptVersionError as error:
            if self._is_gone(version):
                raise versions.VersionNotFoundError(
                    f"{version.path} was pruned or replaced while it was "
                    "read; take the newest version instead."
                ) from error
            raise

    def fetch(self, version: versions.Version, directory: str) -> None:
        """Copies a version's files to an empty local directory, verified.

        Raises:
          CorruptVersionError: If a file differs from its manifest.
          OSError: If the storage or the disk fails.
        """
        versions.copy_content(self._file_system, version, directory)

    def _check_signature(self, found: versions.Version) -> None:
        if self._signer is not None:
            try:
                self._signer.check(found.manifest)
            except signing.SignatureError as error:
                raise versions.CorruptVersionError(
                    f"The manifest of {found.path} cannot be trusted: {error}"
                ) from error
        elif self._warns and signing.is_signed(found.manifest):
            self._warns = False
            _log.warning(
                "Versions in %s are signed, and this process has no key: their "
                "signatures are not checked. Set %s.",
                self.root,
                signing.FILE_VARIABLE,
            )

    def _log_once(self, group: int, step: int, error: Exception) -> None:
        # The first time it may be about to come, or to go.
        self._passed_over[group, step] += 1
        is_second = self._passed_over[group, step] == 2
        level = logging.WARNING if is_second else logging.DEBUG
        _log.log(level, "Skipping a version: %s", error)

    def _listed(self, group: int) -> list[int]:
        if not self.enabled:
            return []
        try:
            names = self._file_system.list_dir(self.group_path(group))
        except (FileNotFoundError, NotADirectoryError):
            return []
        steps = [versions.step_of_name(name) for name in names]
        return sorted(step for step in steps if step is not None)

    def _committed(self, group: int, step: int) -> bool:
        path = self.version_path(group, step)
        try:
            is_dir = self._file_system.stat(path).is_dir
            found = self._file_system.stat(f"{path}/{manifest.FILE_NAME}")
        except OSError:
            return False
        return is_dir and found.is_file

    def _is_gone(self, version: versions.Version) -> bool:
        try:
            return self.open(version.group, version.step) != version
        except versions.VersionNotFoundError:
            return True
        except versions.CorruptVersionError:
            return False


class NewestVersions:
    """The newest version of each group, looked for without a wait.

    For people, so whoever signed it. A thread reads, because a storage that
    hangs must not stop its user.
    """

    def __init__(
        self,
        root: str,
        *,
        interval_secs: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        file_system: filesystem.FileSystem | None = None,
        must_be_there: bool = False,
    ) -> None:
        """Touches no storage yet.

        Two looks are at least `interval_secs` apart. If the directory
        `must_be_there`, it is a `problem` that it is not; otherwise the first
        version makes it.
        """
        # Why the last look failed, and which groups it has seen.
        self.problem = ""
        self.groups: Collection[int] = ()
        self._root = root
        self._interval_secs = interval_secs
        self._clock = clock
        self._file_system = file_system
        self._must_be_there = must_be_there
        self._thread: threading.Thread | None = None
        self._began = -float("inf")
        self._found: Mapping[int, versions.Version] = {}

    def look(
        self, groups: Collection[int], *, limit_secs: float = 0.0
    ) -> Mapping[int, versions.Version]:
        """Returns what the last look has found, and starts one if it is due.

        Waits up to `limit_secs` for the present look, which looks for `groups`
        besides those that are there.
        """
        now = self._clock()
        running = self._thread is not None and self._thread.is_alive()
        if not running and now - self._began >= self._interval_secs:
            self._began = now
            self._thread = threading.Thread(
                target=self._look, args=(list(groups),), daemon=True
            )
            self._thread.start()
        if limit_secs and self._thread is not None:
            self._thread.join(limit_secs)
        if self._thread is not None and self._thread.is_alive():
            waited = self._clock() - self._began
            if waited >= (limit_secs or self._interval_secs):
                self.problem = (
                    f"{self._root} has not answered for {waited:.0f} s"
                )
        return dict(self._found)

    def _look(self, wanted: Collection[int]) -> None:
        try:
            reader = VersionReader(
                self._root, key=None, file_system=self._file_system
            )
            try:
                there = reader.groups()
            except (FileNotFoundError, NotADirectoryError):
                if self._must_be_there:
                    raise
                there = []
            found = {
                group: newest
                for group in sorted({*wanted, *there})
                if (newest := reader.latest(group)) is not None
            }
        except (ImportError, OSError, ValueError) as error:
            self.problem = untrusted.one_line(f"{self._root}: {error}")
            return
        self.groups, self._found, self.problem = there, found, ""
