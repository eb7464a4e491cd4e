"""Variables of a worker; here every function runs on the one there is."""

import numpy as np
import pytest
import tensorflow as tf

from tfdistill import worker_variable


def _adder(variable):
    @tf.function
    def add(value):
        with worker_variable.opened([variable]):
            variable.assign(variable.value() + value)
            return variable.value()

    return add


def test_it_keeps_its_value_from_call_to_call_and_function_to_function():
    variable = worker_variable.WorkerVariable(np.float32([1, 2]), name="one")
    assert (variable.dtype, variable.shape) == (tf.float32, [2])
    first, second = _adder(variable), _adder(variable)
    np.testing.assert_array_equal(first([10.0, 20.0]), [11, 22])
    np.testing.assert_array_equal(second([1.0, 1.0]), [12, 23])
    np.testing.assert_array_equal(first([0.0, 0.0]), [12, 23])


def test_variables_of_one_name_are_two():
    one, other = (
        worker_variable.WorkerVariable(np.float32(0), name="same")
        for _ in range(2)
    )
    _adder(one)(5.0)
    assert _adder(other)(1.0).numpy() == 1
    assert _adder(one)(0.0).numpy() == 5


def test_reads_and_writes_keep_their_order():
    variable = worker_variable.WorkerVariable(np.int64(3), name="ordered")

    @tf.function
    def run():
        with worker_variable.opened([variable]):
            found = [variable.value()]
            for value in (5, 7):
                variable.assign(value)
                found.append(variable.value())
            tf.cond(
                found[1] > 0,
                lambda: (variable.assign(9), tf.constant(0))[1],
                lambda: tf.constant(0),
            )
            return [*found, variable.value()]

    assert [value.numpy() for value in run()] == [3, 5, 7, 9]
    assert run()[0].numpy() == 9


def test_it_converts_to_a_tensor_and_casts_what_it_is_given():
    variable = worker_variable.WorkerVariable(np.int64([1, 2]), name="cast")

    @tf.function
    def run():
        with worker_variable.opened([variable]):
            variable.assign(tf.constant([3, 4], tf.int32))
            plain = tf.convert_to_tensor(variable)
            return plain, tf.convert_to_tensor(variable, tf.float32)

    plain, cast = run()
    assert (plain.dtype, cast.dtype) == (tf.int64, tf.float32)
    np.testing.assert_array_equal(
        [plain, tf.cast(cast, tf.int64)], [[3, 4]] * 2
    )


@pytest.mark.parametrize("use", ["value", "assign", "convert"])
def test_it_is_used_only_where_it_was_opened(use):
    variable = worker_variable.WorkerVariable(np.float32(0), name="closed")
    _adder(variable)(1.0)
    uses = {
        "value": variable.value,
        "assign": lambda: variable.assign(1.0),
        "convert": lambda: tf.convert_to_tensor(variable),
    }
    with pytest.raises(RuntimeError, match="tfdistill/closed/.*opened"):
        uses[use]()


def test_a_trace_inside_of_another_gives_the_outer_handle_back():
    variable = worker_variable.WorkerVariable(np.float32(2), name="nested")

    @tf.function
    def outer():
        with worker_variable.opened([variable]):
            inner = _adder(variable).get_concrete_function(
                tf.TensorSpec([], tf.float32)
            )
            del inner
            return variable.value()

    assert outer().numpy() == 2


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
