"""The exchange: versions published by one process of a group, read by any.

The directory `<root>/group_<g>/<step>/` is a version once it holds a valid
manifest, and whole once each file agrees with it; docs/exchange_format.md says
how it becomes visible, and what a reader must check. Nothing found there is
trusted, and links are not followed. Needs neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import bases
from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import commit
from tfdistill.exchange import deltas
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import notes
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import fits
from tfdistill.system import run_files

_log = logging.getLogger(__name__)
# The file of an outer gradient, and how many are kept for each version that is.
OUTER_GRADIENT = "outer_gradient.bin"
_SINGLE_FILES = {deltas.FILE_NAME, OUTER_GRADIENT}
_OUTER_GRADIENTS_PER_VERSION = 64


def check_exchange(exchange: Any) -> None:
    """Checks that an `Exchange` is one, and not its directory."""
    if not isinstance(exchange, Exchange):
        raise ValueError(
            "`exchange` must be a tfdistill.Exchange; received "
            f"{exchange!r}. Pass tfdistill.Exchange(directory)."
        )


class Exchange:
    """The shared directory through which groups read each other's exports.

    One process of each group publishes; any number read. Methods may be
    called from several threads.

    Attributes:
      root: Where it is; empty without one. The root of a process's second
        training is below the root of its first, see `turn_to`.
      base: Root of the process's first training.
      enabled: Whether it has a root. Without one nothing is ever found.
      signer: What signs and checks with this run's key. None without a key:
        then no signature is checked.
      incarnation: Identifies this publisher in its manifests.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | None,
        *,
        max_to_keep: int = 3,
        min_keep_secs: float = 60.0,
        key: signing.KeyOption = "environment",
        file_system: filesystem.FileSystem | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Touches no storage but the key's file.

        Args:
          root: A directory, or a URL such as `s3://`, `gs://` or `az://` with
            the extra `cloud`. It need not exist.
            None, as `Cluster.exchange` is for a single group without a
            launcher: nothing is published or found.
          max_to_keep: Number of newest versions of a group that always stay;
            at least 2.
          min_keep_secs: Seconds that a version stays once it is superseded:
            the time a peer has for reading it.
          key: Signs what is published; versions that are not signed with it
            are refused. Default: the environment's, see `signing.signer_for`;
            without one, nothing is signed or checked. None: no key.
          file_system: Used with `root` as it is. Default: what `root` asks for.
          clock: Seconds of a clock that never goes backwards; ages are
            measured by it. Default: `time.monotonic`.
        """
        self.enabled = root is not None
        if root is None:
            file_system, root = filesystem.LocalFileSystem(), ""
        if file_system is None:
            file_system, root = filesystem.for_root(root)
        self.base = self.root = os.fspath(root)
        self.signer = signing.signer_for(key) if self.enabled else None
        self.incarnation = uuid.uuid4().hex
        self._file_system = file_system
        self._passed_over: Counter[tuple[int, int]] = Counter()
        self._retention = commit.Retention(
            max_to_keep=max_to_keep, min_keep_secs=min_keep_secs, clock=clock
        )
        self._lock = threading.RLock()
        self._publishers: dict[int, commit.GroupPublisher] = {}

    def turn_to(self, number: int) -> None:
        """Turns to what the n-th training of its processes publishes.

        A second training has its own steps, and maybe its own held-out
        examples: versions of the first training must not teach in it.
        """
        root = fits.below(self.base, number)
        if root == self.root or not self.enabled:
            return
        with self._lock:
            self.root, self._publishers = root, {}
            self._passed_over.clear()
            for name in ("deltas", "outer_gradients", "bases"):
                vars(self).pop(name, None)

    def turn_to_newest(self) -> None:
        """Turns to the last training that has published anything."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = self._file_system.list_dir(self.base)
        self.turn_to(fits.newest(names))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exchange":
        """Returns this one: a tuner copies callbacks, not what they open."""
        return self

    @functools.cached_property
    def deltas(self) -> "Exchange":
        """Its deltas: an exchange below it, where no version is looked for."""
        return self._below("deltas", self._retention.max_to_keep)

    @functools.cached_property
    def outer_gradients(self) -> "Exchange":
        """The exchange of outer gradients, which groups mix by fragments.

        It is below this one, as the exchange of deltas is. Each gradient is a
        small part of a version, so many are kept, for a group that resumes from
        a backup.
        """
        keep = _OUTER_GRADIENTS_PER_VERSION * self._retention.max_to_keep
        return self._below("outer_gradients", keep)

    def _below(self, name: str, max_to_keep: int) -> "Exchange":
        found = Exchange(
            f"{self.root}/{name}" if self.enabled else None,
            max_to_keep=max_to_keep,
            min_keep_secs=self._retention.min_keep_secs,
            key=None,
            file_system=self._file_system,
            clock=self._retention.clock,
        )
        found.signer, found.incarnation = self.signer, self.incarnation
        return found

    @functools.cached_property
    def bases(self) -> bases.Bases:
        """What the versions of all groups name in place of holding it."""
        return bases.Bases(
            self._file_system,
            self.root,
            min_keep_secs=self._retention.min_keep_secs,
            clock=self._retention.clock,
        )

    def notes(self, group: int) -> notes.Notes:
        """Returns the notes that a group's processes leave for others."""
        return notes.Notes(
            self._file_system,
            self.group_path(group),
            group=group,
            signer=self.signer,
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
        found = []
        for step in self.listed(group):
            path = self.version_path(group, step)
            with contextlib.suppress(OSError):
                if commit.is_committed(self._file_system, path):
                    found.append(step)
        return found

    def listed(self, group: int) -> list[int]:
        """As `steps`, but of all that may be versions, by one call."""
        if not self.enabled:
            return []
        try:
            names = self._file_system.list_dir(self.group_path(group))
        except (FileNotFoundError, NotADirectoryError):
            return []
        steps = map(versions.step_of_name, names)
        return sorted(step for step in steps if step is not None)

    def claim(self, group: int, *, run: str = "") -> group_claim.GroupClaim:
        """Claims a group, so that no other process publishes for it.

        It is taken over from an earlier process of the same run. From then on
        `publish` checks, right before a version becomes visible, that no newer
        process has taken it over in turn. Without a claim it checks nothing.

        Args:
          group: Index of the group.
          run: The same text in all processes of a run, and another in other
            runs, such as the run's directory. Default: none.

        Returns:
          The claim. Release it at the end, or use it in a `with` statement.

        Raises:
          GroupClaimedError: If the group belongs to another run.
          ExportError: If the exchange was made with root=None.
        """
        publisher = self._publisher(group)
        if publisher.claim is None or not publisher.claim.is_held:
            publisher.claim = group_claim.GroupClaim(
                self.notes(group), run=run, incarnation=self.incarnation
            )
        return publisher.claim

    def publish(
        self,
        write: Callable[[str], None],
        *,
        group: int,
        step: int,
        graph_fingerprint: str = "",
        inputs: Any = None,
        outputs: Any = None,
        variables: Mapping[str, Mapping[str, Any]] | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> versions.Version:
        """Publishes one version, then prunes its group.

        Args:
          write: Fills the directory whose local path (for a local exchange, a
            path on the same disk) it is given.
          group: Index of the publishing group; one process publishes for it.
          step: The student's global step, the version's number.
          graph_fingerprint: Equal for versions that differ only in variables.
          inputs: Structure of input specs, as JSON.
          outputs: Structure of output specs, as JSON.
          variables: Name to `{"shape": [...], "dtype": "..."}`.
          extras: Anything else to put into the manifest, as JSON.

        Returns:
          The version, which readers can see from now on.

        Raises:
          ValueError: If the manifest cannot hold an argument.
          VersionExistsError: If the version exists and is complete. A broken
            one is replaced.
          ClaimLostError: If this process had claimed the group and another has
            taken it over. No part of the version is or will be visible.
          ExportError: For any other failure. No part of the version is visible
            then, and earlier versions are untouched.
        """
        publisher = self._publisher(group)
        group = versions.index("group", group)
        step = versions.index("step", step)
        draft = manifest.Manifest(
            group=group,
            step=step,
            created=time.time(),
            incarnation=self.incarnation,
            files={},
            graph_fingerprint=graph_fingerprint,
            inputs=inputs,
            outputs=outputs,
            variables=variables or {},
            libraries=manifest.installed_versions(),
            extras=extras or {},
        )
        with self._lock:
            try:
                self._refuse_existing(group, step)
                checked = publisher.publish(write, draft, self.signer)
            except group_claim.ERRORS:
                raise
            except Exception as error:
                # A new owner may have removed its files, or published the step.
                with contextlib.suppress(OSError):
                    publisher.confirm()
                # A full disk would stay full if only exports that succeed did.
                self._prune(group)
                if isinstance(error, versions.ExportError):
                    raise
                why = f"{type(error).__name__}: {error}".rstrip(".")
                raise versions.ExportError(
                    f"Could not publish {self.version_path(group, step)}: "
                    f"{why}. No part of it is visible to readers."
                ) from error
            self._prune(group)
        path = self.version_path(group, step)
        return versions.Version(group, step, path, checked)

    def publish_delta(
        self, blocks: Iterable[bytes], *, group: int, **described: Any
    ) -> versions.Version:
        """Publishes a delta, of `deltas.Encoder`, as `publish` does a version.

        Under the claim of the group, if there is one.
        """
        return self._publish_below(
            self.deltas, deltas.FILE_NAME, blocks, group, described
        )

    def publish_outer_gradient(
        self, blocks: Iterable[bytes], *, group: int, **described: Any
    ) -> versions.Version:
        """Publishes the outer gradient of a fragment, in the same way."""
        return self._publish_below(
            self.outer_gradients, OUTER_GRADIENT, blocks, group, described
        )

    def _publish_below(
        self,
        place: "Exchange",
        file_name: str,
        blocks: Iterable[bytes],
        group: int,
        described: Mapping[str, Any],
    ) -> versions.Version:
        place._publisher(group).claim = self._publisher(group).claim
        return place.publish(
            lambda directory: filesystem.LocalFileSystem().write(
                f"{directory}/{file_name}", blocks
            ),
            group=group,
            **described,
        )

    def _publisher(self, group: int) -> commit.GroupPublisher:
        if not self.enabled:
            raise versions.ExportError(
                "The exchange has no place to publish to: it was created with "
                "root=None. Set TFDISTILL_EXCHANGE, or pass a directory to the "
                "Exchange."
            )
        made = commit.GroupPublisher(
            self._file_system, self.group_path(group), self._retention
        )
        # If two threads come first, both get the same publisher.
        return self._publishers.setdefault(group, made)

    def _prune(self, group: int) -> None:
        try:
            self._publisher(group).prune(self.steps(group))
            if "deltas" in vars(self):
                # A delta's frame is older, so the oldest's are not before it.
                oldest = min(self.listed(group), default=-1)
                self.deltas._remove_until(group, oldest)
            if "bases" in vars(self):
                self.bases.prune(self._bases_named)
        except OSError as error:
            _log.warning("Could not prune group %d: %s", group, error)

    def _remove_until(self, group: int, last: int) -> None:
        for step in self.listed(group):
            if step <= last and self._base_of(group, step) is None:
                path = self.version_path(group, step)
                commit.try_to_remove_version(self._file_system, path)

    def _base_of(self, group: int, step: int) -> str | None:
        """Returns the base of a version, which needs no other version then."""
        try:
            return deltas.base_of(self.open(group, step).manifest)
        except (versions.VersionNotFoundError, versions.CorruptVersionError):
            return None

    def _bases_named(self) -> set[str]:
        names = map(
            run_files.group_of, self._file_system.list_dir(self.deltas.root)
        )
        return {
            base
            for group in names
            if group is not None
            for step in self.deltas.listed(group)
            if (base := self.deltas._base_of(group, step)) is not None
        }

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
                f"There is no version at {path}: {error}. It wasn't published "
                "yet, or was pruned."
            ) from error
        except (
            manifest.ManifestError,
            filesystem.NotRegularFileError,
        ) as error:
            raise versions.IncompleteVersionError(
                f"{path}/{manifest.FILE_NAME} must be a valid manifest: {error}"
            ) from error
        if (found.group, found.step) != (group, step) or not found.files:
            raise versions.CorruptVersionError(
                f"The manifest of {path} must name its files, group {group} "
                f"and step {step}; received {len(found.files)} files, group "
                f"{found.group} and step {found.step}. Was it copied there?"
            )
        if self.signer is not None and (fault := self.signer.fault(found)):
            raise versions.CorruptVersionError(
                f"The manifest of {path} cannot be trusted: {fault}"
            )
        return versions.Version(group, step, path, found)

    def latest(
        self,
        group: int,
        *,
        newer_than: int = -1,
        wanted: Callable[[versions.Version], bool] = lambda version: True,
    ) -> versions.Version | None:
        """Returns the newest version whose files are all there, or None.

        Newest means the highest step. Sizes are compared, except for deltas,
        and checksums are not: call `verify` before use. Versions that are
        incomplete, or whose manifest is not one to trust, are passed over with
        a warning if they stay so, and the next older one is taken.

        Args:
          group: The group.
          newer_than: Step that the version must exceed. Default: any version.
          wanted: Which versions count, by their manifests. Default: all.

        Raises:
          OSError: If the storage fails; what was found before may still hold.
        """
        for step in reversed(self.listed(group)):
            if step <= newer_than:
                break
            try:
                version = self.open(group, step)
                if wanted(version):
                    if not deltas.is_delta(version.manifest):
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
        with self._unless_gone(version):
            versions.check_listing(self._file_system, version)
            versions.check_content(self._file_system, version)

    @contextlib.contextmanager
    def _unless_gone(self, version: versions.Version) -> Iterator[None]:
        try:
            yield
        except versions.CorruptVersionError as error:
            if self._is_gone(version):
                raise versions.VersionNotFoundError(
                    f"{version.path} was pruned or replaced while it was "
                    "read; take the newest version instead."
                ) from error
            raise

    def fetch(
        self, version: versions.Version, directory: str
    ) -> versions.Version:
        """Copies a version's files to an empty local directory, verified.

        The copy holds what was checked, even if another process writes to the
        storage meanwhile.

        Returns:
          The version, with the copy's path.

        Raises:
          CorruptVersionError: If a file differs from its manifest.
          OSError: If the storage or the disk fails.
        """
        path = self.version_path(version.group, version.step)
        stored = dataclasses.replace(version, path=path)
        copy = dataclasses.replace(version, path=directory, is_copy=True)
        versions.check_listing(self._file_system, stored)
        local = filesystem.LocalFileSystem()
        for name in version.manifest.files:
            blocks = self._file_system.blocks(f"{path}/{name}")
            local.write(f"{directory}/{name}", blocks)
        versions.check_content(local, copy)
        return copy

    @contextlib.contextmanager
    def readable(self, version: versions.Version) -> Iterator[versions.Version]:
        """Gives a verified version where TensorFlow's operations can read it.

        In an object store that is a copy for as long as the block lasts; each
        byte is read once. What is one file, such as a delta, is read by one
        request, and comes as `content`. Raises what `verify` and `fetch` do.
        """
        files = version.manifest.files
        if len(files) == 1 and files.keys() <= _SINGLE_FILES:
            content = bytearray()

            def keep(block: bytes) -> None:
                content.extend(block)
                if len(content) > version.num_bytes:
                    raise versions.CorruptVersionError(
                        f"{version.path} must have {version.num_bytes} bytes "
                        "by its manifest; it has more."
                    )

            with self._unless_gone(version):
                versions.check_content(self._file_system, version, keep)
            yield dataclasses.replace(version, content=bytes(content))
            return
        if not filesystem.in_object_store(version.path):
            self.verify(version)
            yield version
            return
        with tempfile.TemporaryDirectory(prefix="tfdistill-peer-") as directory:
            yield self.fetch(version, directory)

    def _refuse_existing(self, group: int, step: int) -> None:
        try:
            version = self.open(group, step)
            self.verify(version)
        except versions.VersionNotFoundError:
            return
        except versions.CorruptVersionError as error:
            _log.warning("Replacing a broken version: %s", error)
            return
        raise versions.VersionExistsError(
            f"Step {step} of group {group} must be published once; "
            f"{version.path} exists and is complete, from incarnation "
            f"{version.manifest.incarnation}."
        )

    def _log_once(self, group: int, step: int, error: Exception) -> None:
        # The first time it may be about to come, or to go.
        self._passed_over[group, step] += 1
        is_second = self._passed_over[group, step] == 2
        level = logging.WARNING if is_second else logging.DEBUG
        _log.log(level, "Skipping a version: %s", error)

    def _is_gone(self, version: versions.Version) -> bool:
        try:
            return self.open(version.group, version.step) != version
        except versions.VersionNotFoundError:
            return True
        except versions.CorruptVersionError:
            return False
