"""The exchange: the stores through which groups read each other."""

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Callable

from tfdistill.exchange import bases
from tfdistill.exchange import claim as group_claim
from tfdistill.exchange import commit
from tfdistill.exchange import deltas
from tfdistill.exchange import filesystem
from tfdistill.exchange import notes
from tfdistill.exchange import signing
from tfdistill.exchange import store
from tfdistill.exchange import versions
from tfdistill.system import fits
from tfdistill.system import run_files

# How many outer gradients are kept for each version that is: they are small
# parts of one, and a group may resume from a backup.
_OUTER_GRADIENTS_PER_VERSION = 64


def check_exchange(exchange: object) -> None:
    """Checks that an `Exchange` is one, and not its directory."""
    if not isinstance(exchange, Exchange):
        raise ValueError(
            "`exchange` must be a tfdistill.Exchange; received "
            f"{exchange!r}. Pass tfdistill.Exchange(directory)."
        )


class Exchange(store.VersionStore):
    """The shared directory through which groups read each other's exports.

    A store of whole versions, with the stores of what goes with them below its
    root. One process of each group publishes; any number read. Methods may be
    called from several threads.

    Attributes:
      root: Where it is; empty without one. The root of a process's second
        training is below the root of its first, see `turn_to`.
      base: Root of the process's first training.
      enabled: Whether it has a root. Without one nothing is ever found.
      signer: What signs and checks with this run's key. None without a key:
        then no signature is checked.
      incarnation: Identifies this publisher in its manifests.
      deltas: Store of deltas, where no reader looks for versions.
      outer_gradients: Store of outer gradients, which groups mix by fragments.
      bases: What the versions of all groups name in place of holding it.
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
        place = root
        if root is None:
            file_system = filesystem.LocalFileSystem()
        elif file_system is None:
            file_system, place = filesystem.for_root(root)
        super().__init__(
            None if place is None else os.fspath(place),
            file_system=file_system,
            retention=commit.Retention(
                max_to_keep=max_to_keep,
                min_keep_secs=min_keep_secs,
                clock=clock,
            ),
            signer=None if root is None else signing.signer_for(key),
            incarnation=uuid.uuid4().hex,
            claims={},
        )
        self.base = self.root

    def _open_root(
        self, root: str, claims: dict[int, group_claim.GroupClaim]
    ) -> None:
        super()._open_root(root, claims)
        keep = self._retention.max_to_keep
        self.deltas, self.outer_gradients = (
            store.VersionStore(
                f"{root}/{name}" if self.enabled else None,
                file_system=self._file_system,
                retention=dataclasses.replace(
                    self._retention, max_to_keep=max_to_keep
                ),
                signer=self.signer,
                incarnation=self.incarnation,
                claims=claims,
                file_name=file_name,
                needed=needed,
            )
            for name, file_name, max_to_keep, needed in (
                ("deltas", deltas.FILE_NAME, keep, self._deltas_needed),
                (
                    "outer_gradients",
                    "outer_gradient.bin",
                    _OUTER_GRADIENTS_PER_VERSION * keep,
                    None,
                ),
            )
        )
        self.bases = bases.Bases(
            self._file_system, root, self._retention, self._bases_needed
        )

    def turn_to(self, number: int) -> None:
        """Turns to what the n-th training of its processes publishes.

        A second training has its own steps, and maybe its own held-out
        examples: versions of the first training must not teach in it.
        """
        root = fits.below(self.base, number)
        if root != self.root and self.enabled:
            with self._lock:
                self._open_root(root, {})

    def turn_to_newest(self) -> None:
        """Turns to the last training that has published anything."""
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = self._file_system.list_dir(self.base)
        self.turn_to(fits.newest(names))

    def notes(self, group: int) -> notes.Notes:
        """Returns the notes that a group's processes leave for others."""
        return notes.Notes(
            self._file_system,
            self.group_path(group),
            group=group,
            signer=self.signer,
        )

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
        self._check_enabled()
        found = self._claims.get(group)
        if found is None or not found.is_held:
            found = self._claims[group] = group_claim.GroupClaim(
                self.notes(group), run=run, incarnation=self.incarnation
            )
        return found

    def prune(self, group: int) -> None:
        """Removes versions that may go, then deltas and bases without use."""
        super().prune(group)
        self.deltas.remove_unneeded(group)
        self.bases.prune()

    def _deltas_needed(self, group: int, steps: list[int]) -> set[int]:
        # A delta's frame is older, so the oldest's are not before it.
        oldest = min(self.listed(group), default=-1)
        return {
            step
            for step in steps
            if step > oldest or self._base_of(group, step) is not None
        }

    def _base_of(self, group: int, step: int) -> str | None:
        """Returns the base of a delta, which needs no frame then."""
        try:
            return deltas.base_of(self.deltas.open(group, step).manifest)
        except (versions.VersionNotFoundError, versions.CorruptVersionError):
            return None

    def _bases_needed(self) -> set[str]:
        names = self._file_system.list_dir(self.deltas.root)
        return {
            base
            for group in map(run_files.group_of, names)
            if group is not None
            for step in self.deltas.listed(group)
            if (base := self._base_of(group, step)) is not None
        }
