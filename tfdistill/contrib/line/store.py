"""A line: promoted versions of one model, and the candidates to follow them.

    versions/<N>/     promoted SavedModels, which never change
    candidates/<N>/   what a retrain made

Numbers are never used twice. Needs neither TensorFlow nor Keras.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from tfdistill.contrib.line import journal
from tfdistill.contrib.line import locks
from tfdistill.exchange import filesystem
from tfdistill.exports import promotion
from tfdistill.system import run_files
from tfdistill.system import untrusted

POINTER = journal.POINTER
LINEAGE = "lineage.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_DISK = filesystem.LocalFileSystem()
BusyError = locks.BusyError
RefusedError = promotion.RefusedError


class Line:
    """A model that is retrained again and again.

    A reader needs nothing but `promoted()` and `version_path()`:

        line = tfdistill.contrib.line.Line("/models/clicks")
        model = tf.saved_model.load(line.version_path(line.promoted()))

    Attributes:
        root: Its directory or URL.
        is_local: Whether that is a directory.
        journal: Its settings, its pointer and its log.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        workdir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Touches no storage.

        Args:
            place: A directory, or the URL of an object store.
            workdir: Where a line in a store keeps its candidates and copies of
                versions: a local directory. A line in a directory has its own.
        """
        self._files, self.root = filesystem.for_root(place)
        self.is_local = isinstance(self._files, filesystem.LocalFileSystem)
        own = os.path.abspath(workdir) if workdir else None
        self._work = self.root if self.is_local else own
        self.journal = journal.Journal(self._files, self.root)
        self._is_working = False

    @classmethod
    def init(
        cls,
        place: str | os.PathLike[str],
        *,
        workload: str,
        overrides: Mapping[str, Any] | None = None,
        name: str | None = None,
        served_from: str | None = None,
    ) -> "Line":
        """Makes a line, or completes one that a killed `init` left.

        Args:
            place: A directory, or the URL of an object store.
            workload: The recipe; `recipes.place` makes it absolute.
            overrides: Arguments of the recipe.
            name: Name of the model in TensorFlow Serving. Default: the
                directory's.
            served_from: The directory of the versions as the server sees it,
                such as `/models/clicks/versions` in a container.

        Raises:
            ValueError: If another line is there.
        """
        line = cls(place)
        name = name or line.root.rpartition("/")[2]
        if not _NAME.fullmatch(name):
            raise ValueError(
                "The name of a line must consist of letters, digits, '_', '.' "
                f"and '-'; received {name!r}. Pass --name=NAME."
            )
        line.journal.init(
            name=name,
            workload=workload,
            overrides=dict(overrides or {}),
            served_from=served_from,
        )
        return line

    def promoted(self) -> int | None:
        """Returns the promoted version's number: one read, of one whole file.

        None until there is one. Anybody may poll it.
        """
        return self.journal.pointer().get("version")

    def history(self) -> list[int]:
        """Returns the versions that led to the promoted one, and that, last."""
        now = self.journal.pointer()
        found = [*now.get("before", []), now.get("version")]
        return [number for number in found if number]

    def version_path(self, number: int) -> str:
        """Returns where a promoted version is: a directory or a URL."""
        return f"{self.root}/versions/{number}"

    def local_version(self, number: int) -> str:
        """Returns a directory with a promoted version, copied from a store.

        FileNotFoundError if it was removed.
        """
        path = self.version_path(number)
        if self.is_local:
            os.stat(path)
            return path
        copy = f"{self.work}/versions/{number}"
        if not os.path.isdir(copy):
            promotion.fetch(self._files, path, copy)
        return copy

    @property
    def work(self) -> str:
        """The local directory of the candidates; ValueError without one."""
        if self._work is None:
            raise ValueError(
                f"{self.root} is in an object store: candidates need a local "
                "directory. Pass --workdir=DIR, and keep the same directory "
                "until the candidate is promoted."
            )
        return self._work

    def candidate_path(self, number: int) -> str:
        """Returns the local directory of a candidate, there or not."""
        return f"{self.work}/candidates/{number}"

    def lineage(self, number: int) -> dict[str, Any]:
        """Returns where a version or candidate comes from.

        ValueError if there is none of that number, or it is unfinished.
        """
        places = {f"{self.version_path(number)}/{run_files.EXTRA}": self._files}
        if self._work:
            places[self.candidate_path(number)] = _DISK
        for place, files in places.items():
            text = journal.read(files, f"{place}/{LINEAGE}")
            if (found := untrusted.json_object(text)) is not None:
                return found
        raise ValueError(
            f"{number} must be a version or a trained candidate of "
            f"{self.root}; there is no {LINEAGE} in {' or '.join(places)}. To "
            "complete an interrupted retrain, run the same command again."
        )

    def is_trained(self, number: int) -> bool:
        """Whether a candidate is complete: its lineage is its last file.

        It is, too, if it was promoted, from here or from another machine.
        """
        own = f"{self.candidate_path(number)}/{LINEAGE}"
        return os.path.exists(own) or promotion.is_there(
            self._files, self.version_path(number)
        )

    def next_number(self) -> int:
        """Returns the number after all that were ever given to candidates."""
        begun = [event["number"] for event in self.journal.events("retrain")]
        moved = [event["version"] for event in self.journal.events("promote")]
        return max([*begun, *moved], default=0) + 1

    def start_candidate(self, span: str, *, again: bool = False) -> int:
        """Returns the candidate to train on a span, and notes its number.

        It is the earlier one of this span if that was made here from the
        version that is promoted now, or was promoted itself; `is_trained` says
        whether anything is left to do.

        Args:
            span: Name of the data.
            again: Whether to make another one, whatever there is.
        """
        with self.journal.writing("retrain") as add:
            parent, kept = self.promoted(), self.history()
            for event in (
                [] if again else reversed(self.journal.events("retrain"))
            ):
                number = event["number"]
                if (
                    event["span"] == span
                    and (event["parent"] == parent or number in kept)
                    # Neither removed by hand, nor in the making elsewhere.
                    and (
                        os.path.isdir(self.candidate_path(number))
                        or self.is_trained(number)
                    )
                ):
                    return number
            number = self.next_number()
            # Killed before its event is written, it is given again.
            os.makedirs(self.candidate_path(number), exist_ok=True)
            add(number=number, span=span, parent=parent)
        return number

    @contextlib.contextmanager
    def locked(self, what: str) -> Iterator[None]:
        """Refuses a second retrain, judge or promotion, and repairs first.

        The kernel frees the lock when this process ends, however it ends. In a
        store it holds for all processes that share the local `work`.

        Raises:
            BusyError: If another process has it; the message names that.
        """
        if self._is_working:
            yield
            return
        self.journal.settings()
        with locks.of_file(f"{self.work}/candidates/.lock", what):
            with self.journal.writing(what):
                directory = f"{self.work}/versions"
                for name in journal.names(_DISK, directory):
                    if name.startswith(promotion.ASIDE):
                        _DISK.remove_tree(f"{directory}/{name}")
            self._is_working = True
            try:
                yield
            finally:
                self._is_working = False

    def promote(
        self,
        number: int,
        source_dir: str | os.PathLike[str],
        *,
        why: str = "",
        extra: Mapping[str, bytes | os.PathLike[str]] | None = None,
        force: bool = False,
    ) -> bool:
        """Makes an exported version the one that is served.

        It is copied to versions/<number>, and then the pointer moves. Killed
        anywhere, the same call completes it.

        Args:
            number: Above the promoted one's, so that readers go forwards.
            source_dir: The version in the exchange of its run:
                `RUN/exchange/group_0/1200`.
            why: For the log: a sentence.
            extra: Other files of the version; see `promotion.promote`.
            force: As for `Journal.too_late`.

        Returns:
            False if it was promoted already.

        Raises:
            RefusedError: If it must not be.
            BusyError: If another process is at work on the line.
        """
        with self.locked("promote"):
            current, before = self.promoted(), self.history()
            if number == current:
                return False
            if late := self.journal.too_late(number, force=force):
                raise RefusedError(late)
            place, group, step = os.path.normpath(source_dir).rsplit(os.sep, 2)
            run = os.path.dirname(place)
            exchange, version = promotion.choose(
                run,
                group=int(group.rpartition("_")[2]),
                step=int(step),
                place=place,
            )
            promotion.promote(
                exchange,
                version,
                self.version_path(number),
                card=promotion.card_text(
                    run,
                    version,
                    name=f"{self.journal.settings()['name']} {number}",
                ),
                extra=extra,
            )
            with self.journal.writing("promote") as add:
                if self.promoted() != current:
                    raise RefusedError(
                        f"Version {self.promoted()} was promoted in the "
                        f"meantime, in place of {current}: judge {number} "
                        "again."
                    )
                add(version=number, before=before, why=why)
        return True

    def rollback(
        self, to: int | None = None, *, why: str = "", only: int | None = None
    ) -> bool:
        """Moves the pointer back: one small write.

        Args:
            to: A version that was promoted before. Default: the one before
                the last promotion; what is undone already is not undone again.
            why: For the log: a sentence.
            only: A version; if another is promoted by now, nothing is done.

        Returns:
            False if it was done already.

        Raises:
            RefusedError: If there is no such version.
            BusyError: If another process moves the pointer.
        """
        with self.journal.writing("rollback") as add:
            now = self.journal.pointer()
            before, current = now.get("before", []), now.get("version")
            is_done = (
                now.get("what") == "rollback" if to is None else to == current
            )
            if is_done or only not in (None, current):
                return False
            if not before or to not in [None, *before]:
                names = ", ".join(map(str, before)) or "none"
                raise RefusedError(
                    "A line can only return to a version that was promoted "
                    f"before {current or 'now'}: {names}; received "
                    f"{to or 'no number'}."
                )
            to = to or before[-1]
            if not promotion.is_there(self._files, self.version_path(to)):
                raise RefusedError(
                    f"{self.version_path(to)} was removed: return to another "
                    "version, or retrain."
                )
            at = before.index(to)
            undone = [*before[at + 1 :], current]
            add(version=to, before=before[:at], why=why, undone=undone)
        return True
