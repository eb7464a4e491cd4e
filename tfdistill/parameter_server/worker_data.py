"""What each worker of a parameter-server group reads: its share of the data.

A data set travels to the workers as a serialized graph, or is made there by
the user's function. Training reads endless per-worker iterators, which
TensorFlow makes again on a worker that was restarted. Evaluation reads a
numbered share from its start to its end inside one call, so that the call can
be run again elsewhere without an example being counted twice.
"""

import collections.abc
import os
import re
from typing import Any
from typing import TypeAlias

import keras
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.system import keras_internals
from tfdistill.training import global_batch

# A batched `tf.data.Dataset`, or what makes one from an `InputContext`.
Source: TypeAlias = Any
_EXTERNAL_STATE_WARN = 0


def source_of(
    x: object,
    y: object = None,
    sample_weight: object = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
) -> Source:
    """Makes a source of what `fit`, `evaluate` or `predict` was given.

    `x` is a batched `tf.data.Dataset`, a function of a
    `tf.distribute.InputContext` that returns one, or arrays. The others are for
    arrays only, which are batched, by default 32 rows each.
    """
    if isinstance(x, tf.data.Dataset) or callable(x):
        if y is not None or sample_weight is not None or batch_size:
            raise ValueError(
                "`y`, `sample_weight` and `batch_size` must be left out if `x` "
                "is a data set or a data set function, which already contain "
                f"them; received x={type(x).__name__}."
            )
        return x
    if x is None or isinstance(
        x,
        keras.utils.PyDataset
        | collections.abc.Iterator
        | tf.distribute.DistributedDataset,
    ):
        raise ValueError(
            "`x` must be data that workers read by themselves: arrays, a "
            "tf.data.Dataset of TensorFlow operations, or a function of a "
            "tf.distribute.InputContext that returns one; received "
            f"{type(x).__name__}."
        )
    parts = [
        _with_tuples(part) for part in (x, y, sample_weight) if part is not None
    ]
    dataset = tf.data.Dataset.from_tensor_slices(tuple(parts))
    if shuffle:
        # No error without rows: other code reports that.
        dataset = dataset.shuffle(tf.maximum(dataset.cardinality(), 1))
    return dataset.batch(batch_size or 32)


def _with_tuples(data: Any) -> Any:
    """Returns arrays by input or output as tf.data has them.

    A list is one tensor to tf.data, and several arrays to Keras.
    """
    if isinstance(data, collections.abc.Mapping):
        return {key: _with_tuples(value) for key, value in data.items()}
    is_list = isinstance(data, list | tuple)
    if is_list and any(isinstance(x, keras_internals.Array) for x in data):
        return tuple(map(_with_tuples, data))
    return data


def made_by(
    source: Source, context: tf.distribute.InputContext
) -> tf.data.Dataset:
    """Returns the data set that a source is, or makes for a context."""
    made = source(context) if callable(source) else source
    if not isinstance(made, tf.data.Dataset):
        raise ValueError(
            "A data set function must return a tf.data.Dataset; received "
            f"{type(made).__name__}."
        )
    return made


class TravellingDataset:
    """A data set that can be made again inside a function on a worker."""

    def __init__(self, source: Source) -> None:
        """Serializes a data set; a function is called where it is needed."""
        self._source = source
        self._graph: tf.Tensor | None = None
        self._seed = int.from_bytes(os.urandom(4), "big")
        if isinstance(source, tf.data.Dataset):
            self.element_spec = source.element_spec
            self._graph = _serialized(source)
        else:
            made = tf.function(
                lambda: self.on_worker(tf.distribute.InputContext())
            ).get_concrete_function()
            # Such a handle means nothing in another process.
            if any(t.dtype == tf.variant for t in made.captured_inputs):
                raise ValueError(
                    "A data set function must make its whole data set itself; "
                    "this function uses a data set made outside of it. Move "
                    "that data set into the function, or pass it instead of "
                    "the function."
                )
            self.element_spec = made.structured_outputs.element_spec

    def on_worker(
        self,
        context: tf.distribute.InputContext,
        epoch: tf.Tensor | None = None,
    ) -> tf.data.Dataset:
        """Makes the data set; call it in a function that a worker runs.

        A data set is cut, by whole batches, to the share of the input pipeline
        that `context` names; a function does that itself. The order of a data
        set is that in which it is read for the `epoch`-th time, by default the
        first.
        """
        if self._graph is None:
            return self._made_alike(context, epoch)
        made = tf.raw_ops.DatasetFromGraph(graph_def=self._graph)
        if epoch is not None and keras_internals.draws_order(self._graph):
            made = _after_epochs(made, epoch, self.element_spec)
        dataset = tf.data.experimental.from_variant(made, self.element_spec)
        return dataset.shard(
            context.num_input_pipelines, context.input_pipeline_id
        )

    def _made_alike(
        self, context: tf.distribute.InputContext, epoch: tf.Tensor | None
    ) -> tf.data.Dataset:
        """Calls the function, and again if workers must draw one order.

        They must if it shards what it has shuffled, or if its result is sharded
        here.
        """
        made = made_by(self._source, context)
        is_whole = context.num_input_pipelines == 1
        if not keras_internals.is_shuffled(made, then_cut=not is_whole):
            return made
        # The seed of the graph of a worker's function, in which this is traced.
        if tf.compat.v1.get_default_graph().seed is None:
            tf.compat.v1.set_random_seed(self._seed)
            made = made_by(self._source, context)
        if epoch is None:
            return made
        variant = tf.data.experimental.to_variant(made)
        return tf.data.experimental.from_variant(
            _after_epochs(variant, epoch, made.element_spec), made.element_spec
        )

    def share(
        self, index: tf.Tensor, count: int, *, num_batches: int | None = None
    ) -> tf.data.Dataset:
        """Makes one of `count` shares that together hold each batch once.

        Only the first `num_batches` of the whole are shared, if given.
        """
        # A function that does not shard, or not by what it is told, must not
        # make an example count twice: it makes everything and we cut.
        whole = self.on_worker(tf.distribute.InputContext())
        if num_batches is not None:
            whole = whole.take(num_batches)
        return whole.shard(count, index)


def _after_epochs(made: tf.Tensor, epoch: tf.Tensor, spec: object) -> tf.Tensor:
    """Returns a data set as it is after some epochs: its seeds have moved on.

    They do for each iterator, read or not.
    """

    def opened(index: tf.Tensor) -> tuple[tf.Tensor]:
        iter(tf.data.experimental.from_variant(made, spec))
        return (index + 1,)

    loop = tf.while_loop(
        lambda index: index < epoch,
        opened,
        (tf.zeros([], tf.int64),),
        parallel_iterations=1,
    )
    with tf.control_dependencies(loop):
        return tf.identity(made)


def _serialized(dataset: tf.data.Dataset) -> tf.Tensor:
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_EXTERNAL_STATE_WARN,
            strip_device_assignment=True,
        )
    except tf.errors.OpError as error:
        if variable := re.search(r"access resource (\S+)", error.message):
            raise ValueError(
                "The data set must not use variables on parameter servers, "
                f"which it cannot take along; received {variable[1]!r}. Call "
                "the layer that has it, such as a random one, in the model "
                "instead of in `dataset.map`; or use operations without "
                "variables there, such as tf.image.random_flip_left_right; or "
                "train with workers only."
            ) from error
        raise ValueError(
            "The data set cannot travel to the workers of a parameter-server "
            "group: it uses objects that exist only in this process. Pass a "
            "function of a tf.distribute.InputContext, which creates the data "
            "set on the worker. TensorFlow says: "
            f"{error.message.splitlines()[0]}"
        ) from error
    if b"PyFunc" in graph.numpy():
        raise ValueError(
            "The data set calls Python code (from_generator, py_function or "
            "numpy_function), which cannot travel to the workers of a "
            "parameter-server group. Write it with TensorFlow operations or "
            "read files. With tfdistill.labels.TeacherClient, pass a function "
            "of a tf.distribute.InputContext that creates the data set: the "
            "chief then asks the servers."
        )
    return keras_internals.with_seeds(graph)


class WorkerData:
    """The training data of all workers, each reading its own share."""

    def __init__(
        self,
        coordinator: tf.distribute.coordinator.ClusterCoordinator,
        source: Source,
        *,
        num_workers: int,
    ) -> None:
        """Sends the data set to a coordinator's workers; reads nothing yet."""
        travelling = TravellingDataset(source)
        epoch = self._epoch = replicas.told(
            coordinator.strategy, tf.zeros([], tf.int64), name="epoch"
        )

        def dataset_of_worker() -> tf.data.Dataset:
            index = this_worker()
            return travelling.on_worker(
                tf.distribute.InputContext(num_workers, index, 1),
                tf.convert_to_tensor(epoch),
            )

        self._datasets = coordinator.create_per_worker_dataset(
            dataset_of_worker
        )
        self._coordinator = coordinator
        self._of_worker = dataset_of_worker
        self.element_spec = self._datasets.element_spec

    def iterator(self, epoch: int) -> Any:
        """Returns new per-worker iterators, to be passed to `schedule`.

        Data that are shuffled come in the order of this epoch.
        """
        self._epoch.assign(epoch)
        return iter(self._datasets)

    def is_endless(self) -> bool:
        """Asks a worker whether its data repeat forever."""
        cardinality = self._coordinator.schedule(
            tf.function(lambda: self._of_worker().cardinality())
        )
        return bool(cardinality.fetch() == tf.data.INFINITE_CARDINALITY)


def this_worker() -> tf.Tensor:
    """Index of the worker that runs the function being traced, int64."""
    return tf.distribute.coordinator.experimental_get_current_worker_index()


def num_rows(element: object) -> tf.Tensor:
    """Number of examples in an element of the data, float32 scalar."""
    x = keras.utils.unpack_x_y_sample_weight(element)[0]
    return global_batch.GlobalBatch.of(x).total
