"""Tests of a workload: what it checks, and data that are arrays."""

import dataclasses

import numpy as np
import pytest

import tfdistill
from models import digits
from tests.cases import datasets as cases

cluster, read = cases.cluster, cases.read


def rows(images):
    return {image.tobytes() for image in np.asarray(images)}


def _datasets(of, **changes):
    return dataclasses.replace(digits.workload(), **changes).datasets(of)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_steps": 0}, "`num_steps` must be >= 1; received 0"),
        ({"evaluate_every_steps": 3}, "must divide `num_steps`.*received 3, "),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(digits.workload(), **changes)


def test_by_default_groups_teach_each_other_and_evaluate_ten_times():
    made = tfdistill.Workload(
        model=digits.build_model,
        data=digits.load(),
        batch_size=8,
        num_steps=200,
        optimizer=lambda: None,
        loss=None,
    )
    assert made.epoch_steps == 20
    assert isinstance(made.teachers(), tfdistill.teachers.Peers)


@pytest.mark.parametrize("mode", ["shared", "coordinated"])
def test_only_coordinated_groups_read_the_same_batches(mode):
    first, second = (
        cases.joined(read(_datasets(cluster(group), mode=mode)[0], 3))[0]
        for group in range(2)
    )
    assert np.array_equal(first, second) == (mode == "coordinated")


def test_the_same_data_on_every_worker_and_again():
    def make(seed):
        return _datasets(cluster(), batch_size=128, seed=seed)[0]

    cases.check_order(make, num_batches=8)


def test_groups_see_their_part_of_the_training_images():
    seen = []
    for group in range(2):
        train, _ = _datasets(cluster(group), batch_size=50)
        batches = read(train, (649 - group) // 50)
        assert all(x.shape == (50, 8, 8) for x, _ in batches)
        images, _ = cases.joined(batches)
        # Within an epoch no image comes twice.
        assert len(rows(images)) == len(images)
        seen.append(rows(images))
    assert not seen[0] & seen[1]


def test_labels_stay_with_their_images_and_validation_is_the_test_split():
    (x_train, y_train), (x_test, y_test) = digits.load()
    label_of = {
        image.tobytes(): label
        for image, label in zip(x_train, y_train, strict=True)
    }
    train, validation = _datasets(cluster(), batch_size=64)
    for images, labels in read(train, 25):
        assert [label_of[image.tobytes()] for image in images] == list(labels)
    batches = read(validation)
    assert [len(y) for _, y in batches] == [64] * 7 + [52]
    cases.assert_same(cases.joined(batches), (x_test, y_test))
