"""Where groups of one run write what their script writes by one name.

All groups run the same script, so that a fixed path in it, such as
`ModelCheckpoint("best.keras")`, would be one file for all, which each
overwrites. The first group writes where the script says, each other one to the
same name below its own directory, where what reads that name finds it.
"""

import builtins
import contextlib
import functools
import importlib
import io
import logging
import os
import pathlib
import time
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdistill.cluster import identity
from tfdistill.system import keras_internals
from tfdistill.system import run_files

_log = logging.getLogger(__name__)
# In the directory of a group: what its script writes.
_FILES = "files"
# Without a workdir, a run began so long before a task at most.
_LONGEST_START_SECS = 60.0
# What Keras' callbacks and ours call the path that they write to.
_ATTRIBUTES = "filepath", "filename", "log_dir", "backup_dir", "directory"


def of_callbacks(callbacks: Iterable[Any]) -> dict[str, str]:
    """Returns by path which callback writes there.

    Example:
        >>> import keras
        >>> of_callbacks([keras.callbacks.CSVLogger("log.csv")])
        {'log.csv': 'CSVLogger'}
    """
    found: dict[str, str] = {}
    for callback in callbacks:
        for name in _ATTRIBUTES:
            path = getattr(callback, name, None)
            if isinstance(path, str | os.PathLike) and os.fspath(path):
                found[os.fspath(path)] = type(callback).__name__
    return found


class GroupFiles:
    """Moves what a group other than the first writes, and finds it there.

    A path that lies in the group's directory, or has the group's name, such as
    `out/group_1/best.keras`, is its own already.
    """

    def __init__(self, own_directory: str | None, *, is_chief: bool) -> None:
        """Moves nothing without a directory of the group's own."""
        self._own = own_directory
        self._level = logging.WARNING if is_chief else logging.DEBUG
        self._finds = self._shares = False
        self._said: set[str] = set()
        self._undo = contextlib.ExitStack()

    def written(self, path: str | os.PathLike[str]) -> Any:
        """Returns where to write what a script would write to a path."""
        moved = self._moved_to(path)
        if moved is None:
            return path
        if moved not in self._said:
            self._said.add(moved)
            self.find()
            if "://" not in moved:
                os.makedirs(os.path.dirname(moved), exist_ok=True)
            _log.log(
                self._level,
                "This group writes %s to %s: group_0 has the place that the "
                "script names.",
                os.fspath(path),
                moved,
            )
        return moved

    def _moved_to(self, path: object) -> str | None:
        """Returns the group's own place for a path, unless it is its own."""
        if self._own is None or not isinstance(path, str | os.PathLike):
            return None
        whole = run_files.real(path)
        name = os.path.basename(self._own)
        if not os.fspath(path) or name in pathlib.Path(whole).parts:
            return None
        here = os.path.relpath(whole)
        if "://" in whole or here.startswith(os.pardir):
            here = whole.replace("://", "/").lstrip("/")
        return f"{self._own}/{_FILES}/{here}"

    def find(self) -> None:
        """Gives readers of a file by its name this group's file, if it has one.

        That is `open`, with all that is made of it in Python, and what Keras
        and TensorFlow load by names that are bound from now on.
        """
        if self._own is None or self._finds:
            return
        self._finds = True
        undo = self._undo.callback
        undo(setattr, self, "_finds", False)
        of_model = self._reader(1, "filepath")
        undo(
            keras_internals.replace_functions(
                load_model=self._reader(0, "filepath"), load_weights=of_model
            )
        )
        # Which TensorFlow puts in the place of another when first imported.
        saved_models = importlib.import_module("tensorflow.saved_model")
        for home, name, by in (
            (keras.Model, "load_weights", of_model),
            (saved_models, "load", self._reader(0, "export_dir")),
            (tf.train, "latest_checkpoint", self._reader(0, "checkpoint_dir")),
            (tf.train.Checkpoint, "read", self._reader(1, "save_path")),
            (builtins, "open", self._open),
            (io, "open", self._open),
        ):
            undo(keras_internals.replace(home, name, by))

    def leave(self) -> None:
        """Makes all reads go to the given names again."""
        self._undo.close()

    def _reader(self, index: int, name: str) -> Callable[..., Any]:
        """Returns what calls a function with its path as this group's."""

        def read(
            own: Callable[..., Any], *args: object, **kwargs: object
        ) -> Any:
            given = list(args)
            if index < len(given):
                given[index] = self.read(given[index])
            elif name in kwargs:
                kwargs[name] = self.read(kwargs[name])
            return own(*given, **kwargs)

        return read

    def _open(
        self,
        own: Callable[..., Any],
        file: object,
        mode: str = "r",
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Opens a file; warns once of one that all groups write."""
        place = self.read(file)
        if place is file and not self._shares and set(mode) & set("wax+"):
            self._shares = self._is_shared(file)
            if self._shares:
                _log.log(
                    self._level,
                    "This group writes %s to the place where other groups "
                    "write theirs: only what Keras writes is kept apart. Put "
                    "the group into the names of such files: "
                    'os.environ["TFDISTILL_GROUP"].',
                    os.fspath(file),
                )
        return own(place, mode, *args, **kwargs)

    def _is_shared(self, path: str | os.PathLike[str]) -> bool:
        """Whether a script names it as its own: not absolute, nor the run's."""
        if self._moved_to(path) is None or os.path.isabs(path):
            return False
        run = pathlib.Path(run_files.real(os.path.dirname(self._own or "")))
        return run not in pathlib.Path(run_files.real(path)).parents

    def read(self, path: object) -> Any:
        """Returns where to read what was written to a path."""
        moved = self._moved_to(path)
        is_moved = moved in self._said
        # Also of a name that was made of another, as of the epoch's number.
        return moved if moved and (is_moved or os.path.exists(moved)) else path

    def move(self, callbacks: Iterable[Any]) -> None:
        """Makes callbacks write there, whatever they have made of their path.

        tfdistill's own callbacks keep groups apart by themselves.
        """
        for callback in callbacks if self._own else ():
            if type(callback).__module__.startswith("tfdistill."):
                continue
            for path in of_callbacks([callback]):
                moved = self.written(path)
                if moved != path:
                    _replace(callback, path, moved)


def _replace(callback: object, path: str, by: str) -> None:
    for name in {*vars(callback), *_ATTRIBUTES}:
        value = getattr(callback, name, None)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        if isinstance(value, str) and (
            value == path or value.startswith(f"{path}/")
        ):
            setattr(callback, name, by + value[len(path) :])


def share_directories(cluster: identity.Cluster) -> Callable[[], None]:
    """Lets a task make a directory that the run has made already.

    Another task did, or the same one before a restart: all run the same script,
    which makes it once. Returns what undoes it.
    """
    began, own = _began(cluster.workdir), set()

    def make(
        plain: Callable[..., None],
        path: str | os.PathLike[str],
        *args: object,
        **kwargs: object,
    ) -> None:
        whole = None if "dir_fd" in kwargs else os.path.realpath(path)
        try:
            plain(path, *args, **kwargs)
        except FileExistsError:
            is_known = whole in own or whole is None or not os.path.isdir(whole)
            if is_known or os.stat(path).st_mtime < began:
                raise
        own.add(whole)

    return keras_internals.replace(os, "mkdir", make)


def _began(workdir: str | None) -> float:
    """Returns when a run began: its oldest file is as old."""
    times = []
    with contextlib.suppress(OSError), os.scandir(workdir or "") as found:
        times = [entry.stat().st_mtime for entry in found if entry.is_file()]
    return min(times, default=time.time() - _LONGEST_START_SECS)


@functools.cache
def _of_directory(own_directory: str | None, is_chief: bool) -> GroupFiles:
    return GroupFiles(own_directory, is_chief=is_chief)


def of(cluster: identity.Cluster) -> GroupFiles:
    """Returns the files of a group: one for all models of the process.

    Nothing moves in a run of one group, or without a workdir.
    """
    own = cluster.group_dir if cluster.group else None
    return _of_directory(own, cluster.is_chief)
