"""CIFAR-10 on disk: finds the images, decodes them once, keeps arrays.

The images come from `cifar10/cifar10_jpg.zip` in the data directory, whose
members are `train/<class>/<number>.jpg` and `test/...`; without it,
from an already prepared TensorFlow Datasets copy. Nothing is downloaded.
"""

import hashlib
import io
import os
import pathlib
import zipfile
import zlib
from collections.abc import Callable

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
        data_dir: Holds `cifar10/cifar10_jpg.zip`, or a prepared TensorFlow
            Datasets `cifar10/<version>`. Default: the environment variable
            TFDISTILL_DATA, else `../shared/data` beside the repository.
        cache_dir: Holds the decoded arrays. Default: `tfdistill` in the user's
            cache directory.

    Returns:
        `(x_train, y_train), (x_test, y_test)`: images uint8
        `[examples, 32, 32, 3]`, labels int64 `[examples]`, indices of
        `CLASSES`. Read-only.

    Raises:
        ValueError: If there are no images, or they are not those described.
    """
    key, read = _find(data_files.data_dir(data_dir))
    cached = data_files.made_once(
        data_files.directory(cache_dir) / f"cifar10-{key}",
        lambda aside: _decode_all(aside, read),
    )
    train, test = (_read_cache(cached, split) for split in SPLITS)
    return train, test


def _find(
    data_dir: pathlib.Path,
) -> tuple[str, Callable[[str], Arrays]]:
    """Returns a name for the copy found, and a function that reads a split."""
    archive = data_dir / "cifar10" / "cifar10_jpg.zip"
    if archive.is_file():
        return _digest(archive), lambda split: _read_zip(archive, split)
    version, places = data_files.tfds_version("cifar10", data_dir)
    if version is not None:
        key = hashlib.sha256(str(version.resolve()).encode()).hexdigest()
        return f"tfds-{key[:16]}", lambda split: _read_tfds(version, split)
    raise ValueError(
        f"CIFAR-10 must be at {archive}, or prepared by TensorFlow Datasets in "
        f"{places}; neither was found. Set TFDISTILL_DATA to "
        "the data directory, or run tfds.load('cifar10') once."
    )


def _digest(archive: pathlib.Path) -> str:
    """Returns a digest of the archive's table of contents with checksums."""
    try:
        with zipfile.ZipFile(archive) as opened:
            members = opened.infolist()
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{archive} must be a whole zip archive; received one that cannot "
            f"be opened ({error}). Copy it again."
        ) from error
    digest = hashlib.sha256()
    for member in members:
        digest.update(f"{member.filename}:{member.CRC:08x}\n".encode())
    return digest.hexdigest()[:16]


def _read_zip(archive: pathlib.Path, split: str) -> Arrays:
    images, labels = [], []
    with zipfile.ZipFile(archive) as opened:
        for name in sorted(opened.namelist()):
            if not name.startswith(f"{split}/") or name.endswith("/"):
                continue
            label = name.split("/")[1]
            if label not in CLASSES:
                raise ValueError(
                    f"Images of {archive} must lie in <split>/<class>/ with "
                    f"a class of {CLASSES}; received {name!r}."
                )
            images.append(_decode(opened, name, archive))
            labels.append(CLASSES.index(label))
    missing = set(CLASSES) - {CLASSES[label] for label in labels}
    if missing:
        raise ValueError(
            f"{archive} must hold images {split}/<class>/<number>.jpg of all "
            f"ten classes; there are none of {sorted(missing)}."
        )
    return np.stack(images), np.array(labels, np.int64)


def _decode(
    opened: zipfile.ZipFile, name: str, archive: pathlib.Path
) -> np.ndarray:
    broken = (OSError, zipfile.BadZipFile, zlib.error)
    try:
        with PIL.Image.open(io.BytesIO(opened.read(name))) as image:
            pixels = np.asarray(image.convert("RGB"), np.uint8)
    except broken as error:
        raise ValueError(
            f"{name!r} in {archive} must be a whole JPEG image; it cannot be "
            f"decoded ({error}). Copy the archive again."
        ) from error
    if pixels.shape != IMAGE_SHAPE:
        raise ValueError(
            f"{name!r} in {archive} must be 32x32 pixels; received "
            f"{pixels.shape[1]}x{pixels.shape[0]}."
        )
    return pixels


def _read_tfds(version: pathlib.Path, split: str) -> Arrays:
    # Slow to import, and needed only without an archive.
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(version))
    whole = builder.as_dataset(split=split, batch_size=-1)
    examples = tfds.as_numpy(whole)
    return examples["image"], examples["label"].astype(np.int64)


def _decode_all(aside: pathlib.Path, read: Callable[[str], Arrays]) -> None:
    data_files.tell(
        f"CIFAR-10: decoding all images once into {aside.parent} ..."
    )
    for split in SPLITS:
        images, labels = read(split)
        order = np.random.default_rng(0).permutation(len(labels))
        np.save(aside / f"{split}_images.npy", images[order])
        np.save(aside / f"{split}_labels.npy", labels[order])


def _read_cache(cached: pathlib.Path, split: str) -> Arrays:
    images, labels = (
        np.load(cached / f"{split}_{kind}.npy", mmap_mode="r")
        for kind in ("images", "labels")
    )
    return images, labels
