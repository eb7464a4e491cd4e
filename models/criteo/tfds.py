"""The click log as a TensorFlow Datasets builder, `criteo_display_ads`.

Importing this module registers it: `tfds.load("criteo_display_ads")`.
"""

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from models.criteo import files
from models.criteo import rows as criteo_rows

__all__ = ["CriteoDisplayAds"]


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

    Faulty lines are counted, skipped and told of, as in `files.Reader`.
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
