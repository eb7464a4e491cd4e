"""A group that averages its weights with the others' after each step.

Each takes its share of every batch of eight, so that all groups together are
one training with batches of eight.
"""

import json
import pathlib
import sys

import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tfdistill import mixing

NUM_EPOCHS = 2


def main(directory: str) -> None:
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    exchange = tfdistill.Exchange(cluster.exchange)
    with strategy.scope():
        model = cases.codistill(cases.deep(0))
    x, y = cases.data(32)
    share = slice(cluster.group, None, cluster.num_groups)
    data = tf.data.Dataset.from_tensor_slices((x[share], y[share])).batch(4)
    mixer = mixing.WeightMixer(
        mixing.ModelAveraging(),
        every_steps=1,
        quorum="all",
        grace_secs=60.0,
    )
    exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=1)
    # Another worker's group would be the same without these.
    model.fit(data, epochs=NUM_EPOCHS, verbose=0, callbacks=[exporter, mixer])
    notes = {
        "weights": [w.tolist() for w in model.get_weights()],
        "totals": mixer.totals,
    }
    name = f"notes_{cluster.group}_{cluster.task_index}.json"
    pathlib.Path(directory, name).write_text(json.dumps(notes))


if __name__ == "__main__":
    main(sys.argv[1])
