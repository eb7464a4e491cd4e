"""The click log by TensorFlow Datasets: a builder of it, and its rows.

Importing this module registers the builder `criteo_display_ads`.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
import tensorflow_datasets as tfds

from models import files as data_files
from models.criteo import files
from models.criteo import rows as criteo_rows

_DESCRIPTION = """
A week of display ads shown by Criteo, in the order of time: was the ad
clicked (label 0 or 1), 13 integer features, mostly counts, and 26 categorical
features, hashed by Criteo. Missing integers are NaN, missing categories empty.
"""
_INSTRUCTIONS = """ Criteo's terms don't allow others to distribute the data.
                Agree to them at https://ailab.criteo.com/ressources/ (Kaggle
                Display Advertising Challenge dataset), and put the rows with
                labels into `manual_dir`: `train.txt` or any `*.tsv`, also with
                `.gz`. `test.txt` has no labels and is not read.
"""


class CriteoDisplayAds(tfds.core.GeneratorBasedBuilder):
    """Rows of Criteo's display advertising challenge, from your own copy."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    MANUAL_DOWNLOAD_INSTRUCTIONS = _INSTRUCTIONS
    # To find this file by itself, tensorflow_datasets 4.9.10 imports
    # importlib_resources, which it does not ask to be installed.
    code_path = pathlib.Path(__file__)

    def _info(self) -> tfds.core.DatasetInfo:
        integers = tfds.features.Tensor(
            # float64 holds every integer of the log, and NaN.
            shape=(criteo_rows.NUM_INTEGERS,),
            dtype=tf.float64,
        )
        categories = tfds.features.Sequence(
            tfds.features.Text(), length=criteo_rows.NUM_CATEGORIES
        )
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {
                    "label": tfds.features.ClassLabel(num_classes=2),
                    "integers": integers,
                    "categories": categories,
                }
            ),
            homepage="https://ailab.criteo.com/ressources/",
            # Keeps the order of time.
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {"train": self._generate_examples(dl_manager.manual_dir)}

    def _generate_examples(
        self, path: str | os.PathLike[str]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        number = 0
        sources = data_files.sources(
            path, patterns=files.PATTERNS, file=files.File, prepared=Rows
        )
        for source in sources:
            for batch in source.batches():
                columns = (column.to_pylist() for column in batch)
                for label, *values in zip(*columns, strict=True):
                    integers = values[: criteo_rows.NUM_INTEGERS]
                    example = {
                        "label": int(label),
                        # None becomes NaN.
                        "integers": np.array(integers, np.float64),
                        "categories": values[criteo_rows.NUM_INTEGERS :],
                    }
                    yield number, example
                    number += 1


def prepare(
    manual_dir: data_files.Path, data_dir: data_files.Path | None = None
) -> CriteoDisplayAds:
    """Prepares the click log, for the recipes and for `tfds.load`.

    Args:
        manual_dir: Holds the text, `train.txt` or any `*.tsv`.
        data_dir: Where to. Default: TFDS_DATA_DIR, else
            `~/tensorflow_datasets`.
    """
    builder = CriteoDisplayAds(
        data_dir=data_dir or os.environ.get("TFDS_DATA_DIR")
    )
    builder.download_and_prepare(
        download_config=tfds.download.DownloadConfig(manual_dir=manual_dir)
    )
    return builder


_FEATURES = {
    "label": (tf.int64, ()),
    "integers": (tf.float64, (criteo_rows.NUM_INTEGERS,)),
    "categories": (tf.string, (criteo_rows.NUM_CATEGORIES,)),
}
_ROWS_AT_ONCE = 4096


class Rows(data_files.Prepared):
    """A prepared data set with those features, as the rows of a click log.

    The same rows are converted to the same bytes, whether they come from text
    or from here.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, features=_FEATURES)

    @property
    def _remedy(self) -> str:
        if self._builder.name != CriteoDisplayAds.name:
            return super()._remedy
        return "Run models.criteo.tfds.prepare(DIR) with DIR/train.txt"

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows in order, in the columns of `rows.SCHEMA`."""
        examples = self.examples().batch(_ROWS_AT_ONCE)
        for batch in examples.as_numpy_iterator():
            yield pa.RecordBatch.from_arrays(
                [
                    pa.array(batch["label"].astype(bool)),
                    *map(_integers, batch["integers"].T),
                    *(pa.array(texts) for texts in batch["categories"].T),
                ],
                schema=criteo_rows.SCHEMA,
            )


def _integers(values: np.ndarray) -> pa.Array:
    known = np.isfinite(values)
    return pa.array(np.where(known, values, 0).astype(np.int64), mask=~known)
