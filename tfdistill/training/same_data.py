"""Finds out whether the workers of a group read the same batches.

Each worker reads whole global batches and keeps its own rows. If one draws
another order than the others, some examples count several times in an epoch and
others never, and nothing fails. So all compare the labels of a first batch, or
its inputs if it has none: a random change of inputs is nothing to warn of.
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

# Of arrays, which all are to be alike.
_NUM_ROWS = 1024


class FirstBatch:
    """The first batch of some data, as a number that all workers compare.

    A collective for each comparison, and a look at each batch of a data set.
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
        self._num_local = replicas.num_local(strategy)
        # Where a data set notes how many batches of it were read, and the
        # number of the first; or the number of other data.
        self._noted: Any = None
        self._number: int | None = None

    def of_dataset(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns a data set that notes its first batch, if all read all."""
        auto_shard = dataset.options().experimental_distribute.auto_shard_policy
        leaves = self._compared(dataset.element_spec)
        if auto_shard != tf.data.experimental.AutoShardPolicy.DATA:
            return dataset
        if any(leaf.dtype == tf.variant for leaf in leaves):
            return dataset

        def make() -> tf.Variable:
            with tf.device("CPU:0"):
                return tf.Variable(tf.zeros([2], tf.int64), trainable=False)

        noted = self._noted = replicas.outside_scopes(make)

        @tf.autograph.experimental.do_not_convert
        def note(*element: Any) -> tf.Tensor:
            def first() -> tf.Tensor:
                whole = element if len(element) > 1 else element[0]
                number = _of_tensors(self._compared(whole))
                with tf.control_dependencies([noted.assign([1, number])]):
                    return tf.constant(True)

            return tf.cond(noted[0] > 0, lambda: tf.constant(True), first)

        # No `map`, behind which TensorFlow does not know the size of a batch.
        watched, size = dataset.filter(note), dataset.cardinality()
        if size != tf.data.UNKNOWN_CARDINALITY:
            watched = watched.apply(
                tf.data.experimental.assert_cardinality(size)
            )
        return data_lib.made_again_as(dataset, watched)

    def of(self, x: Any, y: Any = None) -> Any:
        """Returns data of Python that do; arrays are looked at here."""
        if isinstance(x, types.GeneratorType):
            return self._noting(x)
        if isinstance(x, keras.utils.PyDataset):
            self._number = _of_arrays(self._compared(x[0]))
        elif not isinstance(x, tf.distribute.DistributedDataset):
            leaves = self._compared((x,) if y is None else (x, y))
            rows = [leaf[:_NUM_ROWS] for leaf in leaves if np.ndim(leaf)]
            self._number = _of_arrays(rows)
        return x

    def _noting(self, generator: Iterator[Any]) -> Iterator[Any]:
        is_first = True
        for element in generator:
            if is_first:
                self._number = _of_arrays(self._compared(element))
                is_first = False
            yield element

    def _compared(self, element: Any) -> list[Any]:
        """Returns the labels of an element or a spec, or else the inputs."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(self._bare(element))
        leaves = tf.nest.flatten(x if y is None else y, expand_composites=True)
        return [
            v
            for v in leaves
            if v is not None and not keras_internals.is_none(v)
        ]

    def compare(self) -> None:
        """Warns, on the chief, if the workers have not read the same.

        All workers call it when they have read a batch; it compares once.
        """
        if self._noted is not None:
            self._number = int(self._noted.numpy()[1])
        number, self._number, self._noted = self._number, None, None
        if number is None:
            return
        found = self._workers.gathered(number)[:: self._num_local]
        others = [str(i) for i, each in enumerate(found) if each != found[0]]
        if others and self._is_chief:
            warnings.warn(_said(self._name, ", ".join(others)), stacklevel=2)


def _of_tensors(leaves: list[tf.Tensor]) -> tf.Tensor:
    parts = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
    whole = tf.fingerprint(tf.concat(parts, axis=-1))
    return tf.bitcast(whole, tf.int64)[0]


def _of_arrays(leaves: list[Any]) -> int:
    number = 0
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
    """Compares the first batch of a `fit`, once its step is done."""

    def __init__(self, first: FirstBatch) -> None:
        super().__init__()
        self._first = first

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compares after the first execution."""
        self._first.compare()
