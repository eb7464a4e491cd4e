""""""

import io
import pathlib
import zipfile

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from models import cifar10
from models.cifar10 import files
from tests.cases import datasets as cases

CLASSES = files.CLASSES
PER_CLASS = {"train": 4, "test": 2}
cluster, read = cases.cluster, cases.read


def jpeg(level, size=(32, 32)):
    buffer = io.BytesIO()
    image = PIL.Image.new("RGB", size, (level, 255 - level, 128))
    image.save(buffer, "JPEG", quality=95)
    return buffer.getvalue()


def members():
    """Plain images whose red level, 5 * index, tells them apart."""
    return {
        f"{split}/{name}/{number:04d}.jpg": jpeg(
            5 * (CLASSES.index(name) * PER_CLASS[split] + number)
        )
        for split in PER_CLASS
        for name in CLASSES
        for number in range(PER_CLASS[split])
    }


def write_zip(data_dir, content):
    path = pathlib.Path(data_dir) / "cifar10" / "cifar10_jpg.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in content.items():
            archive.writestr(name, value)
    return path


@pytest.fixture
def places(tmp_path):
    """Arguments that lead to a small archive, and to a fresh cache."""
    write_zip(tmp_path / "data", members())
    return {"data_dir": tmp_path / "data", "cache_dir": tmp_path / "cache"}


def red_index(images):
    return np.rint(images[:, 16, 16, 0] / 5).astype(int)


def test_images_and_labels_of_an_archive(places):
    (x_train, y_train), (x_test, y_test) = cifar10.load(**places)
    assert x_train.shape == (40, 32, 32, 3)
    assert x_test.shape == (20, 32, 32, 3)
    assert (x_train.dtype, y_train.dtype) == (np.uint8, np.int64)
    for images, labels, each in ((x_train, y_train, 4), (x_test, y_test, 2)):
        index = red_index(images)
        assert sorted(index) == list(range(10 * each))
        np.testing.assert_array_equal(labels, index // each)
        assert labels.tolist() != sorted(labels)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train/cow/0000.jpg": jpeg(0)}, "train/cow/0000.jpg"),
        ({"train/cat/0000.jpg": jpeg(0)[:300]}, "train/cat/0000"),
        ({"train/cat/0000.jpg": jpeg(0, (31, 32))}, "shape .32, 31"),
    ],
)
def test_wrong_members_are_refused(places, change, message):
    write_zip(places["data_dir"], {**members(), **change})
    with pytest.raises(ValueError, match=message):
        cifar10.load(**places)
    assert not [p for p in places["cache_dir"].iterdir() if p.is_dir()]


def test_a_torn_archive_is_refused(places):
    path = places["data_dir"] / "cifar10" / "cifar10_jpg.zip"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cifar10_jpg.zip must hold"):
        cifar10.load(**places)
    # Damage that leaves the table of contents alone.
    path.write_bytes(whole[:200] + b"\0" * 100 + whole[300:])
    with pytest.raises(ValueError, match="Copy it again"):
        cifar10.load(**places)


def test_no_images_at_all_is_an_error_that_says_where(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    with pytest.raises(ValueError, match="CIFAR-10 must be at") as error:
        cifar10.load(data_dir=tmp_path / "data", cache_dir=tmp_path)
    assert str(tmp_path / "data" / "cifar10") in str(error.value)
    assert str(tmp_path / "tfds") in str(error.value)


class Cifar10(tfds.core.GeneratorBasedBuilder):
    """The features of the real builder, with made-up images."""

    VERSION = tfds.core.Version("3.0.2")
    # See models/criteo/tfds.py.
    code_path = pathlib.Path(__file__)

    def _info(self):
        features = {
            "id": tfds.features.Text(),
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples() for split in PER_CLASS}

    def _generate_examples(self):
        for number in range(12):
            image = np.full((32, 32, 3), number, np.uint8)
            yield number, {"id": "", "image": image, "label": number % 10}


def test_a_prepared_tensorflow_datasets_copy_is_used(tmp_path, monkeypatch):
    Cifar10(data_dir=tmp_path).download_and_prepare()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    (x_train, y_train), _ = cifar10.load(
        data_dir=tmp_path / "none", cache_dir=tmp_path / "cache"
    )
    assert sorted(y_train) == sorted(np.arange(12) % 10)
    assert x_train.shape == (12, 32, 32, 3)


def test_the_same_batches_on_every_worker_wherever_they_begin(places):
    def make(seed):
        kwargs = {"batch_size": 5, "seed": seed, **places}
        return cifar10.make_datasets(cluster(), **kwargs)[0]

    cases.check_order(make, num_batches=9)


def test_groups_see_their_part_and_labels_stay_with_images(places):
    seen = []
    for group in range(2):
        train, validation = cifar10.make_datasets(
            cluster(group), batch_size=5, **places
        )
        images, labels = cases.joined(read(train, 4))
        images *= 255
        assert images.shape == (20, 32, 32, 3)
        assert images.dtype == np.float32
        np.testing.assert_array_equal(labels, red_index(images) // 4)
        seen.append(set(red_index(images)))
        assert [len(y) for _, y in validation] == [5] * 4
    assert not seen[0] & seen[1]
    assert sorted(seen[0] | seen[1]) == list(range(40))


def test_bad_options_are_refused(places):
    with pytest.raises(ValueError, match="from 1 to the group's 20"):
        cifar10.make_datasets(cluster(), batch_size=0, **places)
    with pytest.raises(ValueError, match="from 1 to 40; received 41"):
        cifar10.make_datasets(cluster(), batch_size=4, num_train=41, **places)


def test_augmentation_crops_and_mirrors():
    pixels = np.arange(1, 1 + 32 * 32 * 3).reshape(32, 32, 3)
    padded = np.pad(pixels, [[4, 4], [4, 4], [0, 0]])
    possible = {}
    for top in range(9):
        for left in range(9):
            crop = padded[top : top + 32, left : left + 32]
            possible[crop.tobytes()] = (top, left, False)
            possible[crop[:, ::-1].tobytes()] = (top, left, True)
    images = tf.constant(np.stack([pixels] * 2000))
    got = cifar10.augment(images, seed=tf.constant([1, 2], tf.int64)).numpy()
    drawn = [possible[image.tobytes()] for image in got]
    assert set(drawn) == set(possible.values())
    mirrored = np.mean([flip for _, _, flip in drawn])
    assert 0.45 < mirrored < 0.55


def test_resnet_20_has_the_size_of_the_paper():
    # 0.27 million parameters: He et al. 2015, table 6.
    assert round(cifar10.build_model().count_params(), -4) == 270_000
    keras.config.set_dtype_policy("mixed_bfloat16")
    logits = cifar10.build_model(depth=8)(np.zeros((2, 32, 32, 3)))
    assert logits.dtype == tf.float32


@pytest.mark.data
@pytest.mark.deep
def test_the_real_images(data_dir):
    if not (data_dir / "cifar10" / "cifar10_jpg.zip").is_file():
        pytest.skip("needs cifar10/cifar10_jpg.zip in the data directory")
    # The other split has five times as many images to decode.
    x, y = files._find(data_dir).read("test")
    assert np.bincount(y).tolist() == [1000] * 10
    assert x.shape == (10000, 32, 32, 3)
    mean = x.mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(mean, cifar10._MEAN, atol=0.01)
