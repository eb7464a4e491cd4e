"""Files of data sets: where they lie, their converted forms, prepared copies.

A converted form is made once, kept with a header, and checked when opened. On
one machine one process makes it and the others wait. Where locks do not reach,
as on some shared file systems, several may make it; the first rename wins, and
all of them use that one.

Of data sets that TensorFlow Datasets has prepared, nothing is downloaded and
nothing prepared here. It takes seconds to import: only its users wait for it.
"""

import collections
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


def data_dir(given: Path | None = None) -> pathlib.Path:
    """Returns `given`, else TFDISTILL_DATA, else `../shared/data`."""
    if given is not None:
        return pathlib.Path(given)
    if os.environ.get("TFDISTILL_DATA"):
        return pathlib.Path(os.environ["TFDISTILL_DATA"])
    repository = pathlib.Path(__file__).resolve().parents[1]
    return repository.parent / "shared" / "data"


def natural_order(path: pathlib.Path) -> list[tuple[int, int, str]]:
    """Returns a key to sort by: day_9 comes before day_10."""
    parts = re.split(r"([0-9]+)", str(path))
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in parts
    ]


def check_names(names: Sequence[Any]) -> None:
    """Checks the files that a user's `path` stands for."""
    if not names:
        raise ValueError("`path` must name at least one file; received none.")
    twice = [
        n for n, number in collections.Counter(names).items() if number > 1
    ]
    if twice:
        raise ValueError(
            f"`path` must name each file once; received {twice[0]} twice. "
            "Remove one of the two."
        )


_HEADER = "header.json"


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
            f"made. Delete {path.parent}, and start again."
        )


def check_at_least(name: str, value: int, least: int) -> None:
    """Checks that an option is a whole number of at least `least`."""
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number >= {least}; received {value!r}."
        )


class Progress:
    """Reports on standard error how far a long conversion is, now and then."""

    def __init__(self, *, every_secs: float = 10.0) -> None:
        self._every_secs = every_secs
        self._reported = time.monotonic()

    def report(self, text: str) -> None:
        """Prints the text if it is time to."""
        now = time.monotonic()
        if now - self._reported >= self._every_secs:
            self._reported = now
            print(f"{text} ...", file=sys.stderr, flush=True)


def made_once(
    final: pathlib.Path,
    make: Callable[[pathlib.Path], None],
    *,
    wait_secs: float = 4 * 3600.0,
    report_every_secs: float = 30.0,
) -> pathlib.Path:
    """Returns a directory that is whole: made before, by others, or now.

    Args:
        final: The directory.
        make: Fills an empty directory. If it fails, nothing remains.
        wait_secs: How long to wait for another process that makes it.
        report_every_secs: Time between two reports of the wait.

    Raises:
        RuntimeError: If another process takes too long.
    """
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    # The file stays, since those who wait hold it open.
    lock = filelock.FileLock(final.with_name(f".lock-{final.name}"))
    try:
        is_alone = _wait(lock, wait_secs, report_every_secs)
        if not final.is_dir():
            if is_alone:
                _remove_leftovers(final)
            _make_aside(final, make)
    finally:
        lock.release()  # Nothing if it is not held.
    return final


def _make_aside(
    final: pathlib.Path, make: Callable[[pathlib.Path], None]
) -> None:
    aside = pathlib.Path(
        tempfile.mkdtemp(dir=final.parent, prefix=_prefix(final))
    )
    try:
        make(aside)
        # Group mates may run as other users; mkdtemp keeps them out.
        aside.chmod(0o755)
        try:
            aside.rename(final)
        except OSError:
            # Another machine was first: its copy is the same.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(final: pathlib.Path) -> str:
    # With the machine's name: what others are making is not ours to remove.
    return f".tmp-{final.name}-{os.uname().nodename}-"


def _remove_leftovers(final: pathlib.Path) -> None:
    """Removes what a process of this machine left when it was killed."""
    for path in final.parent.glob(f"{_prefix(final)}*"):
        shutil.rmtree(path, ignore_errors=True)


def _wait(
    lock: filelock.BaseFileLock, wait_secs: float, report_every_secs: float
) -> bool:
    """Takes the lock; returns False if the file system has none."""
    start = time.monotonic()
    while True:
        waited = time.monotonic() - start
        try:
            lock.acquire(
                timeout=max(0.0, min(report_every_secs, wait_secs - waited)),
                poll_interval=min(0.2, wait_secs),
            )
            return True
        except filelock.Timeout:
            waited = time.monotonic() - start
        except (NotImplementedError, OSError):
            # No locks here: then all make it, and the first rename wins.
            return False
        if waited >= wait_secs:
            raise RuntimeError(
                f"Another process has been converting data for over "
                f"{wait_secs:.0f} s; it holds {lock.lock_file}. See whether "
                "it still makes progress; once it ends, start again."
            )
        print(
            "Data: waiting for another process to convert them "
            f"({waited:.0f} s so far; {lock.lock_file}) ...",
            file=sys.stderr,
            flush=True,
        )


# Of a `path` that names a data set instead of files.
PREFIX = "tfds:"


class Prepared:
    """One split of a data set, read in the order of its files.

    Attributes:
        name: What messages call it.
        num_examples: Examples in the split.
    """

    def __init__(
        self, name: str, *, features: Mapping[str, tuple[Any, tuple[int, ...]]]
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
                "A prepared data set must be one of TensorFlow Datasets; "
                f"received {self.name!r}, of which it says: "
                f"{str(cause).strip().splitlines()[0]} See its catalog."
            ) from cause
        if not self._builder.is_prepared():
            raise ValueError(
                f"{self.name!r} must be prepared before it is read; it was "
                f"not found in {self._builder.data_dir}. {self._remedy}, or "
                "set TFDS_DATA_DIR to where it is."
            )
        info = self._builder.info
        try:
            self.num_examples = info.splits[split].num_examples
        except (KeyError, ValueError) as cause:
            known = ", ".join(sorted(info.splits))
            raise ValueError(
                f"A prepared data set must have the split that is read; "
                f"received {self.name!r}, which has {known}."
            ) from cause
        self._check_features(features)

    @property
    def _remedy(self) -> str:
        """How a data set that was not prepared is prepared."""
        name = self.name.removeprefix(PREFIX)
        return f"Run tfds.builder({name!r}).download_and_prepare()"

    def _check_features(
        self, features: Mapping[str, tuple[Any, tuple[int, ...]]]
    ) -> None:
        held = self._builder.info.features
        specs = held.get_tensor_spec() if hasattr(held, "keys") else {}
        for field, (dtype, shape) in features.items():
            spec = specs.get(field)
            fits = isinstance(spec, tf.TensorSpec) and (
                tf.as_dtype(dtype).is_integer == spec.dtype.is_integer
                and tf.as_dtype(dtype).is_floating == spec.dtype.is_floating
                and spec.shape.is_compatible_with(shape)
            )
            if not fits:
                raise ValueError(
                    f"{self.name!r} must have a feature {field!r} of dtype "
                    f"{tf.as_dtype(dtype).name} and shape {list(shape)}; "
                    f"received {', '.join(f'{k!r}' for k in specs) or 'none'}"
                    f"{f', with {spec} for it' if spec is not None else ''}. "
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
