"""CIFAR-10 on disk: finds the images, decodes them once, keeps arrays.

The images come from `cifar10/cifar10_jpg.zip` in the data directory, whose
members are `train/<class>/<number>.jpg` and `test/...`; without it,
from an already prepared TensorFlow Datasets copy. Nothing is downloaded.
"""

import io
import os
import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np
import PIL.Image

from models import files as data_files

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
IMAGE_SHAPE = (32, 32, 3)
SPLITS = ("train", "test")

Arrays = tuple[np.ndarray, np.ndarray]


def load(
    *,
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[Arrays, Arrays]:
    """Returns the images and labels of the training and of the test split.

    The first call decodes every image (some seconds, announced on standard
    error) into `cache_dir`; later ones map those files into memory, which all
    processes of a machine share. The order is random but always the same, so
    that any slice holds all classes.

    Args:
        data_dir: Holds `cifar10/cifar10_jpg.zip`. Default: the environment
            variable TFDISTILL_DATA, else `../shared/data` beside the
            repository.
        cache_dir: Holds the decoded arrays. Default: `tfdistill` in the user's
            cache directory.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images uint8
        `[examples, 32, 32, 3]`, labels int64 `[examples]`, indices of
        `CLASSES`. Read-only.

    Raises:
        ValueError: If there are no images, or they are not those described.
    """
    source = _find(data_files.data_dir(data_dir))

    def decode(aside: pathlib.Path) -> dict[str, Any]:
        data_files.tell(
            f"CIFAR-10: decoding all images once into {aside.parent} ..."
        )
        for split in SPLITS:
            images, labels = source.read(split)
            order = np.random.default_rng(0).permutation(len(labels))
            np.save(aside / f"{split}_images.npy", images[order])
            np.save(aside / f"{split}_labels.npy", labels[order])
        return {}

    cached = data_files.open_or_make(
        "cifar10",
        source.identity,
        decode,
        root=data_files.directory(cache_dir),
    )
    train, test = (_read_cache(cached, split) for split in SPLITS)
    return train, test


def _find(data_dir: pathlib.Path) -> "Archive | Prepared":
    archive = data_dir / "cifar10" / "cifar10_jpg.zip"
    if archive.is_file():
        return Archive(archive)
    try:
        return Prepared()
    except ValueError as cause:
        raise ValueError(
            f"CIFAR-10 must be at {archive}, or prepared: {cause} Or set "
            "TFDISTILL_DATA to the data directory."
        ) from cause


class Archive(data_files.File):
    """A zip archive of JPEG images, `<split>/<class>/<number>.jpg`."""

    def read(self, split: str) -> Arrays:
        """Returns the images and labels of a split."""
        images, labels, name = [], [], ""
        try:
            with zipfile.ZipFile(self.path) as opened:
                for name in sorted(opened.namelist()):
                    if name.startswith(f"{split}/") and name[-1] != "/":
                        labels.append(CLASSES.index(name.split("/")[1]))
                        images.append(_decode(opened.read(name)))
        except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as cause:
            raise ValueError(
                f"{self.name} must hold JPEG images of 32x32 pixels in "
                f"<split>/<class>/, with a class of {CLASSES}; received "
                f"{name!r}: {cause}. Copy it again."
            ) from cause
        missing = set(CLASSES) - {CLASSES[label] for label in labels}
        if missing:
            raise ValueError(
                f"{self.name} must hold images {split}/<class>/<number>.jpg of "
                f"all ten classes; there are none of {sorted(missing)}."
            )
        return np.stack(images), np.array(labels, np.int64)


def _decode(content: bytes) -> np.ndarray:
    with PIL.Image.open(io.BytesIO(content)) as image:
        pixels = np.asarray(image.convert("RGB"), np.uint8)
    if pixels.shape != IMAGE_SHAPE:
        raise ValueError(f"an image of shape {pixels.shape}")
    return pixels


class Prepared:
    """What TensorFlow Datasets has prepared."""

    def __init__(self) -> None:
        """Looks for it, and reads nothing yet."""
        features = {"image": (np.uint8, IMAGE_SHAPE), "label": (np.int64, ())}
        self._splits = {
            split: data_files.Prepared(f"cifar10[{split}]", features=features)
            for split in SPLITS
        }

    def identity(self) -> dict[str, Any]:
        """Returns what changes whenever the images do, as JSON has it."""
        return {name: found.identity() for name, found in self._splits.items()}

    def read(self, split: str) -> Arrays:
        """Returns the images and labels of a split."""
        found = list(self._splits[split].examples().as_numpy_iterator())
        images, labels = (
            np.stack([example[name] for example in found])
            for name in ("image", "label")
        )
        return images, labels


def _read_cache(cached: pathlib.Path, split: str) -> Arrays:
    images, labels = (
        np.load(cached / f"{split}_{kind}.npy", mmap_mode="r")
        for kind in ("images", "labels")
    )
    return images, labels
