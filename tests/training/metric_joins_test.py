"""How states of metrics join, by what a graph makes of them."""

import inspect

import keras
import pytest
import tensorflow as tf

from tfdistill.training import metric_joins

ops = keras.ops


def _join(update):
    """Of one state, by an update that a graph has of it and a batch."""
    graph = tf.Graph()
    with graph.as_default():
        before = tf.compat.v1.placeholder(tf.float32, [2])
        batch = tf.compat.v1.placeholder(tf.float32, [None, 2])
        after = tf.convert_to_tensor(update(before, batch))
        return metric_joins.of_values(before, after)


def _by_hand(v, x):
    """Counts in a row of a state."""
    return ops.scatter_update(v, [[0]], v[:1] + ops.sum(x))


@pytest.mark.parametrize(
    ("update", "join"),
    [
        (lambda v, x: v + ops.sum(x, 0), "sum"),
        (lambda v, x: ops.sum(x, 0) + v + ops.max(x), "sum"),
        (lambda v, x: v - ops.sum(x, 0), "sum"),
        (lambda v, x: ops.cast(ops.cast(v, "float64") + 1.0, "float32"), "sum"),
        (lambda v, x: tf.tensor_scatter_nd_add(v, [[0]], x[:1, 0]), "sum"),
        (lambda v, x: ops.maximum(v, ops.max(x, 0)), "max"),
        (lambda v, x: ops.maximum(ops.maximum(x[0], v), v), "max"),
        (lambda v, x: ops.where(x[0] > 1, ops.minimum(v, x[0]), v), "min"),
        (lambda v, x: v, None),
        (lambda v, x: x[0] - v, "other"),
        (lambda v, x: v + ops.maximum(v, x[0]), "other"),
        (lambda v, x: ops.where(x[0] > v, v + x[0], v), "other"),
        (lambda v, x: ops.maximum(v, x[0]) + 1, "other"),
        (lambda v, x: 0.9 * v + 0.1 * x[0], "other"),
        (lambda v, x: x[0], "other"),
        (_by_hand, "other"),
    ],
)
def test_a_state_joins_as_it_is_updated(update, join):
    assert _join(update) == join


def _metrics():
    """Each metric of Keras, as it is."""
    known = {"num_classes": 2, "target_class_ids": [1], "name": "own"}
    known |= {"precision": 0.5, "recall": 0.5}
    known |= {"sensitivity": 0.5, "specificity": 0.5, "normalizer": [1, 1]}
    for name, kind in inspect.getmembers(keras.metrics, inspect.isclass):
        if kind in (keras.metrics.Metric, keras.metrics.MeanMetricWrapper):
            continue
        needed = inspect.signature(kind).parameters
        given = {
            name: value
            for name, value in known.items()
            if name in needed
            and needed[name].default is inspect.Parameter.empty
        }
        yield pytest.param(kind, given, id=name)


@pytest.mark.parametrize(("kind", "given"), list(_metrics()))
def test_all_metrics_of_keras_add_up(kind, given):
    metric = kind(**given)
    labels = tf.constant([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    if "Sparse" in kind.__name__ or kind is keras.metrics.MeanIoU:
        labels = labels[:, 0]
    outputs = tf.constant([[0.1, 0.9], [0.4, 0.6], [0.3, 0.7]])
    if kind is keras.metrics.MeanIoU:
        outputs = labels
    is_of_values = type(metric) in (keras.metrics.Sum, keras.metrics.Mean)
    values = [outputs] if is_of_values else [labels, outputs]
    metric.update_state(*values)  # Makes its variables.
    update = tf.function(metric.update_state, autograph=False)
    graph = update.get_concrete_function(*values).graph
    handles = [variable.value.handle for variable in metric.variables]
    joins = metric_joins.of_variables(graph, handles)
    assert set(joins) <= {"sum", None}
    assert "sum" in joins
