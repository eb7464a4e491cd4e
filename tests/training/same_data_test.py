"""Whether workers hear that they read other batches than each other."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdistill import data as data_lib
from tfdistill.training import same_data

X = np.arange(24, dtype="float32").reshape(12, 2)
Y = np.arange(12)


class _Sequence(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self.parts = x, y

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return tuple(part[4 * index :][:4] for part in self.parts)


def _generator(x, y):
    batches = _Sequence(x, y)
    return (batches[index] for index in range(3))


def _dataset(x, y):
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    return data_lib.by_element(dataset)


KINDS = pytest.mark.parametrize(
    "kind",
    [
        _dataset,
        _Sequence,
        _generator,
        lambda x, y: (x, y),
        lambda x, y: _dataset(x, y).filter(lambda *_: True),
        lambda x, y: _dataset(x, tf.strings.as_string(y)),
        lambda x, y: _dataset(x, tf.sparse.from_dense(y[:, None] + 1)),
    ],
    ids=[
        *("data set", "PyDataset", "generator", "arrays", "unknown length"),
        *("strings", "sparse"),
    ],
)


def _first(name="x"):
    """What looks at some data, and the numbers that it has told the others."""
    told = []
    first = same_data.FirstBatches(
        name, tf.distribute.get_strategy(), bare=lambda element: element
    )
    first._workers.gathered = lambda number: told.append(number) or [number]
    return first, told


def _number(data):
    """What a worker tells the others of some data."""
    first, told = _first()
    if isinstance(data, tf.data.Dataset):
        read = first.of(data)
        assert read.cardinality() == data.cardinality()
        assert len(list(read)) == len(list(data))
    elif isinstance(data, tuple):
        assert first.of(data) is data
    else:
        read = first.of(data)
        assert isinstance(read, type(data))
        len(list(read) if read is not data else [])
    first.compare()
    first.compare()  # It is told once.
    count, number = told
    # Arrays and a `PyDataset` are looked at before they are read.
    is_read = not isinstance(data, tuple | keras.utils.PyDataset)
    assert count == (3 if is_read else 1)
    return number


@KINDS
def test_other_examples_are_told_from_others_and_augmentation_is_not(kind):
    own = _number(kind(X, Y))
    assert _number(kind(X + 1, Y)) == own
    assert _number(kind(X, Y[::-1])) != own


@pytest.mark.parametrize("kind", [_dataset, _generator])
def test_labels_that_differ_only_later_are_told_apart(kind):
    zeros = np.zeros_like(Y)
    assert _number(kind(X, zeros)) != _number(kind(X, np.append(zeros[1:], 1)))


class _Turned(_Sequence):
    """Has another order in each epoch."""

    def on_epoch_end(self):
        self.parts = [part[::-1] for part in self.parts]


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("make", [_dataset, _Turned])
def test_each_epoch_is_compared(make, is_resumed):
    data, (first, told) = make(X, Y), _first()
    is_dataset = isinstance(data, tf.data.Dataset)
    read = first.of(data)
    watch = same_data.Watch(first, starts_over=True)
    if is_resumed:
        first.skip()
    for epoch in range(3):
        watch.on_epoch_begin(epoch)
        for batch in range(3):
            watch.on_train_batch_end(batch)
        if is_dataset:
            list(read)
        else:
            data.on_epoch_end()
        watch.on_epoch_end(epoch)
    counts, numbers = told[::2], told[1::2]
    if is_dataset:
        assert counts == [3] * (2 if is_resumed else 3)
        assert len(set(numbers)) == 1
    else:
        assert counts == [1] * 3
        assert numbers[0] == numbers[2] != numbers[1]


def test_without_labels_the_inputs_count():
    def inputs(x):
        return _dataset(x, Y).map(lambda x, y: {"x": x})

    assert _number(inputs(X)) == _number(inputs(X))
    assert _number(inputs(X)) != _number(inputs(X + 1))


@pytest.mark.parametrize("policy", ["OFF", "FILE", "HINT"])
def test_data_that_are_no_global_batches_are_left_alone(policy):
    policies = tf.data.experimental.AutoShardPolicy
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policies[policy]
    dataset = data_lib.by_element(_dataset(X, Y).with_options(options))
    first, _ = _first()
    assert first.of(dataset) is dataset


def test_a_data_set_remains_resumable():
    def make(number):
        return tf.data.Dataset.range(6).batch(2).skip(number)

    first, _ = _first()
    noted = first.of(data_lib.by_element(data_lib.resumable(make)))
    (left,) = data_lib.from_batch(noted, 2)
    assert left.numpy().tolist() == [4, 5]


@pytest.mark.parametrize("others", [[], [1, 2]])
def test_the_message_names_the_data_and_the_workers(others):
    first, _ = _first("validation_data")
    first._workers.gathered = lambda number: [
        number + (worker in others) for worker in range(4)
    ]
    first.of(X, Y)
    if not others:
        with warnings.catch_warnings(action="error"):
            first.compare()
        return
    said = "`validation_data` must .* of worker 0 and worker 1, 2 differ"
    with pytest.warns(UserWarning, match=said):
        first.compare()
