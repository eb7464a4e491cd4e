"""A group that learns from labels of a server, under the strategy it is given.

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
    """Runs this task."""
    strategy = tfdistill.make_strategy()
    teachers = tfdistill.labels.Teachers([address], timeout_secs=30)

    def data(context=None) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices(cases.data(32)).repeat()
        return dataset.batch(8, drop_remainder=True).map(teachers)

    on_servers = isinstance(strategy, tf.distribute.ParameterServerStrategy)
    with strategy.scope():
        model = cases.codistill(
            cases.linear(), tfdistill.teachers.LabelTeacher("served")
        )
    history = model.fit(
        data if on_servers else data(), steps_per_epoch=NUM_STEPS, verbose=0
    ).history
    status = teachers.status()
    refused = ""
    if on_servers:
        try:
            model.fit(data(), steps_per_epoch=NUM_STEPS, verbose=0)
        except ValueError as error:
            refused = str(error)
    if tfdistill.Cluster.from_env().is_chief:
        found = {
            "history": {k: np.array(v).tolist() for k, v in history.items()},
            "status": status,
            "refused": refused,
            "strategy": type(strategy).__name__,
        }
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
