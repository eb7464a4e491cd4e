"""A checkpoint from elsewhere, which TensorFlow opens: what it must not exceed.

TensorFlow trusts the index of a checkpoint, so a version's signature and
SHA-256 are checked before: a forged index can end the process that opens it.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from collections.abc import Mapping

import tensorflow as tf

from tfdistill.exchange import filesystem

MAX_INDEX_BYTES = 64 * 1024**2


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not; the message says why."""


def contents(directory: str) -> dict[str, tuple[tf.TensorShape, tf.DType]]:
    """Returns the shape and dtype of each tensor of a SavedModel, by its key.

    `directory` must be where TensorFlow itself can read. CheckpointError if
    the index is damaged; OSError if the storage fails.
    """
    prefix = _prefix(directory)
    file_system, root = filesystem.for_root(prefix)
    found = file_system.stat(f"{root}.index")
    if not found.is_file or found.size > MAX_INDEX_BYTES:
        raise CheckpointError(
            "its checkpoint must have an index that is a file of at most "
            f"{MAX_INDEX_BYTES} bytes; it has {found.size}."
        )
    with _refusing(directory):
        reader = tf.train.load_checkpoint(prefix)
        dtypes = reader.get_variable_to_dtype_map()
        return {
            key: (tf.TensorShape(shape), dtypes[key])
            for key, shape in reader.get_variable_to_shape_map().items()
        }


def read(directory: str, dtypes: Mapping[str, tf.DType]) -> list[tf.Tensor]:
    """Reads the tensors with these keys, while other threads go on."""
    if not dtypes:
        return []
    with _refusing(directory), tf.device("CPU:0"):
        return tf.raw_ops.RestoreV2(
            prefix=_prefix(directory),
            tensor_names=list(dtypes),
            shape_and_slices=[""] * len(dtypes),
            dtypes=list(dtypes.values()),
        )


@contextlib.contextmanager
def local_copy(directory: str, *, max_bytes: int) -> Iterator[str]:
    """Gives `directory`, or a copy of its variables if TensorFlow needs one.

    CheckpointError if there are more bytes of them than `max_bytes`.
    """
    file_system, root = filesystem.for_root(f"{directory}/variables")
    names = file_system.list_dir(root)
    num_bytes = sum(file_system.stat(f"{root}/{name}").size for name in names)
    if num_bytes > max_bytes:
        raise CheckpointError(
            f"its checkpoint must have at most {max_bytes} bytes; it has "
            f"{num_bytes}."
        )
    if not filesystem.in_object_store(directory):
        yield directory
        return
    local = filesystem.LocalFileSystem()
    with tempfile.TemporaryDirectory(prefix="tfdistill-peer-") as copy:
        for name in names:
            blocks = file_system.blocks(f"{root}/{name}")
            local.write(f"{copy}/variables/{name}", blocks)
        yield copy


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
    """Reads all files once more: if it is the storage that fails, OSError."""
    file_system, root = filesystem.for_root(f"{directory}/variables")
    file_system.stat(f"{root}/variables.index")
    for name in file_system.list_dir(root):
        for _ in file_system.blocks(f"{root}/{name}"):
            pass
