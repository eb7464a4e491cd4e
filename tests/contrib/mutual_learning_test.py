"""Students side by side in one model, which teach each other."""

import keras
import pytest

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


@pytest.mark.deep
def test_it_is_deep_mutual_learning_on_two_replicas_as_on_one(two_replicas):
    names = ("0", "1", "2")
    with two_replicas.scope():
        others = tfdistill.contrib.OtherStudents(3)
        model = tfdistill.CodistillModel(SideBySide(3), teachers=others)
        loss = keras.losses.SparseCategoricalCrossentropy
        model.compile(
            keras.optimizers.SGD(mutual_learning.RATE),
            {name: loss(from_logits=True) for name in names},
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
        )
    model.fit(
        mutual_learning.data().map(lambda x, y: (x, dict.fromkeys(names, y))),
        steps_per_epoch=mutual_learning.NUM_STEPS,
        verbose=0,
    )
    expected = mutual_learning.expected(3)
    students = [each.get_weights() for each in model.student.students]
    cases.assert_close(students, expected, atol=2e-6)
    found = model.teachers.status()
    assert [teacher["name"] for teacher in found] == ["next_1", "next_2"]
    assert {teacher["health"] for teacher in found} == {"good"}
