"""Checkpoints in TensorFlow's own format, written and read at once.

TensorFlow trusts the index of a checkpoint, so a version's signature and
SHA-256 are checked before it is read: a forged index can end the process.
"""

import contextlib
from collections.abc import Iterator
from collections.abc import Mapping

import tensorflow as tf

from tfdistill.exchange import filesystem


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not; the message says why."""


def contents(directory: str) -> dict[str, tuple[tf.TensorShape, tf.DType]]:
    """Returns the shape and dtype of each tensor of a SavedModel, by its key.

    `directory` must be where TensorFlow itself can read. CheckpointError if
    the index is damaged; OSError if the storage fails.
    """
    prefix = _prefix(directory)
    with _refusing(directory):
        reader = tf.train.load_checkpoint(prefix)
        dtypes = reader.get_variable_to_dtype_map()
        return {
            key: (tf.TensorShape(shape), dtypes[key])
            for key, shape in reader.get_variable_to_shape_map().items()
        }


def read(directory: str, dtypes: Mapping[str, tf.DType]) -> list[tf.Tensor]:
    """Reads the tensors with these keys, without blocking other threads."""
    if not dtypes:
        return []
    with _refusing(directory), tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(
            prefix=_prefix(directory),
            tensor_names=list(dtypes),
            shape_and_slices=[""] * len(dtypes),
            dtypes=list(dtypes.values()),
        )


def write(prefix: str, tensors: Mapping[str, tf.Tensor]) -> None:
    """Writes a checkpoint of whole tensors, by their keys, on this task."""
    with tf.device("CPU:0"):
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=list(tensors),
            shape_and_slices=[""] * len(tensors),
            tensors=[tf.identity(tensor) for tensor in tensors.values()],
        )


def _prefix(directory: str) -> str:
    return f"{directory}/variables/variables"


@contextlib.contextmanager
def _refusing(directory: str) -> Iterator[None]:
    """Turns TensorFlow's errors into CheckpointError."""
    try:
        yield
    except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
        _read_through(directory)
        raise CheckpointError(
            f"its checkpoint must be whole; it is not: {error}"
        ) from error


def _read_through(directory: str) -> None:
    """Reads all files again; raises OSError if it is the storage that fails."""
    file_system, root = filesystem.for_root(f"{directory}/variables")
    file_system.stat(f"{root}/variables.index")
    for name in file_system.list_dir(root):
        for _ in file_system.blocks(f"{root}/{name}"):
            pass
