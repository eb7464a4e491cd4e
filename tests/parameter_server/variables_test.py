"""Variables in packets, and the state of a training on servers."""

import keras
import numpy as np
import tensorflow as tf

from tests.cases import servers as cases
from tfdistill.parameter_server import variables as variables_lib


def test_workers_that_count_at_once_lose_nothing():
    variables = [tf.Variable(v) for v in ([5, 5], 0.25, 7.0)]
    counter = tf.Variable([3, 0], dtype=tf.uint32)
    variables.append(counter)
    packed = variables_lib.PackedVariables(variables)
    first_read, second_read = packed.read(), packed.read()

    @tf.function
    def write(before, added):
        count, total, last, seed = before
        after = [1 + (count + added), total + 0.5, 2.0 * last, seed + [0, 1]]
        packed.assign(after, before)

    write(first_read, [1, 0])
    write(second_read, 2)
    found = [variable.numpy().tolist() for variable in variables]
    # The last one is not counted but assigned: by whoever comes last.
    assert found == [[10, 9], 1.25, 14.0, [3, 2]]


def _state(num_shards=2):
    student = cases.student(
        keras.layers.BatchNormalization(), num_shards=num_shards
    )
    model = cases.remote(student, keras.optimizers.Adam(0.05))
    step, found, update = cases.step_of(model)
    return variables_lib.ServerState(found, update), model, step, update


def _train(step, model, first, last):
    states = [tf.zeros(v.shape, v.dtype) for v in model.metrics_variables]
    data = list(cases.batches())
    for index in range(first, last):
        step.train(
            data[index], step=tf.constant(index, tf.int64), metrics=states
        )


def _slots(update):
    rows = [
        np.concatenate([s.slots[name].numpy() for s in update.shards])
        for name in sorted(update.shards[0].slots)
    ]
    dense = [s[n].numpy() for s in update.dense_slots for n in sorted(s)]
    return rows + dense


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path):
    num_shards = 3  # Of two before.
    state, model, step, update = _state()
    _train(step, model, 0, 3)
    model.optimizer.learning_rate = 0.01
    state.write(tmp_path, state.snapshot())
    other, resumed, other_step, other_update = _state(num_shards)
    other.assign(other.read(tmp_path))
    assert len(other_update.shards) == num_shards
    cases.assert_same(_slots(other_update), _slots(update), rtol=0, atol=0)
    assert resumed.optimizer.learning_rate.numpy() == np.float32(0.01)
    _train(step, model, 3, 6)
    _train(other_step, resumed, 3, 6)
    for layer in ("table", "batch_normalization", "dense"):
        ours, theirs = (
            [
                layer_.get_weights()
                for layer_ in m.student.layers
                if layer_.name.startswith(layer)
            ][0]
            for m in (model, resumed)
        )
        if layer == "table":
            ours, theirs = [np.concatenate(ours)], [np.concatenate(theirs)]
        cases.assert_same(ours, theirs)
    cases.assert_same(_slots(other_update), _slots(update))
