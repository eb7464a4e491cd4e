"""A group of two workers and two servers that counts what it does.

Usage: python -m tests.programs.server_group_workers DIR PART... Writes what was
seen in each part to DIR/notes.json, and the traceback of a part that failed to
its "failed".

Each step moves both weights by just RATE, whatever the data and whoever does
it; labels are such that their mean tells which examples were seen.
"""

import json
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill.parameter_server import worker

RATE = 2.0**-10
NUM_STEPS, STEPS_PER_EXECUTION, NUM_EPOCHS, BATCH_SIZE = 300, 10, 2, 4
NUM_EXAMPLES, NUM_IDS = 101, 10
NUM_NAN_STEPS = 50


class Count(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(tf.ones_like(y_true))


def rewarded(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """A loss whose gradient is -1 for each prediction."""
    return -y_pred


def label(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return y_true


def student(table: keras.Layer | None = None) -> keras.Model:
    """Predicts `weight * x + table[id]`, both 0 at first."""
    x = keras.Input((1,), name="x")
    ids = keras.Input((1,), dtype="int64", name="ids")
    table = table or tfdistill.layers.ShardedEmbedding(
        NUM_IDS, 1, embeddings_initializer="zeros", name="table_of_ids"
    )
    product = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="zeros", name="weight"
    )
    y = keras.layers.Add()([product(x), keras.layers.Flatten()(table(ids))])
    return keras.Model({"x": x, "ids": ids}, y)


def make_model(
    strategy: Any, *, steps_per_execution: int = 3
) -> tfdistill.CodistillModel:
    """A compiled model whose weights grow by the rate each step."""
    return compiled(strategy, student, steps_per_execution)


def compiled(
    strategy: Any, make: Callable[[], keras.Model], steps_per_execution: int = 1
) -> tfdistill.CodistillModel:
    with strategy.scope():
        model = tfdistill.CodistillModel(make())
        model.compile(
            keras.optimizers.SGD(RATE),
            rewarded,
            metrics=[
                Count(name="count"),
                keras.metrics.MeanMetricWrapper(label, name="label"),
            ],
            steps_per_execution=steps_per_execution,
        )
    return model


def reading_words(inner: keras.Model) -> keras.Model:
    """The same for ids in words."""
    x = keras.Input((1,), name="x")
    words = keras.Input((1,), dtype="string", name="words")
    known = list(map(str, range(1, NUM_IDS)))
    ids = keras.layers.StringLookup(vocabulary=known)(words)
    return keras.Model({"x": x, "words": words}, inner({"x": x, "ids": ids}))


def in_words(features: Any, y: tf.Tensor) -> Any:
    words = tf.strings.as_string(features["ids"])
    return {"x": features["x"], "words": words}, y


def weights(model: tfdistill.CodistillModel) -> tuple[float, np.ndarray]:
    """Returns the weight and the table in the order of its ids."""
    layer = model.student.get_layer("table_of_ids")
    stored = np.concatenate([v.numpy() for v in layer.shards])[:, 0]
    rows = layer.layout.storage_rows(tf.range(NUM_IDS, dtype=tf.int64))
    weight = model.student.get_layer("weight").kernel.numpy()
    return float(weight[0, 0]), stored[rows.numpy()]


def examples(x: np.ndarray, ids: Any = 0, labels: Any = 0.0) -> Any:
    x = np.reshape(x, [-1, 1]).astype("float32")
    ids = np.broadcast_to(np.reshape(ids, [-1, 1]), x.shape).astype("int64")
    labels = np.broadcast_to(np.reshape(labels, [-1, 1]), x.shape)
    return tf.data.Dataset.from_tensor_slices(
        ({"x": x, "ids": ids}, labels.astype("float32"))
    )


def numbered() -> tf.data.Dataset:
    """Examples that can be told apart."""
    each = np.arange(NUM_EXAMPLES)
    return examples(each, each % NUM_IDS, each)


class Parts:
    """What is to be seen, part by part."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def scheduled_steps(self) -> dict:
        """Endless data, labelled by the worker that reads them."""
        workers = []
        result = worker.TrainFunction.result

        def noted(function: Any, vector: Any) -> Any:
            found = result(function, vector)
            workers.append(found.worker)
            return found

        def data(context: tf.distribute.InputContext) -> tf.data.Dataset:
            ones = tf.ones([BATCH_SIZE, 1])
            index = tf.cast(context.input_pipeline_id, tf.float32)
            features = {"x": ones, "ids": tf.zeros([BATCH_SIZE, 1], tf.int64)}
            one = tf.data.Dataset.from_tensors((features, index * ones))
            return one.repeat()

        model = make_model(
            self._strategy, steps_per_execution=STEPS_PER_EXECUTION
        )
        worker.TrainFunction.result = noted
        try:
            history = model.fit(
                data, epochs=NUM_EPOCHS, steps_per_epoch=NUM_STEPS, verbose=0
            )
        finally:
            worker.TrainFunction.result = result
        weight, table = weights(model)
        return {
            "workers": workers,
            "iterations": int(model.optimizer.iterations.numpy()),
            "history": history.history,
            "weight": weight,
            "table": table.tolist(),
        }

    def finite_data(self) -> dict:
        """Each example is seen once an epoch, in fit and in evaluation."""
        model = make_model(self._strategy)
        history = model.fit(
            numbered().batch(BATCH_SIZE),
            epochs=NUM_EPOCHS,
            validation_data=numbered().batch(10),
            verbose=0,
        )

        def make(context: Any) -> tf.data.Dataset:
            return numbered().batch(10)

        given = numbered().batch(10)
        predicted = model.predict(given, verbose=0)
        weight, table = weights(model)
        each = np.arange(NUM_EXAMPLES)
        expected = weight * each + table[each % NUM_IDS]
        outer = compiled(self._strategy, lambda: reading_words(model.student))
        return {
            "iterations": int(model.optimizer.iterations.numpy()),
            "history": history.history,
            "evaluated": model.evaluate(given, return_dict=True),
            "from_function": model.evaluate(make, return_dict=True),
            "of_words": outer.evaluate(given.map(in_words), return_dict=True),
            "predicted": predicted[:, 0].tolist(),
            "expected": expected.tolist(),
        }

    def errors(self) -> dict:
        """What goes wrong on a worker, and that the group goes on."""
        model = make_model(self._strategy)
        good = numbered().batch(BATCH_SIZE).repeat()
        bad_ids = examples(np.ones(NUM_EXAMPLES), NUM_IDS + 7).batch(BATCH_SIZE)
        found = {}

        def check(features: Any, y: tf.Tensor) -> Any:
            fine = tf.debugging.assert_less(
                y, 90.0, message="this record is damaged"
            )
            with tf.control_dependencies([fine]):
                return features, tf.identity(y)

        for name, data in (
            ("bad_record", numbered().map(check).batch(BATCH_SIZE).repeat()),
            ("bad_ids", bad_ids.repeat()),
        ):
            try:
                model.fit(data, steps_per_epoch=200, verbose=0)
            except tf.errors.OpError as error:
                found[name] = [type(error).__name__, error.message]
            history = model.fit(good, steps_per_epoch=10, verbose=0)
            found[f"after_{name}"] = history.history["count"]
        try:
            model.evaluate(bad_ids)
        except tf.errors.OpError as error:
            found["bad_ids_evaluated"] = [type(error).__name__, error.message]
        found["evaluated"] = model.evaluate(
            numbered().batch(10), return_dict=True
        )
        return found

    def nan(self) -> dict:
        """A loss that is NaN from some step on."""
        model = make_model(self._strategy)

        def data(context: tf.distribute.InputContext) -> tf.data.Dataset:
            x = np.ones(BATCH_SIZE * NUM_NAN_STEPS)
            both = examples(x).concatenate(examples(x * np.nan))
            return both.batch(BATCH_SIZE).repeat()

        history = model.fit(
            data,
            epochs=3,
            steps_per_epoch=100 * NUM_NAN_STEPS,
            verbose=0,
            callbacks=[keras.callbacks.TerminateOnNaN()],
        )
        return {
            "iterations": int(model.optimizer.iterations.numpy()),
            "is_nan": bool(np.isnan(history.history["loss"]).all()),
            "epochs": history.epoch,
        }


def main(directory: pathlib.Path, names: list[str]) -> None:
    parts = Parts(tfdistill.make_strategy())
    notes: dict[str, Any] = {"failed": {}}
    for name in names:
        print("part", name, flush=True)
        try:
            notes[name] = getattr(parts, name)()
        except Exception:
            notes["failed"][name] = traceback.format_exc()
    (directory / "notes.json").write_text(json.dumps(notes))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])
