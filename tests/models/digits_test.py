""""""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import digits
from tests.cases import datasets as cases

cluster, read = cases.cluster, cases.read


def rows(images):
    return {image.tobytes() for image in np.asarray(images)}


def test_splits_are_stratified_fixed_and_disjoint():
    (x_train, y_train), (x_test, y_test) = digits.load()
    assert x_train.shape == (1297, 8, 8)
    assert x_test.shape == (500, 8, 8)
    assert (x_train.dtype, y_train.dtype) == (np.float32, np.int64)
    assert (x_train.min(), x_train.max()) == (0.0, 1.0)
    for labels in (y_train, y_test):
        counts = np.bincount(labels, minlength=10) / len(labels)
        np.testing.assert_allclose(counts, 0.1, atol=0.01)
    assert not rows(x_train) & rows(x_test)
    np.testing.assert_array_equal(digits.load()[1][0], x_test)
    other = digits.load(split_seed=1)[1][0]
    assert rows(other) != rows(x_test)


@pytest.mark.parametrize("num_test", [0, 9, 1790])
def test_a_split_without_all_classes_is_refused(num_test):
    with pytest.raises(ValueError, match="from 10 to 1787; received"):
        digits.load(num_test=num_test)


def test_the_same_data_on_every_worker_and_again():
    def make(seed):
        kwargs = {"global_batch_size": 64, "seed": seed}
        return digits.make_datasets(cluster(), **kwargs)[0]

    cases.check_order(make, num_batches=12, skip=5)


@pytest.mark.parametrize("data", ["disjoint", "shared"])
def test_groups_see_their_part_of_the_training_images(data):
    sizes, seen = [], []
    for group in range(2):
        train, _ = digits.make_datasets(
            cluster(group), global_batch_size=50, data=data
        )
        num_images = 1297 if data == "shared" else 649 - group
        batches = read(train, num_images // 50)
        assert all(x.shape == (50, 8, 8) for x, _ in batches)
        images, _ = cases.joined(batches)
        # Within an epoch no image comes twice.
        assert len(rows(images)) == len(images)
        sizes.append(len(images))
        seen.append(rows(images))
    common = len(seen[0] & seen[1])
    assert common == 0 if data == "disjoint" else common > 1100


def test_groups_that_share_data_read_it_in_different_orders():
    orders = [
        read(
            digits.make_datasets(
                cluster(group), global_batch_size=50, data="shared"
            )[0],
            1,
        )[0][1].tolist()
        for group in range(2)
    ]
    assert orders[0] != orders[1]


def test_labels_stay_with_their_images_and_validation_is_the_test_split():
    (x_train, y_train), (x_test, y_test) = digits.load()
    label_of = {
        image.tobytes(): label
        for image, label in zip(x_train, y_train, strict=True)
    }
    train, validation = digits.make_datasets(cluster(), global_batch_size=64)
    for images, labels in read(train, 25):
        assert [label_of[image.tobytes()] for image in images] == list(labels)
    batches = read(validation)
    assert [len(y) for _, y in batches] == [64] * 7 + [52]
    cases.assert_same(cases.joined(batches), (x_test, y_test))


def test_bad_options_are_refused():
    for size in (0, 650):
        with pytest.raises(ValueError, match="from 1 to the group's 649"):
            digits.make_datasets(cluster(), global_batch_size=size)
    with pytest.raises(ValueError, match="`mode` must be one of"):
        digits.make_datasets(cluster(), global_batch_size=8, data="half")


def test_model_shapes():
    model = digits.build_model(hidden_sizes=(32, 16, 8), dropout=0.5)
    dense = [x for x in model.layers if isinstance(x, keras.layers.Dense)]
    assert [layer.units for layer in dense] == [32, 16, 8, 10]
    assert sum(isinstance(x, keras.layers.Dropout) for x in model.layers) == 3
    keras.config.set_dtype_policy("mixed_bfloat16")
    logits = digits.build_model()(np.zeros((2, 8, 8), np.float32))
    assert logits.shape == (2, 10)
    assert logits.dtype == tf.float32


def test_the_model_learns_the_digits():
    train, validation = digits.make_datasets(
        cluster(num_groups=1), global_batch_size=64
    )
    model = digits.build_model()
    model.compile(
        keras.optimizers.Adam(3e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train, steps_per_epoch=200, shuffle=False, verbose=0)
    results = model.evaluate(validation, verbose=0, return_dict=True)
    assert results["accuracy"] > 0.93
