"""Students side by side in one model, which teach each other."""

import keras
import numpy as np

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import mutual_learning


class SideBySide(keras.Model):
    def __init__(self, size):
        super().__init__()
        self.students = [cases.linear(group) for group in range(size)]

    def call(self, inputs, training=None):
        return {
            str(number): student(inputs, training=training)
            for number, student in enumerate(self.students)
        }


def _trained(size, *, num_students=None):
    others = tfdistill.contrib.OtherStudents(num_students or size)
    model = tfdistill.CodistillModel(SideBySide(size), teachers=others)
    losses = {
        str(number): keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )
        for number in range(size)
    }
    model.compile(
        keras.optimizers.SGD(mutual_learning.RATE),
        losses,
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
    )
    model.fit(
        mutual_learning.data().map(lambda x, y: (x, dict.fromkeys(losses, y))),
        steps_per_epoch=mutual_learning.NUM_STEPS,
        verbose=0,
    )
    return model


def _check(model, size):
    expected = mutual_learning.expected(size)
    for student, weights in zip(model.student.students, expected, strict=True):
        for found, wanted in zip(student.get_weights(), weights, strict=True):
            np.testing.assert_allclose(found, wanted, atol=2e-6)


def test_it_is_deep_mutual_learning():
    model = _trained(3)
    _check(model, 3)
    found = model.teachers.status()
    assert [teacher["name"] for teacher in found] == ["next_1", "next_2"]
    assert {teacher["health"] for teacher in found} == {"good"}


def test_two_replicas_are_as_one(two_replicas):
    with two_replicas.scope():
        model = _trained(2)
    _check(model, 2)
