"""One of two workers, which is given faulty data time and again."""

import json
import pathlib
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill import data


def examples() -> tuple[np.ndarray, np.ndarray]:
    """Sixteen rows of four features, and labels of three classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 4)).astype("float32"), np.arange(16) % 3


def student() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


def model(strategy: tf.distribute.Strategy) -> tfdistill.CodistillModel:
    with strategy.scope():
        made = tfdistill.CodistillModel(student())
        made.compile(
            keras.optimizers.SGD(0.1),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    return made


def _cases(strategy: tf.distribute.Strategy) -> dict[str, dict[str, Any]]:
    x, y = examples()
    rows = tf.data.Dataset.from_tensor_slices((x, y))

    def share(*sizes: int, count: int = 1) -> Any:
        def own(context: tf.distribute.InputContext) -> tf.data.Dataset:
            part = rows.take(sizes[context.input_pipeline_id])
            return part.repeat(count).batch(2)

        return strategy.distribute_datasets_from_function(own)

    faulty = np.where(np.arange(16)[:, np.newaxis] == 9, np.nan, x)
    broken = tf.data.Dataset.from_tensor_slices((np.float32(faulty), y))
    return {
        "empty share": {"x": share(8, 0)},
        "uneven shares": {"x": share(8, 6)},
        "uneven shares, repeated": {
            "x": share(8, 6, count=-1),
            "steps_per_epoch": 4,
            "epochs": 2,
        },
        "empty": {"x": rows.batch(4).take(0)},
        # The last: after a step that has failed, collectives fail, too.
        "faulty": {"x": data.checked(broken.batch(4))},
    }


def main(directory: str) -> None:
    strategy = tfdistill.make_strategy()
    worker = tfdistill.Cluster.from_env().task_index
    found = {}
    for name, arguments in _cases(strategy).items():
        trained = model(strategy)
        try:
            trained.fit(verbose=0, shuffle=False, **arguments)
            found[name] = f"{trained.optimizer.iterations.numpy()} steps"
        except Exception as error:  # Whatever it is: it is compared.
            found[name] = f"{type(error).__name__}: {error}"
    path = pathlib.Path(directory, f"worker_{worker}.json")
    path.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
