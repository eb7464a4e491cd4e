"""Files of data sets: where they lie, their converted forms, prepared copies.

A converted form is made once, kept with a header, and checked when opened. On
one machine one process makes it and the others wait. Where locks do not reach,
as on some shared file systems, several may make it; the first rename wins, and
all of them use that one.

Of data sets that TensorFlow Datasets has prepared, nothing is downloaded and
nothing prepared here. It takes seconds to import: only its users wait for it.
"""

import contextlib
import glob
import hashlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import filelock
import tensorflow as tf

Path = str | os.PathLike[str]
Paths = Path | Sequence[Path]
# Prefix of a `path` that names a prepared data set instead of files.
PREFIX = "tfds:"
_HEADER = "header.json"
# Bytes at the beginning and the end of a file by which it is recognized.
_SAMPLE_BYTES = 1 << 16
_REPORT_SECS = 10.0


def data_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else TFDISTILL_DATA, else `../shared/data`."""
    if given is not None:
        return pathlib.Path(given)
    if os.environ.get("TFDISTILL_DATA"):
        return pathlib.Path(os.environ["TFDISTILL_DATA"])
    repository = pathlib.Path(__file__).resolve().parents[1]
    return repository.parent / "shared" / "data"


class File:
    """A file of examples, with what messages and caches know it by."""

    def __init__(self, path: pathlib.Path) -> None:
        """Reads nothing yet."""
        self.name = str(path)
        self.path = path
        self.size = path.stat().st_size

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the examples do, as JSON has it."""
        found = self.path.stat()
        with self.path.open("rb") as opened:
            sample = opened.read(_SAMPLE_BYTES)
            opened.seek(max(0, found.st_size - _SAMPLE_BYTES))
            sample += opened.read(_SAMPLE_BYTES)
        return {
            "name": self.path.name,
            "bytes": found.st_size,
            "modified_nanoseconds": found.st_mtime_ns,
            "sample_sha256": hashlib.sha256(sample).hexdigest(),
        }


def sources(
    paths: Paths,
    *,
    patterns: Sequence[str],
    file: Callable[[pathlib.Path], Any],
    prepared: Callable[[str], Any],
) -> list[Any]:
    """Returns where the examples are that a user's `path` stands for.

    Files come as given, and in natural order (day_9 before day_10) within a
    pattern or directory.

    Args:
        paths: A file, a pattern such as `day_*.gz`, a directory, or
            `tfds:NAME[SPLIT]`; or several of these.
        patterns: Patterns of the files to read in a directory.
        file: Makes a source of a file.
        prepared: Makes one of the name of a prepared data set.
    """
    found: list[Any] = []
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        if str(path).startswith(PREFIX):
            found.append(prepared(str(path).removeprefix(PREFIX)))
        else:
            found += map(file, _expand(pathlib.Path(path), patterns))
    names = [source.name for source in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not found or twice:
        raise ValueError(
            "`path` must name each file once; received "
            f"{f'{twice} twice' if twice else 'none'}."
        )
    return found


def _expand(path: pathlib.Path, patterns: Sequence[str]) -> list[pathlib.Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        matches = {match for name in patterns for match in path.glob(name)}
    else:
        matches = set(map(pathlib.Path, glob.glob(str(path))))
    files = [match for match in matches if match.is_file()]
    if not files:
        raise ValueError(
            "`path` must be a file, a pattern, or a directory with "
            f"{', '.join(patterns)}; received {str(path)!r}, which matches no "
            "file. Set `path` to the location of the data."
        )
    return sorted(files, key=_natural_order)


def _natural_order(path: pathlib.Path) -> list[Any]:
    # Every other part is a number.
    parts = re.split(r"([0-9]+)", str(path))
    return [int(p) if at % 2 else p for at, p in enumerate(parts)]


def directory(given: str | os.PathLike[str] | None = None) -> pathlib.Path:
    """Returns `given`, else `tfdistill` in the user's cache directory."""
    if given is not None:
        return pathlib.Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home) / "tfdistill"


def open_or_make(
    prefix: str,
    describe: Callable[[], Mapping[str, Any]],
    make: Callable[[pathlib.Path], Mapping[str, Any]],
    *,
    root: pathlib.Path,
) -> pathlib.Path:
    """Returns the directory of a form, which is made at the first call.

    Args:
        prefix: Beginning of the directory's name; its end is a digest.
        describe: Returns, as JSON has it, all that the form depends on. Asked
            again in the end: sources must not change meanwhile.
        make: Fills an empty directory, and returns what the header says
            besides. The header is written last.
        root: Where forms are kept.

    Raises:
        RuntimeError: If the sources change while they are read.
    """
    wanted = describe()
    text = json.dumps(wanted, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:16]

    def make_with_header(aside: pathlib.Path) -> None:
        found = make(aside)
        if describe() != wanted:
            raise RuntimeError(
                f"Files of the {prefix} data changed while they were read. "
                "Start again once they are complete."
            )
        header = json.dumps({**wanted, **found}, indent=1, sort_keys=True)
        (aside / _HEADER).write_text(header, "utf-8")

    return made_once(root / f"{prefix}-{key}", make_with_header)


def read_header(path: pathlib.Path) -> dict[str, Any]:
    """Returns what the header of a form says."""
    return json.loads((path / _HEADER).read_text("utf-8"))


def check_size(path: pathlib.Path, num_bytes: int) -> None:
    """Checks that a file of a form is as long as its header says."""
    if not path.is_file() or path.stat().st_size != num_bytes:
        raise RuntimeError(
            f"{path} must have {num_bytes} bytes; it was damaged after it was "
            f"written. Delete {path.parent}, and start again."
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Checks that an option is a whole number of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number >= {least}; received {value!r}."
        )


class Progress:
    """Reports on standard error how far a long conversion is, now and then."""

    def __init__(self) -> None:
        self._reported = time.monotonic()

    def report(self, text: str) -> None:
        """Prints the text if the last was long ago."""
        now = time.monotonic()
        if now - self._reported >= _REPORT_SECS:
            self._reported = now
            tell(f"{text} ...")


def tell(text: str) -> None:
    """Prints a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def made_once(
    final: pathlib.Path,
    make: Callable[[pathlib.Path], None],
    *,
    wait_secs: float = 4 * 3600.0,
) -> pathlib.Path:
    """Returns a directory that is whole: made before, by others, or now.

    Args:
        final: The directory.
        make: Fills an empty directory. If it fails, nothing remains.
        wait_secs: How long to wait for another process that makes it.

    Raises:
        RuntimeError: If another process takes too long.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # With the machine's name: what others are making is not ours to remove.
    prefix = f".tmp-{final.name}-{os.uname().nodename}-"
    with contextlib.ExitStack() as stack:
        # The lock's file stays, since those who wait hold it open.
        place = final.with_name(f".lock-{final.name}")
        is_locked = _lock(filelock.FileLock(place), stack, wait_secs)
        if final.is_dir():
            return final
        if is_locked:  # Left by a killed process of this machine.
            for path in final.parent.glob(f"{prefix}*"):
                shutil.rmtree(path, ignore_errors=True)
        aside = pathlib.Path(tempfile.mkdtemp(dir=final.parent, prefix=prefix))
        stack.callback(shutil.rmtree, aside, ignore_errors=True)
        make(aside)
        # Group mates may run as other users; mkdtemp keeps them out.
        aside.chmod(0o755)
        try:
            aside.rename(final)
        except OSError:
            # Perhaps another machine was first: its copy is the same.
            if not final.is_dir():
                raise
    return final


def _lock(
    lock: filelock.BaseFileLock, stack: contextlib.ExitStack, wait_secs: float
) -> bool:
    """Takes the lock until the stack ends; False if there are no locks here."""
    for timeout in (0, wait_secs):
        try:
            stack.enter_context(lock.acquire(timeout=timeout))
            return True
        except filelock.Timeout:
            if not timeout:
                tell(
                    "Data: waiting for another process to convert them "
                    f"({lock.lock_file}) ..."
                )
        except (NotImplementedError, OSError):
            # Then all make it, and the first rename wins.
            return False
    raise RuntimeError(
        f"Another process has been converting data for over {wait_secs:g} s; "
        f"it holds {lock.lock_file}. Check whether it still makes progress; "
        "once it ends, start again."
    )


class Prepared:
    """One split of a data set, read in the order of its files.

    Attributes:
        name: What messages call it.
        num_examples: Examples in the split.
    """

    def __init__(
        self,
        name: str,
        *,
        features: Mapping[str, tuple[Any, tuple[int | None, ...]]],
    ) -> None:
        """Looks for the data set, and reads nothing yet.

        Args:
            name: As TensorFlow Datasets has it, such as `lm1b`, `c4/en` or
                `c4/en:3.0.1`; behind it a split in brackets, such as
                `lm1b[test]` or `c4/en[train[:1%]]`. Default split: `train`.
            features: The dtype and shape of each feature that is needed.

        Raises:
            ValueError: If there is no such data set on this machine, or it has
                other features.
        """
        import tensorflow_datasets as tfds

        self._tfds = tfds
        self.name = f"{PREFIX}{name}"
        found = re.fullmatch(r"([^\[\]]+)(?:\[(.+)\])?", name)
        if not found:
            raise ValueError(
                "A prepared data set must be tfds:NAME or tfds:NAME[SPLIT]; "
                f"received {self.name!r}. Correct the brackets."
            )
        self._split = split = found[2] or "train"
        try:
            # Given, since it is otherwise looked at when tfds is imported.
            data_dir = os.environ.get("TFDS_DATA_DIR")
            self._builder = tfds.builder(found[1], data_dir=data_dir)
        except (AssertionError, ValueError) as cause:
            raise ValueError(
                "A prepared data set must be in TensorFlow Datasets; received "
                f"{self.name!r}, for which it reports: "
                f"{str(cause).strip().splitlines()[0]} See its catalog."
            ) from cause
        if not self._builder.is_prepared():
            raise ValueError(
                f"{self.name!r} must be prepared before it is read; it was not "
                f"found in {self._builder.data_dir}. {self._remedy}, or set "
                "TFDS_DATA_DIR to its location."
            )
        info = self._builder.info
        try:
            self.num_examples = info.splits[split].num_examples
        except (KeyError, ValueError) as cause:
            known = ", ".join(sorted(info.splits))
            raise ValueError(
                "A prepared data set must have the requested split; received "
                f"{self.name!r}, which has {known}."
            ) from cause
        self._check_features(features)

    @property
    def _remedy(self) -> str:
        """How a data set that was not prepared is prepared."""
        name = self.name.removeprefix(PREFIX)
        return f"Run tfds.builder({name!r}).download_and_prepare()"

    def _check_features(
        self, features: Mapping[str, tuple[Any, tuple[int | None, ...]]]
    ) -> None:
        held = self._builder.info.features
        specs = held.get_tensor_spec() if hasattr(held, "keys") else {}
        for field, (dtype, shape) in features.items():
            spec, wanted = specs.get(field), tf.as_dtype(dtype)
            fits = isinstance(spec, tf.TensorSpec) and (
                wanted.is_integer == spec.dtype.is_integer
                and wanted.is_floating == spec.dtype.is_floating
                and spec.shape.is_compatible_with(shape)
            )
            if not fits:
                raise ValueError(
                    f"{self.name!r} must have a feature {field!r} of dtype "
                    f"{wanted.name} and shape {list(shape)}; received {specs}. "
                    "Choose another data set."
                )

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the examples do, as JSON has it."""
        return {
            "name": self._builder.info.full_name,
            "split": self._split,
            "examples": self.num_examples,
        }

    def examples(self) -> tf.data.Dataset:
        """Returns the examples in order, whatever the machine."""
        # One file after the other, and within each in order.
        options = tf.data.Options()
        options.deterministic = True
        read = self._tfds.ReadConfig(
            interleave_cycle_length=1, options=options, try_autocache=False
        )
        return self._builder.as_dataset(
            split=self._split, shuffle_files=False, read_config=read
        )
