"""Students with sharded tables: exported, loaded, and as teachers."""

import codistillation_cases
import embedding_cases as cases
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdistill
from tfdistill import logical_table
from tfdistill import savedmodel
from tfdistill import student_graph

SPEC = tf.TensorSpec([None, len(cases.FIELDS)], tf.int32)


def _graph(model):
    return student_graph.StudentGraph(model, SPEC)


def _trained(num_shards, seed=0):
    model = cases.model(num_shards=num_shards)
    codistillation_cases.randomize(model, seed)
    return model


def test_the_shards_are_one_variable_in_stored_order():
    model = _trained(3)
    table, kernel, bias = logical_table.variables_of(model)
    assert isinstance(table, logical_table.LogicalTable)
    assert table.shape.as_list() == [sum(cases.FIELDS), cases.DIM]
    assert tf.as_dtype(table.dtype) == tf.float32
    assert table.path == "table/table"
    layer = model.get_layer("table")
    np.testing.assert_array_equal(table.value, cases.table(layer))
    assert [kernel, bias] == model.layers[-1].variables


def test_other_variables_stay_as_they_are():
    model = codistillation_cases.deep()
    found = logical_table.variables_of(model)
    assert all(a is b for a, b in zip(found, model.variables, strict=True))


def test_graphs_do_not_depend_on_the_shards(two_replicas):
    one, three = _graph(_trained(1, seed=1)), _graph(_trained(3, seed=2))
    assert three.fingerprint == one.fingerprint
    with two_replicas.scope():
        assert _graph(_trained(2)).fingerprint == one.fingerprint
    x, _ = cases.data()
    values = [v.value for v in three.variables]
    expected = _trained(3, seed=2)(x)
    np.testing.assert_allclose(one(values, x), expected, rtol=1e-6)
    np.testing.assert_allclose(three(values, x), expected, rtol=1e-6)


def test_graphs_do_not_depend_on_the_layer_s_name():
    def named(name):
        inputs = keras.Input((2,), dtype="int32")
        table = tfdistill.ShardedEmbedding([4, 5], 2, name=name)
        return keras.Model(inputs, table(inputs))

    spec = tf.TensorSpec([None, 2], tf.int32)
    one, other = (
        student_graph.StudentGraph(named(name), spec) for name in ("a", "bc")
    )
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize("num_shards", [1, 3])
def test_an_export_predicts_as_the_student_does(tmp_path, num_shards):
    model = _trained(num_shards)
    writer = savedmodel.SavedModelWriter(_graph(model))
    x, _ = cases.data()
    writer.write(str(tmp_path), writer.snapshot())
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(loaded.serve(x), model(x), rtol=1e-6)
    assert [v.shape.as_list() for v in loaded.model_variables] == [
        [26, 4],
        [24, 1],
        [1],
    ]


def test_a_snapshot_does_not_follow_the_training():
    model = cases.model(num_shards=2)
    writer = savedmodel.SavedModelWriter(_graph(model))
    snapshot = [value.numpy().copy() for value in writer.snapshot()]
    held = writer.snapshot()
    student = tfdistill.CodistillModel(model)
    student.compile(keras.optimizers.Adagrad(0.5), "mse")
    student.fit(*cases.data(), verbose=0)
    for value, before in zip(held, snapshot, strict=True):
        np.testing.assert_array_equal(value, before)
    assert (writer.snapshot()[0].numpy() != snapshot[0]).any()


def _codistill(student, exchange, peers=(1,)):
    model = tfdistill.CodistillModel(
        student, teachers=codistillation_cases.teacher_set(exchange, peers)
    )
    model.compile(
        keras.optimizers.Adagrad(0.1),
        "mse",
        distillation_loss=tfdistill.losses.LogitsMeanSquaredError(
            from_logits=True
        ),
    )
    return model


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_peer_s_table_teaches(tmp_path, replicas, two_replicas):
    exchange = tfdistill.Exchange(str(tmp_path))
    peer = _trained(3, seed=1)
    codistillation_cases.publish(exchange, peer, spec=SPEC)
    strategy = tf.distribute.get_strategy()
    if replicas == 2:
        strategy = two_replicas
    with strategy.scope():
        model = _codistill(_trained(2), exchange)
    x, y = cases.data()
    codistillation_cases.prepare(model, x, y)
    codistillation_cases.load(model, 10)
    assert model.teachers.status()[0]["quarantined"] == {}
    expected = np.mean((peer(x) - model.student(x)) ** 2)
    logs = codistillation_cases.fit(model, x, y, batch_size=len(x))
    np.testing.assert_allclose(logs["distillation_loss"], [expected], rtol=1e-5)
    model.teachers.stop()


def test_two_students_with_tables_learn_from_each_other(tmp_path):
    exchange = tfdistill.Exchange(str(tmp_path))
    x, y = cases.data()
    losses = []
    for group in (0, 1):
        student = _trained(group + 1, seed=group)
        model = _codistill(student, exchange, peers=[1 - group])
        if group == 1:
            codistillation_cases.prepare(model, x, y)
            codistillation_cases.load(model, 3)
        logs = codistillation_cases.fit(model, x, y, epochs=4, batch_size=9)
        losses.append(logs["distillation_loss"])
        codistillation_cases.publish(
            exchange, student, group=group, step=3, spec=SPEC
        )
        model.teachers.stop()
    assert losses[0] == [0.0] * 4
    assert losses[1][-1] < losses[1][0]


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
