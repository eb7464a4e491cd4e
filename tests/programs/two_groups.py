"""A task of two groups, which mix weights, whole and in parts, or predictions.

Usage: python -m tests.programs.two_groups. Mixing groups take their shares of
every batch of eight, and average after each step: all together are one training
with batches of eight. A group's second worker ends late.
"""

import pathlib
import time

import numpy as np
import tensorflow as tf

import tfdistill
from tests.cases import codistillation as cases
from tests.cases import fragments
from tests.cases import mutual_learning
from tfdistill import mixing

NUM_EPOCHS = 2
# Of some, TensorFlow itself broadcasts no variable.
DTYPES = ("int8", "uint16", "uint32", "bfloat16")


def _mixed(cluster: tfdistill.Cluster) -> dict:
    exchange = tfdistill.Exchange(cluster.exchange)
    model = cases.codistill(cases.deep(0))
    x, y = cases.data(32)
    share = slice(cluster.group, None, cluster.num_groups)
    data = tf.data.Dataset.from_tensor_slices((x[share], y[share])).batch(4)
    mixer = mixing.WeightMixer(
        mixing.ModelAveraging(), every_steps=1, wait_secs=600.0
    )
    exporter = tfdistill.callbacks.StudentExporter(exchange, every_steps=1)
    # Another worker's group would be the same without these.
    model.fit(data, epochs=NUM_EPOCHS, verbose=0, callbacks=[exporter, mixer])
    return {
        "mixed": _flat(model.get_weights()),
        "mixes": mixer.num_mixes,
        "skipped": mixer.num_skipped,
        "versions": list(mixer.totals["versions"].values()),
    }


def _in_fragments(cluster: tfdistill.Cluster) -> dict:
    mixer = fragments.mixer(cluster.peers)
    model = fragments.train(
        f"{cluster.exchange}_fragments", cluster.group, mixer=mixer
    )
    return {
        "in_fragments": _flat(model.get_weights()),
        "left_out": mixer.num_skipped,
    }


def _swapped(cluster: tfdistill.Cluster) -> dict:
    model = mutual_learning.model(cluster)
    dataset = tfdistill.data.group_shard(
        mutual_learning.data(), cluster, mode="coordinated"
    )
    model.fit(
        dataset,
        steps_per_epoch=mutual_learning.NUM_STEPS,
        verbose=0,
        callbacks=[cases.never()],
    )
    (teacher,) = model.teachers.status()
    return {
        "swapped": _flat(model.get_weights()),
        "missed": teacher["num_missed"],
    }


def _flat(weights: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in weights])


def main() -> None:
    cluster = tfdistill.Cluster.from_env()
    with tfdistill.make_strategy(cluster).scope():
        found = _mixed(cluster) | _in_fragments(cluster)
        found |= _swapped(cluster)
        for dtype in DTYPES:
            begin = tf.Variable(tf.cast([3 + cluster.task_index, 0], dtype))
            found[f"begin_{dtype}"] = tf.cast(begin, "float32").numpy()
    name = f"group_{cluster.group}_{cluster.task_index}.npz"
    np.savez(pathlib.Path(cluster.workdir, name), **found)
    if cluster.task_index:
        time.sleep(2)  # A slow last export, say.


def check(directory: pathlib.Path) -> None:
    """Fails unless all tasks found what models in one process do."""
    alone = cases.codistill(cases.deep(0))
    x, y = cases.data(32)
    cases.fit(alone, x, y, batch_size=8, epochs=NUM_EPOCHS, callbacks=[])
    taught = mutual_learning.expected(2)
    in_parts = fragments.by_hand()
    for group in range(2):
        for worker in range(2):
            found = np.load(directory / f"group_{group}_{worker}.npz")
            for name, weights in (
                ("mixed", alone.get_weights()),
                ("swapped", taught[group]),
            ):
                np.testing.assert_allclose(
                    found[name], _flat(weights), rtol=0, atol=1e-6
                )
            np.testing.assert_allclose(
                found["in_fragments"],
                _flat(in_parts[group].get_weights()),
                rtol=1e-4,
                atol=1e-5,
            )
            assert not found["left_out"]
            assert found["mixes"] == 4 * NUM_EPOCHS and not found["skipped"]
            assert found["versions"].tolist() == [4 * NUM_EPOCHS]
            assert not found["missed"]
            for dtype in DTYPES:
                assert found[f"begin_{dtype}"].tolist() == [3, 0]
            log = directory / "logs" / f"group_{group}_worker_{worker}.log"
            said = log.read_text(errors="replace")
            assert "ended before this worker was done" not in said


if __name__ == "__main__":
    main()
