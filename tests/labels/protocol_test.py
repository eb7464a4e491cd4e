"""Messages of TensorFlow Serving: written by hand, and read with care."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.cases import prediction_servers as server_cases
from tfdistill.labels import protocol


def test_a_question_is_what_protobuf_would_write():
    inputs = {
        "floats": np.arange(600, dtype=np.float32).reshape([2, 300]),
        "columns": np.arange(6).reshape([3, 2]).T,
        "flags": np.array([True, False]),
        "bytes": np.array([[b"a", b""], [b"\xff" * 200, b"c"]], object),
        "empty": np.zeros([2, 0, 3], np.float16),
        "no_rows": np.zeros([0, 4], np.int32),
    }
    found = protocol.question("large", inputs)
    assert found.model_spec.name == "large"
    assert found.model_spec.signature_name == "serving_default"
    assert set(found.inputs) == set(inputs)
    for name, values in inputs.items():
        expected = tf.make_tensor_proto(values)
        assert found.inputs[name].dtype == expected.dtype
        assert found.inputs[name].tensor_shape == expected.tensor_shape
        received = tf.make_ndarray(found.inputs[name])
        np.testing.assert_array_equal(received, values)


def test_a_tensor_that_claims_more_than_it_holds_is_refused():
    response = server_cases.response(outputs=np.zeros([1, 1], np.float32))
    claims = predict_pb2.PredictResponse.FromString(response)
    for dim in claims.outputs["outputs"].tensor_shape.dim:
        dim.size = 10**6
    spec = {"outputs": tf.TensorSpec([10**6, 10**6])}
    with pytest.raises(ValueError, match="must hold its values") as caught:
        protocol.read_answer(claims, spec)
    assert caught.value.kind == "malformed"
