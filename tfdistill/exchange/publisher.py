"""The exchange: versions published and pruned by one process of each group.

Needs neither TensorFlow nor Keras. docs/protocol.md says how a
version becomes visible and what a reader must check.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import commit
from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import reader
from tfdistill.exchange import signing
from tfdistill.exchange import versions

_log = logging.getLogger(__name__)


def check_exchange(exchange: Any) -> None:
    """Checks that an `Exchange` is one, and not its directory."""
    if not isinstance(exchange, Exchange):
        raise ValueError(
            "`exchange` must be a tfdistill.Exchange; received "
            f"{exchange!r}. Pass tfdistill.Exchange(directory)."
        )


class Exchange(reader.VersionReader):
    """The shared directory through which groups see each other's exports.

    One process of each group publishes; any number read. Methods may be
    called from several threads.
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
        super().__init__(root, key=key, file_system=file_system)
        self.incarnation = uuid.uuid4().hex
        self._retention = commit.Retention(
            max_to_keep=max_to_keep, min_keep_secs=min_keep_secs, clock=clock
        )
        self._lock = threading.RLock()
        self._claims: dict[int, group_claim.GroupClaim] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Exchange":
        """Returns this one: a tuner copies callbacks, not what they open."""
        return self

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
        self._refuse_disabled()
        claimed = self._claims.get(group)
        if claimed is None or not claimed.is_held:
            claimed = group_claim.GroupClaim(
                self.notes(group), run=run, incarnation=self.incarnation
            )
            claimed.take()
            self._claims[group] = claimed
        return claimed

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
        self._refuse_disabled()
        if versions.index("step", step) > versions.MAX_STEP:
            raise ValueError(
                f"`step` must be at most {versions.MAX_STEP}, which no "
                f"training reaches; received {step}. Readers ignore what is "
                "higher."
            )
        draft = manifest.Manifest(
            group=versions.index("group", group),
            step=versions.index("step", step),
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
            version = self._publish(write, draft)
            self._try_to_prune(draft.group)
            return version

    def _publish(
        self, write: Callable[[str], None], draft: manifest.Manifest
    ) -> versions.Version:
        try:
            self._refuse_existing(draft.group, draft.step)
            return self._export(write, draft)
        except group_claim.ERRORS:
            raise
        except Exception as error:
            # A new owner may have removed its files, or published the step.
            with contextlib.suppress(OSError):
                self._confirm(draft.group)
            if isinstance(error, versions.VersionExistsError):
                raise
            # A full disk would stay full if only exports that succeed pruned.
            self._try_to_prune(draft.group)
            if isinstance(error, versions.ExportError):
                raise
            path = self.version_path(draft.group, draft.step)
            why = f"{type(error).__name__}: {error}".rstrip(".")
            raise versions.ExportError(
                f"Could not publish {path}: {why}. No part of it is visible to "
                "readers."
            ) from error

    def prune(self, group: int) -> list[int]:
        """Removes versions that may go, and what crashed publishers left.

        Only the process that publishes for a group may call it for that group;
        `publish` does so itself.

        Returns:
          The steps removed.

        Raises:
          OSError: If the group's directory cannot be listed.
        """
        remove = functools.partial(commit.remove_version, self._file_system)
        with self._lock:
            removed = [
                step
                for step in self._retention.expired(group, self.steps(group))
                if commit.try_to_remove(remove, self.version_path(group, step))
            ]
            commit.sweep(self._file_system, self.group_path(group))
        return removed

    def _try_to_prune(self, group: int) -> None:
        try:
            self.prune(group)
        except OSError as error:
            _log.warning("Could not prune group %d: %s", group, error)

    def _confirm(self, group: int) -> None:
        if group in self._claims:
            self._claims[group].confirm()

    def _refuse_disabled(self) -> None:
        if not self.enabled:
            raise versions.ExportError(
                "There is nowhere to publish to: the exchange was made with "
                "root=None. Set TFDISTILL_EXCHANGE, or give it a directory."
            )

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

    def _export(
        self, write: Callable[[str], None], draft: manifest.Manifest
    ) -> versions.Version:
        final = self.version_path(draft.group, draft.step)
        stage = commit.Staging(
            self._file_system, final, incarnation=self.incarnation
        )
        try:
            write(stage.path)
            files = stage.files()
            if not files:
                raise versions.ExportError(
                    f"`write` must leave at least one file in {stage.path}; "
                    "it left none."
                )
            checked = dataclasses.replace(draft, files=files)
            if self._signer is not None:
                checked = self._signer.sign(checked)
            stage.commit(checked, confirm=lambda: self._confirm(draft.group))
        finally:
            stage.discard()
        # As a reader gets it: tuples of the caller have become lists.
        checked = manifest.Manifest.from_json(checked.to_json())
        return versions.Version(draft.group, draft.step, final, checked)
