"""Finds out whether the workers of a group read the same batches.

Each worker reads whole global batches and keeps its own rows. If one draws
another order than the others, some examples count several times in an epoch and
others never, and nothing fails. So all compare the labels of the first batches,
or their inputs if they have none: a random change of inputs is nothing to warn
of. Several batches, since the labels of one may all be 0.
"""

import types
import warnings
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdistill import data as data_lib
from tfdistill.cluster import replicas
from tfdistill.system import keras_internals
from tfdistill.training import steps

Logs = steps.Logs

NUM_BATCHES = 8
# Rows compared of arrays, all of which must be alike.
_NUM_ROWS = 1024


class FirstBatches:
    """The first batches of some data, as numbers that all workers compare.

    Two collectives for each comparison, and a look at each batch of a data set.
    """

    def __init__(
        self,
        name: str,
        strategy: tf.distribute.Strategy,
        *,
        bare: Callable[[Any], Any],
    ) -> None:
        """`name` is the argument's; `bare` takes labels of teachers away."""
        self._name, self._bare = name, bare
        self._workers = replicas.WorkerValues(strategy)
        self._is_chief = replicas.is_chief(strategy)
        # For other data: a hash of the first batch, of the first two, and so
        # on; or where a data set notes their count, and the hashes.
        self._numbers: list[int] = []
        self._noted: Any = None
        self._python: Any = None
        self._is_due = True

    def of(self, data: Any, y: object = None) -> Any:
        """Returns data that note their first batches; arrays are read here.

        Data are as for `fit`, or a tuple as for `validation_data`.
        """
        if isinstance(data, tf.data.Dataset):
            return self._of_dataset(data)
        if isinstance(data, types.GeneratorType):
            return self._noting(data)
        if isinstance(data, keras.utils.PyDataset):
            self._python = data
            self._numbers = [_of_arrays(self._compared(data[0]))]
        elif not isinstance(data, tf.distribute.DistributedDataset):
            given = data[:2] if isinstance(data, tuple) else (data,)
            leaves = self._compared(given if y is None else (data, y))
            rows = [leaf[:_NUM_ROWS] for leaf in leaves if np.ndim(leaf)]
            self._numbers = [_of_arrays(rows)]
        return data

    def _of_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a data set that notes its first batches, if all read all."""
        auto_shard = dataset.options().experimental_distribute.auto_shard_policy
        leaves = self._compared(dataset.element_spec)
        if auto_shard != tf.data.experimental.AutoShardPolicy.DATA:
            return dataset
        if any(leaf.dtype == tf.variant for leaf in leaves):
            return dataset

        def make() -> tf.Variable:
            with tf.device("CPU:0"):
                return tf.Variable(
                    tf.zeros([1 + NUM_BATCHES], tf.int64), trainable=False
                )

        noted = self._noted = replicas.outside_scopes(make)

        @tf.autograph.experimental.do_not_convert
        def note(*element: object) -> tf.Tensor:
            def one_more() -> tf.Tensor:
                whole = element if len(element) > 1 else element[0]
                known = noted.read_value()
                count = known[0] + 1
                number = _of_tensors(self._compared(whole), known[count - 1])
                known = tf.tensor_scatter_nd_update(
                    known, [[0], [count]], [count, number]
                )
                with tf.control_dependencies([noted.assign(known)]):
                    return tf.constant(True)

            return tf.cond(
                noted[0] >= NUM_BATCHES, lambda: tf.constant(True), one_more
            )

        # No `map`, behind which TensorFlow does not know the size of a batch.
        watched, size = dataset.filter(note), dataset.cardinality()
        if size != tf.data.UNKNOWN_CARDINALITY:
            watched = watched.apply(
                tf.data.experimental.assert_cardinality(size)
            )
        return data_lib.made_again_as(dataset, watched)

    def _noting(self, generator: Iterator[Any]) -> Iterator[Any]:
        for index, element in enumerate(generator):
            if index < NUM_BATCHES:
                before = self._numbers[-1] if index else 0
                number = _of_arrays(self._compared(element), before)
                self._numbers.append(number)
            yield element

    def begin_again(self) -> None:
        """Notes the batches of the next pass over the data, not yet begun.

        Of arrays the order is known: `replicas.agree_on_seeds`.
        """
        if self._noted is not None:
            self._noted.assign(tf.zeros_like(self._noted))
        elif self._python is not None:
            self._numbers = [_of_arrays(self._compared(self._python[0]))]
        else:
            return
        self._is_due = True

    def _compared(self, element: object) -> list[Any]:
        """Returns the labels of an element or a spec, or else the inputs."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(self._bare(element))
        leaves = tf.nest.flatten(x if y is None else y, expand_composites=True)
        return [
            v
            for v in leaves
            if v is not None and not keras_internals.is_none(v)
        ]

    def skip(self) -> None:
        """Compares no batches of a data set in the pass that begins.

        For a resumed epoch, which opens its data several times.
        """
        self._is_due = self._noted is None

    def compare(self) -> None:
        """Warns, on the chief, if the workers have not read the same.

        All workers call it when they have read a batch; it compares once for
        each pass, and warns once.
        """
        if not self._is_due:
            return
        self._is_due = False
        numbers = self._numbers
        if self._noted is not None:
            count, *noted = self._noted.numpy().tolist()
            numbers = noted[:count]
        # Batches read ahead differ between workers.
        count = min(self._workers.gathered(len(numbers)))
        if not count:
            return
        own = numbers[count - 1]
        found = self._workers.gathered(own)
        others = [str(i) for i, each in enumerate(found) if each != found[0]]
        if not others:
            return
        self._noted = self._python = None
        if self._is_chief:
            warnings.warn(_said(self._name, ", ".join(others)), stacklevel=2)


def _of_tensors(leaves: list[tf.Tensor], before: tf.Tensor) -> tf.Tensor:
    parts = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
    parts.append(tf.bitcast(before, tf.uint8)[tf.newaxis])
    whole = tf.fingerprint(tf.concat(parts, axis=-1))
    return tf.bitcast(whole, tf.int64)[0]


def _of_arrays(leaves: list[Any], number: int = 0) -> int:
    for leaf in leaves:
        array = np.asarray(leaf)
        if array.dtype.hasobject:
            array = np.array(array.tolist(), str)
        number = zlib.crc32(array.tobytes(), number)
    return number


def _said(name: str, others: str) -> str:
    return (
        f"`{name}` must give all workers the same batches, of which each gets "
        f"its rows; the first batches of worker 0 and worker {others} differ. "
        "So some examples count several times in an epoch, and others never. "
        "Make the data alike on all workers: call "
        "keras.utils.set_random_seed with the same number before, or give "
        "`shuffle` and random transformations a seed; sort lists of files; "
        "read them in a determined order (`deterministic=True`); and don't "
        "`shard` by worker. If each worker is to read its own data, set "
        "options().experimental_distribute.auto_shard_policy of the data set "
        "to tf.data.experimental.AutoShardPolicy.OFF."
    )


class Watch(keras.callbacks.Callback):
    """Compares the first batches of each epoch of a `fit`."""

    def __init__(self, first: FirstBatches, *, starts_over: bool) -> None:
        """`starts_over` if each epoch is one pass over the data."""
        super().__init__()
        self._first = first
        self._starts_over, self._is_first = starts_over, True

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Starts again where the data do."""
        if not self._is_first and self._starts_over:
            self._first.begin_again()
        self._is_first = False

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Compares once several batches were read."""
        if batch + 1 >= NUM_BATCHES:
            self._first.compare()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Compares the batches of a short epoch."""
        self._first.compare()
