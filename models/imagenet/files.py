"""ImageNet on disk: folders of images, or a prepared TensorFlow Datasets copy.

Gives encoded images, so that only what is cropped is ever decoded. Nothing is
downloaded: ImageNet's terms ask each user to get it from image-net.org.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdistill
from models import files as data_files
from tfdistill import data

_SUFFIXES = (".jpeg", ".jpg", ".png")
_NAME = "imagenet2012"
# Encoded images in memory for shuffling: about 0.9 GB of ImageNet's.
_SHUFFLED_AT_ONCE = 8192
_FILES_AT_ONCE = 16

# Leaves out what other workers of the group read.
Share = Callable[[tf.data.Dataset], tf.data.Dataset]
# Makes them from an image's number on.
Images = Callable[[int], tf.data.Dataset]


def find(path: str | os.PathLike[str] | None) -> "Folders | Prepared":
    """Returns where the images are, encoded: in folders, or prepared."""
    return Prepared() if path is None else Folders(path)


class Folders:
    """Images in folders named for their classes, in order of those names."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Lists the files."""
        root = pathlib.Path(path)
        self.class_names = _folders(root / "train")
        unknown = set(_folders(root / "val")) - set(self.class_names)
        if unknown:
            raise ValueError(
                f"The classes in {root / 'val'} must also be in "
                f"{root / 'train'}; found others: {sorted(unknown)}."
            )
        self._root = root
        self.num_classes = len(self.class_names)

    def _files(self, split: str) -> tuple[np.ndarray, np.ndarray]:
        found: list[tuple[str, int]] = []
        for label, name in enumerate(self.class_names):
            folder = self._root / split / name
            if not folder.is_dir():
                continue
            with os.scandir(folder) as entries:
                names = sorted(
                    entry.path
                    for entry in entries
                    if entry.name.lower().endswith(_SUFFIXES)
                )
            found += [(path, label) for path in names]
        if not found:
            raise ValueError(
                f"{self._root / split}/<class> must hold images "
                f"({', '.join(_SUFFIXES)}); there are none."
            )
        paths, labels = zip(*found, strict=True)
        return np.array(paths, np.bytes_), np.array(labels, np.int64)

    def train(
        self,
        cluster: tfdistill.Cluster,
        *,
        mode: str,
        seed: int,
        share: Share,
    ) -> tuple[Images, int]:
        """Returns a group's images, endless and shuffled, and their number.

        Elements are (number, (image, label)), from a number on; each epoch is
        exactly shuffled. `share` is applied as soon as the numbers are known.
        """
        arrays = data.group_shard(self._files("train"), cluster, mode=mode)
        paths, labels = (tf.constant(array) for array in arrays)

        def read(number: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return number, (tf.io.read_file(paths[index]), labels[index])

        def images(first: int) -> tf.data.Dataset:
            indices = data.shuffled_indices(
                len(arrays[1]), seed=seed, group=cluster.group, first=first
            )
            own = share(indices.enumerate(first))
            return own.map(read, num_parallel_calls=_FILES_AT_ONCE)

        return images, len(arrays[1])

    def validation(self) -> tf.data.Dataset:
        """Returns the images in order of classes and names."""
        files = tf.data.Dataset.from_tensor_slices(self._files("val"))
        return files.map(
            lambda path, label: (tf.io.read_file(path), label),
            num_parallel_calls=_FILES_AT_ONCE,
        )


def _folders(path: pathlib.Path) -> list[str]:
    try:
        names = sorted(each.name for each in path.iterdir() if each.is_dir())
    except OSError as cause:
        raise ValueError(
            f"{path} must be a directory of class folders; it cannot be read: "
            f"{cause.strerror}. Override path with the directory of "
            "train and val."
        ) from cause
    if not names:
        raise ValueError(f"{path} must hold a folder per class; it has none.")
    return names


class Prepared(data_files.Prepared):
    """What TensorFlow Datasets has prepared: it lies in random order."""

    def __init__(self) -> None:
        """Reads the description, not yet the images."""
        features = {
            "image": (tf.uint8, (None, None, 3)),
            "label": (tf.int64, ()),
        }
        super().__init__(_NAME, features=features)
        labels = self._builder.info.features["label"]
        self.num_classes, self.class_names = labels.num_classes, labels.names

    def _read(self, split: Any) -> tf.data.Dataset:
        options = tf.data.Options()
        options.deterministic = True
        examples = self._builder.as_dataset(
            split=split,
            decoders={"image": self._tfds.decode.SkipDecoding()},
            read_config=self._tfds.ReadConfig(
                options=options,
                try_autocache=False,
                skip_prefetch=True,
                interleave_cycle_length=_FILES_AT_ONCE,
            ),
        )
        return examples.map(
            lambda example: (example["image"], example["label"])
        )

    def train(
        self,
        cluster: tfdistill.Cluster,
        *,
        mode: str,
        seed: int,
        share: Share,
    ) -> tuple[Images, int]:
        """Returns a group's images, each epoch in another order.

        Disjoint parts lie one after the other in the files, so that a group
        reads only its own. Elements change places within some thousands.
        """
        if mode not in ("disjoint", "shared"):
            raise ValueError(
                f'`mode` must be "disjoint" or "shared"; received {mode!r}.'
            )
        split, num_groups = "train", cluster.num_groups
        if mode == "disjoint" and num_groups > 1:
            split = self._tfds.even_splits(split, n=num_groups)[cluster.group]
        num_images = self._builder.info.splits[split].num_examples
        images = self._read(split)
        base = tf.constant([seed, cluster.group], tf.int64)

        def epoch_of(epoch: tf.Tensor) -> tf.data.Dataset:
            # Only for this function's graph: `shuffle` mixes the program's
            # global seed into its own, and fails on a global seed of 0.
            tf.random.set_seed(1)
            fold = tf.random.experimental.stateless_fold_in(base, epoch)
            own = tf.random.stateless_uniform(
                [], fold, minval=None, maxval=None, dtype=tf.int64
            )
            return images.shuffle(
                min(num_images, _SHUFFLED_AT_ONCE),
                seed=own,
                reshuffle_each_iteration=False,
            )

        def numbered(first: int) -> tf.data.Dataset:
            epoch, left_out = divmod(first, num_images)
            epochs = tf.data.Dataset.range(epoch, tf.int64.max)
            rest = epochs.flat_map(epoch_of).skip(left_out)
            return share(rest.enumerate(first))

        return numbered, num_images

    def validation(self) -> tf.data.Dataset:
        """Returns the validation images in the order of the files."""
        return self._read("validation")
