"""Tests of ImageNet's input and network, on a few made-up photographs."""

import io
import pathlib

import keras
import numpy as np
import PIL.Image
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from launch import recipes
from models import imagenet
from models.imagenet import files
from models.imagenet import images
from tests.cases import datasets as cases
from tests.cases import tiers

CLASSES = ("n01", "n02", "n03")
PER_CLASS = {"train": 8, "val": 3}
SIZES = {"image_size": 8, "num_classes": len(CLASSES)}
cluster, read = cases.cluster, cases.read


def encoded(pixels, kind="JPEG"):
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.uint8(pixels)).save(buffer, kind, quality=95)
    return buffer.getvalue()


def plain(level, shape=(24, 20)):
    """An image of one grey level, which every crop of it shows."""
    return np.full([*shape, 3], level)


def levels(split):
    """The grey level of each image by its class and number."""
    each = PER_CLASS[split]
    return {
        (label, number): 10 * (label * each + number)
        for label in range(len(CLASSES))
        for number in range(each)
    }


@pytest.fixture
def folders(tmp_path):
    for split in PER_CLASS:
        for (label, number), level in levels(split).items():
            folder = tmp_path / "images" / split / CLASSES[label]
            folder.mkdir(parents=True, exist_ok=True)
            # One is no JPEG, as in the real thing.
            kind = "PNG" if number == 1 else "JPEG"
            path = folder / f"{number}.{'JPEG' if kind == 'JPEG' else 'png'}"
            path.write_bytes(encoded(plain(level), kind))
    return {"path": tmp_path / "images", **SIZES}


class Imagenet2012(tfds.core.GeneratorBasedBuilder):
    """The features of the real builder, with made-up images."""

    VERSION = tfds.core.Version("5.1.0")
    # See models/criteo/tfds.py.
    code_path = pathlib.Path(__file__)

    def _info(self):
        features = {
            "image": tfds.features.Image(encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(names=list(CLASSES)),
            "file_name": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features)
        )

    def _split_generators(self, dl_manager):
        return {
            "train": self._generate_examples("train"),
            "validation": self._generate_examples("val"),
        }

    def _generate_examples(self, split):
        for (label, number), level in levels(split).items():
            name = f"{label}_{number}.JPEG"
            image = io.BytesIO(encoded(plain(level)))
            yield name, {"image": image, "label": label, "file_name": name}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("tfds")
    Imagenet2012(data_dir=data_dir).download_and_prepare()
    return data_dir


@pytest.fixture(params=[tiers.deep("folders"), "prepared"])
def places(request, monkeypatch):
    found = request.getfixturevalue(request.param)
    if request.param == "folders":
        return found
    monkeypatch.setenv("TFDS_DATA_DIR", str(found))
    return SIZES


def level_of(images):
    """Which of the plain images these are: level / 10."""
    spread = images.max(axis=(1, 2, 3)) - images.min(axis=(1, 2, 3))
    assert spread.max() < 0.02
    return np.rint(images.mean(axis=(1, 2, 3)) * 25.5).astype(int)


def test_groups_see_their_part_and_labels_stay_with_images(places):
    seen = []
    for group in range(2):
        train_data, _ = imagenet.make_datasets(
            cluster(group), batch_size=4, **places
        )
        images, labels = cases.joined(read(train_data, 6))
        assert (images.dtype, labels.dtype) == (np.float32, np.int64)
        assert images.shape == (24, 8, 8, 3)
        index = level_of(images)
        np.testing.assert_array_equal(labels, index // PER_CLASS["train"])
        first, second = index[:12], index[12:]
        assert sorted(first) == sorted(second)
        assert list(first) != list(second)
        seen.append(set(first))
    assert not seen[0] & seen[1]
    assert sorted(seen[0] | seen[1]) == list(range(24))


def test_the_same_batches_on_every_worker_wherever_they_begin(places):
    def make(seed):
        kwargs = {"batch_size": 5, "seed": seed, **places}
        return imagenet.make_datasets(cluster(), **kwargs)[0]

    cases.check_order(make, num_batches=6)


def test_validation_comes_whole_and_once(places):
    _, validation = imagenet.make_datasets(cluster(), batch_size=4, **places)
    batches = read(validation)
    assert [len(y) for _, y in batches] == [4, 4, 1]
    images, labels = cases.joined(batches)
    index = level_of(images)
    assert sorted(index) == list(range(9))
    np.testing.assert_array_equal(labels, index // PER_CLASS["val"])


def test_another_number_of_classes_is_refused(folders):
    changes = {"batch_size": 4, **folders, "num_classes": 1000}
    with pytest.raises(ValueError, match="data, which have 3; received 1000"):
        imagenet.make_datasets(cluster(), **changes)


def test_missing_images_are_an_error_that_says_what_to_do(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "usual"))
    with pytest.raises(ValueError, match="download_and_prepare") as caught:
        files.find(None)
    assert str(tmp_path / "usual") in str(caught.value)
    with pytest.raises(ValueError, match="No such file") as caught:
        files.find(tmp_path)
    assert "Override path" in str(caught.value)


def gradient(height=96, width=64):
    """An image whose red is its row and whose green is its column."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([2 * rows, 2 * columns, 0 * rows], axis=-1)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_middle_of_an_image(kind):
    data = tf.constant(encoded(gradient(), kind))
    crop = images.central_crop(data, size=56).numpy()
    # 224 / 256 of 64 pixels are 56, so nothing is resized.
    expected = gradient()[20:76, 4:60] / 255
    np.testing.assert_allclose(crop, expected, atol=0.03)


@pytest.mark.parametrize("kind", ["JPEG", tiers.deep("PNG")])
def test_random_parts_have_the_areas_and_sides_of_the_paper(kind):
    data = tf.constant(encoded(gradient(), kind))
    areas, mirrored = [], 0
    for number in range(80):
        seed = tf.constant([5, number], tf.int64)
        crop = images.random_crop(data, size=32, seed=seed).numpy()
        assert crop.shape == (32, 32, 3)
        assert crop.min() >= 0 and crop.max() <= 1
        red, green = crop[..., 0] * 127.5, crop[..., 1] * 127.5
        # From the middle of the first to the middle of the last pixel.
        height = (red[-1].mean() - red[0].mean()) * 32 / 31
        wide = (green[:, -1].mean() - green[:, 0].mean()) * 32 / 31
        mirrored += wide < 0
        areas.append(height * abs(wide) / (96 * 64))
        assert 0.6 < abs(wide) / height < 1.6
    assert 0.06 < min(areas) < 0.25
    # With sides of 3:4 a whole 96 x 64 is never inside.
    assert 0.7 < max(areas) < 1.02
    assert 22 < mirrored < 58


@pytest.mark.deep
def test_resnet_50_is_that_of_goyal_et_al():
    model = imagenet.build_model()
    trainable = sum(np.prod(v.shape) for v in model.trainable_variables)
    # 25.5 million, as everywhere.
    assert trainable == 25_557_032
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds.count("Conv2D") == 53
    assert model.output_shape == (None, 1000)
    norms = [v for v in model.trainable_variables if v.name == "gamma"]
    starts = [float(v.numpy().max()) for v in norms]
    assert starts.count(0.0) == 16
    assert starts.count(1.0) == 53 - 16
    strided = [
        layer.kernel_size
        for layer in model.layers
        if isinstance(layer, keras.layers.Conv2D) and layer.strides == (2, 2)
    ]
    assert strided.count((3, 3)) == 3
    norm = model.layers[kinds.index("BatchNormalization")]
    assert (norm.momentum, norm.epsilon) == (0.9, 1e-5)


def small(folders):
    """Overrides for the images in `folders`."""
    changes = {
        "data.path": folders["path"],
        "batch_size": 4,
        "data.arguments.image_size": 32,
        "data.arguments.num_classes": 3,
        "model.arguments.width": 8,
        "model.arguments.depth": 26,
        "optimizer.learning_rate": 0.1,
        "optimizer.warmup_steps": 1,
        "optimizer.boundaries": "[1]",
        "learning_boundaries": "[3]",
        "learning_decay_factors": "[0]",
        "exchange.every_steps": 2,
        "num_steps": 2,
        "evaluate_every_steps": 2,
        "checkpoints": "none",
    }
    return [f"{name}={new}" for name, new in changes.items()]


def test_the_recipe_s_parts_fit(folders):
    workload = recipes.override(
        recipes.get("imagenet"), small(folders)
    ).workload()
    ((images, labels),) = read(workload.datasets(cluster())[0], 1)
    logits = workload.model()(images)
    assert logits.shape == (4, 3)
    assert np.isfinite(workload.loss(labels, logits))
    # A group that learns drops its rate later.
    for make, expected in (
        (workload.optimizer_alone, [0.01, 0.01, 0.01]),
        (workload.optimizer, [0.01, 0.1, 0.01]),
    ):
        optimizer, rates = make(), []
        for step in (0, 2, 4):
            optimizer.iterations.assign(step)
            rates.append(float(optimizer.learning_rate))
        assert rates == pytest.approx(expected)
