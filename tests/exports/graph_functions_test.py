""""""

import pytest
import tensorflow as tf

from tests.cases import hostile as hostile_cases
from tfdistill.exports import graph_check
from tfdistill.exports import graph_functions


def _check(directory):
    graph_check.check((directory / "saved_model.pb").read_bytes())


@pytest.mark.parametrize("name", hostile_cases.ENDLESS)
def test_a_loop_that_need_not_end_is_refused(tmp_path, name):
    hostile_cases.save(tmp_path, hostile_cases.endless(name))
    with pytest.raises(graph_check.GraphError, match="its loops? "):
        _check(tmp_path)


def _up_to_a_size(x):
    return tf.while_loop(
        lambda i, n: i < n, lambda i, n: [i + 1, n], [0, tf.shape(x)[0]]
    )[0]


def _up_to_the_larger_size(x):
    n = tf.maximum(tf.shape(x)[0], tf.reduce_max(tf.shape(x)))
    return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]


def _up_to_an_argument(x):
    @tf.function(autograph=False)
    def run(n):
        return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

    return run(tf.shape(x)[0]) + run(tf.constant(5))


def _at_most(x):
    return tf.while_loop(
        lambda y: tf.reduce_sum(y) > 0.1,
        lambda y: [y / 2],
        [x[:, :1]],
        maximum_iterations=50,
    )[0]


@pytest.mark.parametrize(
    "body",
    [_up_to_a_size, _up_to_the_larger_size, _up_to_an_argument, _at_most],
)
def test_a_loop_that_ends_passes(tmp_path, body):
    hostile_cases.save(tmp_path, body)
    _check(tmp_path)


def test_an_argument_is_followed_to_each_caller(tmp_path):
    @tf.function(autograph=False)
    def run(n):
        return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

    far = tf.constant(graph_functions.MAX_STEPS + 1)
    hostile_cases.save(tmp_path, lambda x: run(tf.shape(x)[0]) + run(far))
    with pytest.raises(graph_check.GraphError, match="its loop"):
        _check(tmp_path)


def test_a_maze_of_sizes_is_found_out_of_quickly(tmp_path):
    """Without a memory, each level would double the work."""

    def body(x):
        n = tf.shape(x)[0]
        for _ in range(60):
            n = tf.maximum(n, n)
        return tf.while_loop(lambda i: i < n, lambda i: [i + 1], [0])[0]

    hostile_cases.save(tmp_path, body)
    _check(tmp_path)


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
