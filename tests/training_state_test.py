"""What a training changes, written whole and read into other shards."""

import keras
import numpy as np
import parameter_server_cases as cases
import pytest
import tensorflow as tf

from tfdistill import training_state


def _state(num_shards=None, **kwargs):
    student = cases.student(keras.layers.BatchNormalization())
    if num_shards:
        config = student.get_layer("table").get_config()
        assert config["num_shards"] == 2
        student = keras.models.clone_model(
            student,
            clone_function=lambda layer: type(layer).from_config(
                {**layer.get_config(), "num_shards": num_shards}
                if layer.name == "table"
                else layer.get_config()
            ),
        )
    model = cases.remote(student, keras.optimizers.Adam(0.05), **kwargs)
    step, found, update = cases.step_of(model)
    return training_state.TrainingState(found, update), model, step, update


def _train(step, model, first, last):
    states = [tf.zeros(v.shape, v.dtype) for v in model.metrics_variables]
    data = list(cases.batches())
    for index in range(first, last):
        step.train(
            data[index],
            step=tf.constant(index, tf.int64),
            metrics=states,
        )


def _slots(update):
    rows = [
        np.concatenate([s[name].numpy() for s in update.shard_slots])
        for name in sorted(update.shard_slots[0])
    ]
    dense = [s[n].numpy() for s in update.dense_slots for n in sorted(s)]
    return rows + dense


@pytest.mark.parametrize("num_shards", [2, 3])
def test_training_goes_on_as_if_it_had_never_stopped(tmp_path, num_shards):
    state, model, step, update = _state()
    _train(step, model, 0, 3)
    model.optimizer.learning_rate = 0.01
    state.write(f"{tmp_path}/state")
    other, resumed, other_step, other_update = _state(num_shards)
    other.read(f"{tmp_path}/state")
    assert len(other_update.shard_slots) == num_shards
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


def test_specs_name_whole_tables_whatever_the_shards(tmp_path):
    state, *_ = _state()
    assert state.specs() == _state(3)[0].specs()
    state.write(f"{tmp_path}/state")
    reader = tf.train.load_checkpoint(f"{tmp_path}/state")
    shapes, dtypes = (
        reader.get_variable_to_shape_map(),
        reader.get_variable_to_dtype_map(),
    )
    assert state.specs() == {
        key: {"shape": shapes[key], "dtype": dtypes[key].name} for key in shapes
    }
    assert shapes["table/0"] == [sum(cases.SIZES), cases.DIM]
    assert {"others/0", "optimizer/0", "trainable/0"} <= shapes.keys()
    assert sum(key.startswith("table/0/") for key in shapes) == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
