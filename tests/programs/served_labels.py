"""A group of parameter servers that learns from labels of a server of teachers.

Usage: python -m tests.programs.served_labels DIR ADDRESS. The chief writes
DIR/found.json.
"""

import json
import pathlib
import sys

import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases

NUM_STEPS = 4


def main(directory: pathlib.Path, address: str) -> None:
    strategy = tfdistill.make_strategy()
    teachers = tfdistill.labels.TeacherClient(
        [address], {"outputs": [cases.NUM_CLASSES]}, timeout_secs=30
    )

    def data(context=None) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(cases.data(32)).repeat()
        return dataset.batch(8, drop_remainder=True).map(teachers)

    with strategy.scope():
        model = cases.codistill(
            cases.linear(), tfdistill.teachers.LabelTeacher("served")
        )
    history = model.fit(data, steps_per_epoch=NUM_STEPS, verbose=0).history
    found = {
        "history": {k: np.array(v).tolist() for k, v in history.items()},
        "status": teachers.status(),
        "strategy": type(strategy).__name__,
    }
    try:
        model.fit(data(), steps_per_epoch=NUM_STEPS, verbose=0)
    except ValueError as error:
        found["refused"] = str(error)
    (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
