"""The rows of a span, and what a promoted version predicts for them."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill import layers  # noqa: F401  # For a file's layers.
from tfdistill.contrib.line import settings as settings_lib
from tfdistill.held_out import objectives
from tfdistill.recipes import recipes

Rows = tuple[Any, Any]
# Rows that are predicted at a time.
_BATCH_ROWS = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanData:
    """A span as arrays: inputs and labels.

    Attributes:
        training: None if the recipe's data are a function, whose training
            data are endless.
        held_out: What candidates are judged by.
        slices: By name, which held-out rows are judged by themselves.
        objective: By what the recipe's loss is judged.
        workload: The workload.
        settings: What it sets for its line.
    """

    training: Rows | None
    held_out: Rows
    slices: Mapping[str, np.ndarray]
    objective: Any
    workload: Any
    settings: settings_lib.LineSettings


def read(recipe: recipes.Recipe) -> SpanData:
    """Returns the rows of a recipe's last span, as one group sees them."""
    workload = recipe.workload()
    train, validation = workload.datasets(tfdistill.Cluster())
    loss = workload.loss
    if not isinstance(loss, keras.losses.Loss | Mapping):
        loss = loss(train)
    training = None
    if not callable(workload.data):
        training = tf.nest.map_structure(np.asarray, tuple(workload.data[0]))
    parts = [(x, y) for x, y, *_ in validation.as_numpy_iterator()]
    held_out = tf.nest.map_structure(lambda *a: np.concatenate(a), *parts)
    own = workload.line or settings_lib.LineSettings()
    slices = own.slices(held_out[0]) if own.slices else {}
    return SpanData(
        training=training,
        held_out=held_out,
        slices={name: np.asarray(at, bool) for name, at in slices.items()},
        objective=objectives.of(loss),
        workload=workload,
        settings=own,
    )


def predictor(version: str, objective: Any) -> Callable[[Rows], Any]:
    """Returns what gives a version's `Predictions` for some rows."""
    loaded = tf.saved_model.load(version)

    def predict(rows: Rows) -> Any:
        inputs, labels = rows
        batches = tf.data.Dataset.from_tensor_slices(inputs).batch(_BATCH_ROWS)
        try:
            found = [np.asarray(loaded.serve(batch)) for batch in batches]
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(
                f"{version} must be able to predict the new rows, including "
                "rows with unknown ids (`oov_index` of a ShardedEmbedding): "
                f"{error.message}"
            ) from error
        logits = np.concatenate(found).astype(np.float64)
        return objective.predictions(logits, np.asarray(labels))

    return predict


def probabilities(predict: Callable[[Rows], Any]) -> Callable[[Any], Any]:
    """Returns what gives the probabilities alone, of inputs alone."""

    def of(inputs: Any) -> Any:
        size = len(tf.nest.flatten(inputs)[0])
        return predict((inputs, np.zeros(size))).compared

    return of


def weights(version: str) -> dict[str, np.ndarray]:
    """Returns a version's weights by their names in its checkpoint."""
    reader = tf.train.load_checkpoint(f"{version}/variables/variables")
    return {
        name: reader.get_tensor(name)
        for name, dtype in reader.get_variable_to_dtype_map().items()
        if dtype.is_floating
    }
