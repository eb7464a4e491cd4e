"""Several students in one model: what a recipe of mutual learning trains.

The first student is the one that the first group of a run would have, the
second that of the second group, and so on; so are their files.
"""

import json
import pathlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

import keras
import tensorflow as tf

from launch.task import outputs
from tfdistill.system import run_files

_T = TypeVar("_T")


class Cohort(keras.Model):
    """Students side by side: of the same inputs, each has its own outputs."""

    def __init__(self, students: Sequence[keras.Model]) -> None:
        """Holds students of the same inputs, which share no variable."""
        super().__init__(name="cohort")
        self.students = list(students)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Returns the outputs of each, by name."""
        return self.by_student(lambda one: one(inputs, training=training))

    def by_student(self, make: Callable[[keras.Model], _T]) -> dict[str, _T]:
        """Returns something for each student, by the names of the outputs."""
        return {
            _name(number): make(student)
            for number, student in enumerate(self.students)
        }

    def for_each(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Repeats the labels of each batch, as `fit` and the losses take it."""
        return dataset.map(lambda x, y: (x, self.by_student(lambda _: y)))


def _name(number: int) -> str:
    # Of the same length, so that their order by name is that of the numbers.
    return f"student_{number:03}"


def students_of(model: keras.Model) -> list[keras.Model]:
    """Returns the students of a model, which is usually the only one."""
    return model.students if isinstance(model, Cohort) else [model]


def write_progress(directory: pathlib.Path, number: int) -> None:
    """Writes a student's progress beside its other files.

    That of all students, `metrics.jsonl` of the first, is taken apart: a
    figure that has the student's name is its own, and one with another's is
    left out.
    """
    own, workdir = f"{_name(number)}_", directory.parent
    records = outputs.read_records(outputs.group_dir(workdir, 0))
    lines = [json.dumps(_of_one(record, own)) + "\n" for record in records]
    outputs.write(directory / run_files.METRICS, "".join(lines).encode())


def _of_one(record: Mapping[str, Any], own: str) -> dict[str, Any]:
    common = {k: v for k, v in record.items() if "student_" not in k}
    named = {k.replace(own, "", 1): v for k, v in record.items() if own in k}
    # A student's loss is there beside that of all together.
    return {**common, **named}
