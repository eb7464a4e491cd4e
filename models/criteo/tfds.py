"""The click log by TensorFlow Datasets: a builder of it, and its rows.

Importing this module registers the builder `criteo_display_ads`.
"""

import os
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np
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
_INSTRUCTIONS = """
Criteo's terms do not allow others to hand the data on. Agree to them at
https://ailab.criteo.com/ressources/ (Kaggle Display Advertising Challenge
dataset), and put the rows with labels into `manual_dir`: `train.txt` or any
`*.tsv`, also with `.gz`. `test.txt` has no labels and is not read.
"""


class CriteoDisplayAds(tfds.core.GeneratorBasedBuilder):
    """Rows of Criteo's display advertising challenge, from your own copy.

    Faulty lines are counted, skipped and reported, as in `files.Reader`.
    """

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
        for block, parsed in files.Reader(path):
            rows = parsed.rows
            integers = np.where(rows.missing, np.nan, rows.integers)
            good = np.flatnonzero(parsed.reasons == 0)
            for row, line in enumerate(good.tolist()):
                start, end = parsed.line_starts[line], parsed.line_ends[line]
                text = block[start:end].removesuffix(b"\r").decode()
                fields = text.split("\t")[-criteo_rows.NUM_CATEGORIES :]
                yield (
                    number,
                    {
                        "label": int(rows.labels[row]),
                        "integers": integers[row],
                        "categories": fields,
                    },
                )
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
    """A prepared data set with those features, as the lines of a click log.

    `files.Source`: the same rows are converted to the same bytes, whether they
    come from text or from here.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, features=_FEATURES)
        self.size = self.num_examples

    @property
    def _remedy(self) -> str:
        if self._builder.name != CriteoDisplayAds.name:
            return super()._remedy
        return "Run models.criteo.tfds.prepare(DIR) with DIR/train.txt"

    def blocks(self, *, on_read: Callable[[int], None]) -> Iterator[bytes]:
        """Yields whole lines, many at a time."""
        texts = self.examples().batch(_ROWS_AT_ONCE).map(_lines)
        for num_rows, text in texts.as_numpy_iterator():
            on_read(int(num_rows))
            yield text


def _lines(examples: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number of lines, and their text."""
    values = tf.cast(examples["integers"], tf.float64)
    known = tf.math.is_finite(values)
    whole = tf.cast(tf.where(known, values, 0.0), tf.int64)
    integers = tf.where(known, tf.strings.as_string(whole), "")
    labels = tf.strings.as_string(examples["label"])[:, tf.newaxis]
    columns = tf.concat([labels, integers, examples["categories"]], axis=1)
    lines = tf.strings.reduce_join(columns, axis=1, separator="\t")
    return tf.size(lines), tf.strings.reduce_join(lines + "\n")
