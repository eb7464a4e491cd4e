"""What travels to workers, and what each of them reads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.cases import servers as cases
from tfdistill.parameter_server import worker_data


def _elements(dataset):
    return [batch.tolist() for batch in dataset.as_numpy_iterator()]


def _ten():
    """Batches [0, 1], [2, 3], ... [8]."""
    return tf.data.Dataset.range(9).batch(2)


def _made_by_workers(context):
    return _ten().shard(context.num_input_pipelines, context.input_pipeline_id)


SOURCES = pytest.mark.parametrize(
    "source", [_ten, lambda: _made_by_workers], ids=["data set", "function"]
)


def test_arrays_are_shuffled_whole_and_each_time_anew():
    source = worker_data.source_of(np.arange(64), batch_size=64, shuffle=True)
    first, second = (next(iter(source))[0].numpy().tolist() for _ in range(2))
    assert first != second and first[:8] != sorted(first[:8])
    assert sorted(first) == sorted(second) == list(range(64))


def test_a_list_of_arrays_is_several_inputs_as_in_keras():
    wide, narrow = np.ones([5, 3]), np.arange(5)
    source = worker_data.source_of(
        [wide, {"ids": [narrow, wide]}], [narrow, wide], batch_size=2
    )
    (x, (y, _)), *_ = [(x, y) for x, y in source]
    assert x[0].shape == (2, 3) and x[1]["ids"][0].numpy().tolist() == [0, 1]
    assert y.numpy().tolist() == [0, 1]
    (rows, _), *_ = worker_data.source_of([[1, 2], [3, 4]], [0, 1])
    assert rows.numpy().tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "given",
    [iter([(np.ones(4), np.ones(4))]), type("P", (keras.utils.PyDataset,), {})],
    ids=["generator", "py_dataset"],
)
def test_python_that_workers_cannot_run_is_refused(given):
    given = given() if isinstance(given, type) else given
    with pytest.raises(ValueError, match="workers read by themselves"):
        worker_data.source_of(given)


def _share(source, count, *, num_batches=None):
    travelling = worker_data.TravellingDataset(source)
    made = tf.function(
        lambda index: travelling.share(index, count, num_batches=num_batches)
    )
    return [
        _elements(made(tf.constant(index, tf.int64))) for index in range(count)
    ]


@SOURCES
def test_shares_hold_each_batch_once(source):
    assert _share(source(), 1) == [_elements(_ten())]
    assert _share(source(), 2) == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]
    assert _share(source(), 7)[4:] == [[[8]], [], []]


def _generator():
    return tf.data.Dataset.from_generator(
        lambda: iter([1, 2]), output_signature=tf.TensorSpec([], tf.int64)
    ).batch(2)


def _python(name):
    def dataset():
        call = getattr(tf, name)
        return _ten().map(lambda v: call(lambda x: x, [v], tf.int64))

    return dataset


@pytest.mark.parametrize(
    "dataset",
    [_generator, _python("py_function"), _python("numpy_function")],
    ids=["from_generator", "py_function", "numpy_function"],
)
def test_python_code_cannot_travel(dataset):
    with pytest.raises(ValueError, match="from_generator.*cannot travel"):
        worker_data.TravellingDataset(dataset())


def test_a_lookup_table_travels_with_its_contents():
    keys = tf.range(9, dtype=tf.int64)
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(keys, keys + 100), default_value=-1
    )
    travelling = worker_data.TravellingDataset(_ten().map(table.lookup))
    del table
    made = travelling.on_worker(tf.distribute.InputContext(3, 1, 1))
    assert _elements(made) == [[102, 103], [108]]


def test_a_variable_on_a_server_cannot_travel():
    with tf.device("CPU:1"):  # As the seeds of Keras' random layers.
        layer = keras.layers.RandomFlip()
    dataset = tf.data.Dataset.from_tensors(tf.ones([2, 4, 4, 1])).map(layer)
    with pytest.raises(ValueError, match="'seed_.*in the model instead"):
        worker_data.TravellingDataset(dataset)


def test_a_function_must_make_its_data_itself():
    made = _ten()
    with pytest.raises(ValueError, match="made outside of it"):
        worker_data.TravellingDataset(lambda context: made.take(1))


@SOURCES
def test_workers_train_on_what_is_theirs(source, monkeypatch):
    coordinator = cases.Coordinator(monkeypatch, num_workers=2)
    found = worker_data.WorkerData(coordinator, source(), num_workers=2)
    assert found.element_spec == _ten().element_spec
    iterators = found.iterator(0).values
    read = [[batch.numpy().tolist() for batch in one] for one in iterators]
    assert read == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]]


def _shuffled(context=None):
    dataset = tf.data.Dataset.range(40).shuffle(40).batch(4)
    if context is None:
        return dataset
    return dataset.shard(context.num_input_pipelines, context.input_pipeline_id)


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("source", [_shuffled, lambda: _shuffled])
def test_an_order_is_one_for_all_workers_and_new_in_each_epoch(source, seed):
    tf.random.set_seed(seed)
    travelling = worker_data.TravellingDataset(source())

    @tf.function  # As on a worker: nothing is drawn while it is traced.
    def read(index, count, epoch):
        context = tf.distribute.InputContext(count, index, 1)
        made = travelling.on_worker(context, epoch)
        return made.reduce(
            tf.zeros([0], tf.int64), lambda all, one: tf.concat([all, one], 0)
        )

    def epoch(number):
        parts = [read(i, 2, tf.constant(number, tf.int64)) for i in range(2)]
        return np.concatenate(parts).tolist()

    epochs = [epoch(number) for number in (0, 1, 2)]
    assert all(sorted(each) == list(range(40)) for each in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epoch(1) == epochs[1]  # As after a loss of the worker.

    @tf.function
    def evaluate(index):
        share = travelling.share(index, 2)
        return share.reduce(
            tf.zeros([0], tf.int64), lambda all, one: tf.concat([all, one], 0)
        )

    parts = [evaluate(tf.constant(i, tf.int64)) for i in range(2)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
