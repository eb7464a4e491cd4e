"""How fast click logs are read: as text, and in the converted form.

Three sides take turns, each giving batches of one label, 13 integers and 26
hashed categories: `tf.data.experimental.CsvDataset`, batched first and hashed
by the batch, which is the fastest way to use it; this project's reader of the
same text; and its training batches, shuffled, from the converted form. The
targets are 3 and 10 times the rows a second of the first side.

For one pass over data, as to predict; training reads the converted form.
"""

import pathlib
import tempfile
import time
import types
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import measure
from models.criteo import batches as criteo_batches
from models.criteo import converted
from models.criteo import files as criteo_files
from models.criteo import rows as criteo_rows
from tfdistill.system import programs

__all__ = ["Arrays", "batches"]


Arrays = tuple[dict[str, np.ndarray], np.ndarray]


def batches(
    reader: criteo_files.Reader,
    *,
    batch_size: int,
    field_sizes: int | Sequence[int] = converted.DEFAULT_FIELD_SIZE,
    missing_value: float = 0.0,
) -> Iterator[Arrays]:
    """Yields the rows in order, as `criteo.make_datasets` gives them.

    No category is rare here: that takes a count of all rows.

    Args:
        reader: Reads the files.
        batch_size: Rows of every batch but the last, >= 1.
        field_sizes: As for `criteo.make_datasets`. Default 10,000.
        missing_value: Stands for missing integers. Default 0.

    Yields:
        (`{"integers": float32 [batch, 13], "categories": int32 [batch, 26]}`,
        labels float32 `[batch, 1]`).

    Raises:
        ValueError: If an argument is out of range, or as `Reader` does.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be >= 1; received {batch_size}.")
    sizes = np.array(converted.checked_field_sizes(field_sizes), np.uint32)
    rest: list[np.ndarray] = []
    for rows in reader.rows():
        integers = criteo_rows.log_integers(rows)
        integers[rows.missing] = missing_value
        categories = criteo_rows.hashed_rows(rows.fingerprints, sizes)
        labels = rows.labels.astype(np.float32)[:, np.newaxis]
        found = [integers, categories, labels]
        if rest:
            pairs = zip(rest, found, strict=True)
            found = [np.concatenate(pair) for pair in pairs]
        whole = len(found[0]) - len(found[0]) % batch_size
        for first in range(0, whole, batch_size):
            yield _batch([a[first : first + batch_size] for a in found])
        rest = [array[whole:] for array in found]
    if rest and len(rest[0]):
        yield _batch(rest)


def _batch(arrays: list[np.ndarray]) -> Arrays:
    integers, categories, labels = arrays
    return {"integers": integers, "categories": categories}, labels


_TSV_TARGET = 3.0
_BINARY_TARGET = 10.0
# The faster a side, the more of its rows must be read to time it.
_BINARY_PASSES = 10


def _synthetic(num_rows: int) -> bytes:
    """Returns rows with lengths and gaps about as those of the real log."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(num_rows):
        fields = [str(int(rng.random() < 0.25))]
        counts = rng.lognormal(2.0, 2.0, criteo_rows.NUM_INTEGERS).astype(int)
        fields += [str(n) if rng.random() < 0.85 else "" for n in counts]
        categories = rng.zipf(1.2, criteo_rows.NUM_CATEGORIES) % 2**32
        fields += [f"{n:08x}" if n % 9 else "" for n in categories]
        lines.append("\t".join(fields))
    return "\n".join(lines).encode() + b"\n"


def _write_text(path: pathlib.Path, source: str | None, num_rows: int) -> str:
    """Writes about so many rows; returns what they are."""
    try:
        reader = criteo_files.Reader(source or criteo_files.default_path())
    except ValueError as error:
        if source is not None:
            raise
        measure.log(f"Rows are made up: {error}")
        content, kind = _synthetic(min(num_rows, 20_000)), "synthetic"
    else:
        blocks = [
            block
            for block, parsed in reader
            # Only whole blocks: CsvDataset stops at a faulty line.
            if not parsed.reasons.any()
        ]
        content, kind = b"".join(blocks), "real"
    copies = -(-num_rows // max(1, content.count(b"\n")))
    path.write_bytes(content * copies)
    return kind


class _Sides:
    """The three readers of one text."""

    def __init__(self, path: pathlib.Path, options: programs.Options) -> None:
        self._path = path
        self._batch_size = options.batch_size
        self._size = options.field_size
        start = time.perf_counter()
        self._binary = converted.open_or_convert(
            path,
            options=converted.Options(field_sizes=self._size),
            cache_dir=path.parent / "cache",
        )
        self.conversion_secs = time.perf_counter() - start
        self.num_rows = int(self._binary.header["num_rows_read"])

    def turns(self) -> dict[str, Callable[[], float]]:
        """Returns by name a function that gives rows per second."""
        return {
            "csv_dataset": lambda: self._rate(self.csv_dataset()),
            "tsv": lambda: self._rate(self.tsv()),
            "binary": lambda: self._rate(self.binary()),
        }

    def _rate(self, batches: Iterable[Any]) -> float:
        start = time.perf_counter()
        num_rows = 0
        for _, labels in batches:
            num_rows += labels.shape[0]
        return num_rows / (time.perf_counter() - start)

    def csv_dataset(self) -> tf.data.Dataset:
        """Batches as one would make them with TensorFlow alone."""
        numbers = [tf.constant([0], tf.int32)] * (1 + criteo_rows.NUM_INTEGERS)
        texts = [tf.constant([""])] * criteo_rows.NUM_CATEGORIES
        rows = tf.data.experimental.CsvDataset(
            str(self._path),
            numbers + texts,
            field_delim="\t",
            use_quote_delim=False,
        )

        def hashed(*columns: tf.Tensor) -> tuple[Any, tf.Tensor]:
            texts = tf.stack(columns[len(numbers) :], axis=-1)
            categories = tf.strings.to_hash_bucket_fast(texts, self._size)
            integers = tf.stack(columns[1 : len(numbers)], axis=-1)
            return {"integers": integers, "categories": categories}, columns[0]

        batches = rows.batch(self._batch_size)
        batches = batches.map(hashed, num_parallel_calls=tf.data.AUTOTUNE)
        return batches.prefetch(tf.data.AUTOTUNE)

    def tsv(self) -> Iterable[Any]:
        """Batches of this project's reader, as tensors."""
        arrays = batches(
            criteo_files.Reader(self._path),
            batch_size=self._batch_size,
            field_sizes=self._size,
        )
        return (tf.nest.map_structure(tf.constant, batch) for batch in arrays)

    def binary(self) -> tf.data.Dataset:
        """Training batches of the converted form, shuffled."""
        batches = criteo_batches.train_batches(
            self._binary,
            types.SimpleNamespace(group=0, num_groups=1),
            global_batch_size=self._batch_size,
        )
        return batches.take(_BINARY_PASSES * self.num_rows // self._batch_size)


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
        path = pathlib.Path(root) / "rows.tsv"
        kind = _write_text(path, options.path, options.rows)
        sides = _Sides(path, options)
        rates = measure.interleave(sides.turns(), rounds=options.rounds)
        num_bytes = path.stat().st_size
    baseline = rates["csv_dataset"]
    compared = {}
    for name, target in (("tsv", _TSV_TARGET), ("binary", _BINARY_TARGET)):
        ratios = measure.ratio_of(rates[name], baseline, best=max)
        judged = measure.judge(ratios["of_medians"], at_least=target)
        compared[f"{name}_to_csv_dataset"] = {**judged, "ratios": ratios}
    record.update(
        benchmark="criteo_input",
        config=vars(options),
        ratio=compared["binary_to_csv_dataset"]["ratio"],
        target=_BINARY_TARGET,
        met=all(found["met"] for found in compared.values()),
        **compared,
        rows_per_second={k: measure.summary(v) for k, v in rates.items()},
        data={"kind": kind, "rows": sides.num_rows, "bytes": num_bytes},
        conversion_rows_per_second=round(
            sides.num_rows / sides.conversion_secs
        ),
        machine=measure.machine(),
    )


def _add_options(options: programs.Flags) -> None:
    options.add(
        "path", "<FILE>: a click log, instead of the one in TFDISTILL_DATA"
    )
    for name, default, text, quick in (
        ("rows", 108000, "repeats the log to so many", None),
        ("batch_size", 1024, "rows a batch", None),
        ("field_size", 10000, "ids of each field", None),
        ("rounds", 7, "turns of each side", 3),
    ):
        options.add(name, text, default, quick=quick)


PROGRAM = measure.program("criteo_input", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
