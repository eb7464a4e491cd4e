"""What a recipe's teachers must pass: a batch to predict, and a schema."""

import importlib
import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from launch import config as config_lib
from tfdistill import canary as canary_lib


def make_canary(
    config: config_lib.Config, validation: tf.data.Dataset
) -> canary_lib.Canary | None:
    """Returns the first validation examples, with their labels.

    Args:
        config: The run.
        validation: Of this group, in the same order on all workers.

    Returns:
        What teachers must predict; None where the configuration has none.
    """
    learn = config.codistillation
    if not learn.canary_examples:
        return None
    x, y = next(iter(validation.take(1)))
    inputs = keras.tree.map_structure(
        lambda tensor: tensor[: learn.canary_examples], x
    )
    labels = np.asarray(y)[: learn.canary_examples].astype(np.int64)
    return canary_lib.Canary(
        inputs, labels=labels, from_logits=True, margin=learn.canary_margin
    )


def schema(config: config_lib.Config) -> dict[str, Any]:
    """Returns what a student's inputs and outputs mean in this group.

    Args:
        config: The run; its data must have been opened before.

    Returns:
        As `tfdistill.TeacherSet(schema=...)` takes it.
    """
    arguments = dict(config.data.arguments)
    if config.data.path:
        arguments["path"] = config.data.path
    source = importlib.import_module(f"models.{config.data.name}")
    # Of the data's arguments only some change what they mean.
    known = inspect.signature(source.make_schema).parameters
    return source.make_schema(
        **{k: v for k, v in arguments.items() if k in known}
    )
