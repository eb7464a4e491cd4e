"""A store of versions: published by one process of a group, read by any.

The directory `<root>/group_<g>/<step>/` is a version once it holds a valid
manifest, and whole once each file agrees with it; docs/exchange_format.md says
how it becomes visible, and what a reader must check. Nothing found there is
trusted, and links are not followed. Needs neither TensorFlow nor Keras.
"""

import contextlib
import dataclasses
import logging
import tempfile
import threading
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import commit
from tfdistill.exchange import deltas
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import run_files

_log = logging.getLogger(__name__)
# From a group and its steps, ascending, to those which a reader may still use.
Needed = Callable[[int, list[int]], Collection[int]]


class VersionStore:
    """Versions by group and step. Several threads may share it.

    Attributes:
      root: Where it is; empty without one.
      enabled: Whether it has a root. Without one nothing is ever found.
      signer: What signs and checks with this run's key. None without a key:
        then no signature is checked.
      incarnation: Identifies this publisher in its manifests.
    """

    def __init__(
        self,
        root: str | None,
        *,
        file_system: filesystem.FileSystem,
        retention: commit.Retention,
        signer: signing.Signer | None,
        incarnation: str,
        claims: dict[int, group_claim.GroupClaim],
        file_name: str = "",
        needed: Needed | None = None,
    ) -> None:
        """Touches no storage.

        The stores of one exchange share the `claims` of its groups. With a
        `file_name`, each version is that one file. A version that is not
        `needed` may go before `retention` lets it.
        """
        self.enabled = root is not None
        self.signer, self.incarnation = signer, incarnation
        self._file_system, self._retention = file_system, retention
        self._file_name, self._needed = file_name, needed
        self._lock = threading.RLock()
        self._open_root(root or "", claims)

    def _open_root(
        self, root: str, claims: dict[int, group_claim.GroupClaim]
    ) -> None:
        self.root, self._claims = root, claims
        self._passed_over = versions.PassedOver()
        # By group, since when each version has had a newer one.
        self._superseded: dict[int, dict[int, float]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "VersionStore":
        """Returns this one: a tuner copies callbacks, not what they open."""
        return self

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
        directory, steps = self.group_path(group), self.listed(group)
        return commit.committed(self._file_system, directory, steps)

    def listed(self, group: int) -> list[int]:
        """As `steps`, but of all that may be versions, by one call."""
        if not self.enabled:
            return []
        return versions.listed(self._file_system, self.group_path(group))

    def publish(
        self,
        write: Callable[[str], None],
        *,
        group: int,
        step: int,
        graph_fingerprint: str = "",
        inputs: object = None,
        outputs: object = None,
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
        self._check_enabled()
        group = versions.index("group", group)
        step = versions.index("step", step)
        path = self.version_path(group, step)
        draft = manifest.draft(
            group=group,
            step=step,
            incarnation=self.incarnation,
            graph_fingerprint=graph_fingerprint,
            inputs=inputs,
            outputs=outputs,
            variables=variables or {},
            extras=extras or {},
        )
        with self._lock:
            try:
                self._refuse_existing(group, step)
                checked = self._commit(write, draft)
            except group_claim.ERRORS:
                raise
            except Exception as error:
                # A new owner may have removed its files, or published the step.
                with contextlib.suppress(OSError):
                    self._confirm(group)
                # A full disk would stay full if only exports that succeed did.
                self._prune(group)
                if isinstance(error, versions.ExportError):
                    raise
                raise versions.not_published(path, error) from error
            self._prune(group)
        return versions.Version(group, step, path, checked)

    def publish_file(
        self, blocks: Iterable[bytes], *, group: int, **described: Any
    ) -> versions.Version:
        """Publishes a version of the store's one file, as `publish` does."""
        return self.publish(
            lambda directory: filesystem.LocalFileSystem().write(
                f"{directory}/{self._file_name}", blocks
            ),
            group=group,
            **described,
        )

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise versions.ExportError(
                "The exchange has no place to publish to: it was created with "
                "root=None. Set TFDISTILL_EXCHANGE, or pass a directory to the "
                "Exchange."
            )

    def _confirm(self, group: int) -> None:
        """Makes sure that no other process has taken the group over."""
        if (found := self._claims.get(group)) is not None:
            found.confirm()

    def _commit(
        self, write: Callable[[str], None], draft: manifest.Manifest
    ) -> manifest.Manifest:
        """Makes a version of what `write` leaves in a directory."""
        checked = commit.publish(
            self._file_system,
            self.version_path(draft.group, draft.step),
            write,
            draft,
            signer=self.signer,
            confirm=lambda: self._confirm(draft.group),
        )
        # As a reader gets it: tuples of the caller have become lists.
        return manifest.Manifest.from_json(checked.to_json())

    def _prune(self, group: int) -> None:
        try:
            self.prune(group)
        except OSError as error:
            _log.warning("Could not prune group %d: %s", group, error)

    def prune(self, group: int) -> None:
        """Removes versions that may go, and what crashed publishers left."""
        steps = self.steps(group)
        expired = self._retention.expired(
            self._superseded.setdefault(group, {}), steps[:-1]
        )
        superseded = steps[: -self._retention.max_to_keep]
        for step in sorted(expired.intersection(superseded)):
            self._remove(group, step)
        commit.sweep(self._file_system, self.group_path(group))

    def remove_unneeded(self, group: int) -> None:
        """Removes what no reader can use, if this process has published any."""
        if self._needed is None or group not in self._superseded:
            return
        steps = self.listed(group)
        for step in sorted({*steps}.difference(self._needed(group, steps))):
            self._remove(group, step)

    def _remove(self, group: int, step: int) -> None:
        path = self.version_path(group, step)
        commit.try_to_remove_version(self._file_system, path)

    def open(self, group: int, step: int) -> versions.Version:
        """Returns a version by reading its manifest, and nothing else of it.

        Raises:
          VersionNotFoundError: If there is no such version.
          CorruptVersionError: If its manifest is not one to trust.
          OSError: If the storage fails.
        """
        path = self.version_path(group, step)
        return versions.read(
            self._file_system, path, group=group, step=step, signer=self.signer
        )

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
                self._passed_over.note((group, step), error)
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
        return versions.fetch(self._file_system, stored, directory)

    @contextlib.contextmanager
    def readable(self, version: versions.Version) -> Iterator[versions.Version]:
        """Gives a verified version where TensorFlow's operations can read it.

        In an object store that is a copy for as long as the block lasts; each
        byte is read once. What is one file, such as a delta, is read by one
        request, and comes as `content`. Raises what `verify` and `fetch` do.
        """
        if version.manifest.files.keys() == {self._file_name}:
            with self._unless_gone(version):
                content = versions.content(self._file_system, version)
            yield dataclasses.replace(version, content=content)
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

    def _is_gone(self, version: versions.Version) -> bool:
        try:
            return self.open(version.group, version.step) != version
        except versions.VersionNotFoundError:
            return True
        except versions.CorruptVersionError:
            return False
