"""The data of a run, as one task of it gets them."""

import importlib

import tensorflow as tf

import tfdistill
from launch import config as config_lib
from launch import students
from tfdistill import data_checks


def make(
    config: config_lib.Config, cluster: tfdistill.Cluster
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns this task's training data and its validation data.

    Args:
        config: The run.
        cluster: This task.

    Raises:
        data_checks.DataError: If the data are at fault.
        students.OptionsError: If arguments in the configuration are.
    """
    source = importlib.import_module(f"models.{config.data.name}")
    path = config.data.path
    arguments = {**config.data.arguments, **({"path": path} if path else {})}
    try:
        return source.make_datasets(
            cluster,
            global_batch_size=config.data.global_batch_size,
            data=config.data.mode,
            seed=config.data.seed,
            **arguments,
        )
    except TypeError as cause:
        raise students.OptionsError(
            f"`data.path` or `data.arguments` do not fit: {cause}."
        ) from cause
    except (OSError, ValueError) as cause:
        raise data_checks.DataError(str(cause)) from cause
