"""Published versions as a reader sees them: list, open, verify, wait.

The directory `<root>/group_<g>/<step>/` is a version once it holds a valid
manifest, and whole once each file agrees with it; docs/protocol.md has the
rules. Nothing found there is trusted, and links are not followed.
"""

import dataclasses
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import notes
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import run_files
from tfdistill.system import untrusted

# Versions that an index does not name and that are looked at all the same, and
# those that are looked at once more although they were broken twice.
_MAX_LOOKS = 5
# In search of a good one, without an index that helps.
_MAX_NEW_LOOKS = 500
INDEX_NAME = "versions.json"
_MAX_INDEX_BYTES = 256 * 1024
# How far a group can be ahead of where it was seen last: at once, and a second.
_SPARE_STEPS = 1_000_000
_MAX_STEPS_PER_SEC = 10_000
_log = logging.getLogger(__name__)


class VersionReader:
    """Reads the versions of any group. Threads may share one."""

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        *,
        key: signing.KeyOption = "environment",
        file_system: filesystem.FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage but the key's file.

        Args:
          root: A directory, or a URL: `s3://` or `az://` with the extra
            `cloud`, or of a scheme that `tf.io.gfile` knows. It need not exist.
            None, as for a single group without a launcher: nothing is ever
            found, and `enabled` is False.
          key: Versions that are not signed with it are refused; see
            `Exchange`.
          file_system: Used with `root` as it is. Default: what `root` asks for.
          clock: Seconds of a clock that never goes backwards.
        """
        self.enabled = root is not None
        if root is None:
            file_system, root = filesystem.LocalFileSystem(), ""
        if file_system is None:
            file_system, root = filesystem.for_root(root)
        self.root = os.fspath(root)
        self._file_system = file_system
        self._signer = signing.signer_for(key) if self.enabled else None
        self._has_warned = False
        self._clock = clock
        self._newest: dict[int, versions.Version] = {}
        # When that version was seen first.
        self._seen: dict[int, float] = {}
        self._passed_over: dict[tuple[int, int], int] = {}

    @property
    def has_key(self) -> bool:
        """Whether versions that are not signed with this run's key are refused.

        Without a key no signature is checked.
        """
        return self._signer is not None

    @property
    def signer(self) -> signing.Signer | None:
        """What signs and checks with this run's key; None without one."""
        return self._signer

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

    def known_steps(self, group: int) -> list[int]:
        """Returns the steps of the group's own versions, ascending.

        In a run with a key those that the group's index names, whatever else
        lies there; `steps` without one.

        Raises:
          OSError: If the group's directory is there and cannot be listed.
        """
        index = self._read_index(group)
        return self.steps(group) if index is None else index

    def open(self, group: int, step: int) -> versions.Version:
        """Returns a version by reading its manifest, and nothing else of it.

        Raises:
          VersionNotFoundError: If there is no such version.
          CorruptVersionError: If its manifest is not one to trust.
          OSError: If the storage fails.
        """
        found = self._open_unsigned(group, step)
        self._check_signature(found)
        return found

    def _open_unsigned(self, group: int, step: int) -> versions.Version:
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
        return versions.Version(group, step, path, found)

    def latest(self, group: int) -> versions.Version | None:
        """Returns the newest version whose files are all there, or None.

        Newest means the highest step. Sizes are compared and checksums are
        not: call `verify` before use. Versions that are incomplete, or whose
        manifest is malformed, are passed over with a warning if they stay so,
        and the next older one is taken. While the storage fails, what was
        found last stays the answer; without a directory of the group the
        answer is None.
        """
        known = self._newest.get(group)
        found, uncertain = None, False
        try:
            for step in self._candidates(group, self._read_index(group)):
                try:
                    version = self.open(group, step)
                    self._refuse_far_ahead(known, version)
                    versions.check_listing(self._file_system, version)
                except versions.VersionNotFoundError:
                    continue
                except versions.CorruptVersionError as error:
                    self._log_once(group, step, error)
                except OSError as error:
                    _log.debug("Step %d, group %d: %s", step, group, error)
                    uncertain = True
                else:
                    found = version
                    break
        except OSError as error:
            _log.debug("Could not list group %d: %s", group, error)
            return known
        if uncertain and known and (not found or found.step < known.step):
            return known
        self._newest.pop(group, None)
        if found:
            self._newest[group] = found
            if found != known:
                self._seen[group] = self._clock()
        return found

    def _candidates(
        self, group: int, indexed: list[int] | None
    ) -> Iterator[int]:
        """Yields the steps to look at, the newest first, in bounded time.

        The group's index names its good versions, whatever lies beside them.
        The newest ones that it does not name may be newer than the index.
        """
        listed = self._listed(group)
        if indexed is not None:
            newer = [s for s in listed if s > max(indexed, default=-1)]
            yield from reversed(newer[-_MAX_LOOKS:])
            yield from reversed(indexed)
            return
        yield from reversed(listed[-_MAX_LOOKS:])
        left = _MAX_NEW_LOOKS
        for step in reversed(listed[:-_MAX_LOOKS]):
            if left and self._passed_over.get((group, step), 0) < 2:
                left -= 1
                yield step

    def _read_index(self, group: int) -> list[int] | None:
        """Returns the steps of the group's index, if there is one to trust.

        Without a key there is none.
        """
        if self._signer is None:
            return None
        path = f"{self.group_path(group)}/{INDEX_NAME}"
        try:
            text = filesystem.read(
                self._file_system, path, max_bytes=_MAX_INDEX_BYTES
            )
        except OSError:
            return None
        fields = untrusted.json_object(text) or {}
        steps = fields.get("steps")
        if not isinstance(steps, list) or not all(
            type(step) is int and 0 <= step <= versions.MAX_STEP
            for step in steps
        ):
            return None
        signed = _signed_index(group, steps)
        if not self._signer.proves(fields.get("signature"), signed):
            return None
        return sorted(steps)

    def _write_index(
        self, signer: signing.Signer, group: int, steps: list[int]
    ) -> None:
        proof = signer.proof(_signed_index(group, steps))
        fields = {"steps": steps, "signature": proof}
        path = f"{self.group_path(group)}/{INDEX_NAME}"
        self._file_system.write(path, [json.dumps(fields).encode() + b"\n"])

    def _refuse_far_ahead(
        self, known: versions.Version | None, found: versions.Version
    ) -> None:
        if known is None:
            return
        secs = self._clock() - self._seen[found.group]
        most = known.step + _SPARE_STEPS + int(_MAX_STEPS_PER_SEC * secs)
        if found.step > most:
            raise versions.CorruptVersionError(
                f"The step of {found.path} must be one that the group can have "
                f"reached, at most {most}: it was at step {known.step} "
                f"{secs:.0f} s ago."
            )

    def verify(
        self, version: versions.Version, *, max_bytes: int | None = None
    ) -> None:
        """Compares each file of a version with its manifest.

        Args:
          version: What `open`, `latest` or `wait` returned.
          max_bytes: Refuse a version of more bytes than this, before any file
            is read. Default: no limit.

        Raises:
          CorruptVersionError: If a file is missing, is not a regular file,
            differs in size or checksum, or is not in the manifest: the message
            names the file and both values.
          VersionNotFoundError: If the version was pruned or replaced meanwhile.
          OSError: If the storage fails; the version may well be good.
        """
        try:
            if max_bytes is not None and version.num_bytes > max_bytes:
                raise versions.CorruptVersionError(
                    f"{version.path} must have at most {max_bytes} bytes; its "
                    f"manifest names {version.num_bytes}."
                )
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

    def wait(
        self,
        group: int,
        *,
        newer_than: int = -1,
        timeout_secs: float,
        poll_secs: float = 0.5,
    ) -> versions.Version:
        """Returns the group's newest version once it is newer than a step.

        Args:
          group: The group to wait for.
          newer_than: Step that the version must exceed. Default: any version.
          timeout_secs: Seconds after which to give up; 0 looks once.
          poll_secs: Seconds between two looks, varied a little so that many
            readers do not come at once.

        Raises:
          TimeoutError: If no such version appeared in time.
        """
        if not timeout_secs >= 0 or not poll_secs > 0:
            raise ValueError(
                "`timeout_secs` must be >= 0 and `poll_secs` > 0; received "
                f"{timeout_secs!r} and {poll_secs!r}."
            )
        deadline = time.monotonic() + timeout_secs
        while True:
            found = self.latest(group)
            if found is not None and found.step > newer_than:
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                seen = "none" if found is None else f"step {found.step}"
                raise TimeoutError(
                    f"Group {group} must publish a version newer than step "
                    f"{newer_than} in {self.group_path(group)} within "
                    f"{timeout_secs} s; the newest seen is {seen}. Check that "
                    "the group runs and uses the same exchange."
                )
            time.sleep(min(left, poll_secs * random.uniform(0.8, 1.2)))

    def glance(self, group: int) -> "Published | None":
        """Returns the newest version whose manifest is valid, signed or not.

        For people: nothing but the manifest is looked at.

        Raises:
          OSError: If the storage fails.
        """
        broken: list[int] = []
        for step in self._candidates(group, self._read_index(group)):
            try:
                found = self._open_unsigned(group, step)
                seen = self._file_system.stat(
                    f"{found.path}/{manifest.FILE_NAME}"
                )
            except (versions.VersionNotFoundError, FileNotFoundError):
                continue  # Not committed yet, or pruned meanwhile.
            except versions.CorruptVersionError:
                broken.append(step)
            else:
                return Published(
                    step=step,
                    num_bytes=found.num_bytes,
                    created=float(found.manifest.created),
                    modified=seen.modified,
                    broken=tuple(broken),
                )
        return None

    def _check_signature(self, found: versions.Version) -> None:
        if self._signer is not None:
            try:
                self._signer.check(found.manifest)
            except signing.SignatureError as error:
                raise versions.CorruptVersionError(
                    f"The manifest of {found.path} cannot be trusted: {error}"
                ) from error
        elif signing.is_signed(found.manifest) and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Versions in %s are signed, and this process has no key: their "
                "signatures are not checked. Set %s.",
                self.root,
                signing.FILE_VARIABLE,
            )

    def _log_once(self, group: int, step: int, error: Exception) -> None:
        # The first time it may be about to come, or to go.
        times = self._passed_over.get((group, step), 0) + 1
        self._passed_over[group, step] = times
        level = logging.WARNING if times == 2 else logging.DEBUG
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

    def _groups(self, *, must_be_there: bool) -> list[int]:
        try:
            names = self._file_system.list_dir(self.root)
        except (FileNotFoundError, NotADirectoryError):
            if must_be_there:
                raise
            return []
        groups = (run_files.group_of(name) for name in names)
        return sorted(group for group in groups if group is not None)

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """The newest version of a group, as its manifest describes it."""

    step: int
    num_bytes: int
    # In Unix seconds of the publisher; of the storage, or 0 if it has none.
    created: float
    modified: float
    # Newer versions whose manifests cannot be read.
    broken: tuple[int, ...] = ()


OpenStorage = Callable[[str], tuple[filesystem.FileSystem, str]]


class NewestVersions:
    """The newest version of each group, looked for without a wait.

    Only manifests are read, whoever signed them, so that a look costs one small
    file a group. A thread reads, because a storage that hangs must not stop
    its user.
    """

    def __init__(
        self,
        root: str,
        *,
        interval_secs: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        open_storage: OpenStorage = filesystem.for_root,
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
        self._open_storage = open_storage
        self._must_be_there = must_be_there
        self._thread: threading.Thread | None = None
        self._began = -float("inf")
        self._found: Mapping[int, Published] = {}

    def look(
        self, groups: Collection[int], *, limit_secs: float = 0.0
    ) -> Mapping[int, Published]:
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
            storage, root = self._open_storage(self._root)
            reader = VersionReader(root, key=None, file_system=storage)
            there = reader._groups(must_be_there=self._must_be_there)
            found = {
                group: newest
                for group in sorted({*wanted, *there})
                if (newest := reader.glance(group)) is not None
            }
        except (ImportError, OSError, ValueError) as error:
            self.problem = untrusted.one_line(f"{self._root}: {error}")
            return
        self.groups, self._found, self.problem = there, found, ""


def _signed_index(group: int, steps: list[int]) -> bytes:
    return f"index of {group}: {steps}".encode()
