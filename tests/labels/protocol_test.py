"""Messages of TensorFlow Serving: read with care."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import predict_pb2

from tests.cases import prediction_servers as server_cases
from tfdistill.labels import protocol


def test_a_tensor_that_claims_more_than_it_holds_is_refused():
    response = server_cases.response(outputs=np.zeros([1, 1], np.float32))
    claims = predict_pb2.PredictResponse.FromString(response)
    for dim in claims.outputs["outputs"].tensor_shape.dim:
        dim.size = 10**6
    spec = {"outputs": tf.TensorSpec([10**6, 10**6])}
    with pytest.raises(
        ValueError, match="must contain all of its values"
    ) as caught:
        protocol.read_answer(claims, spec)
    assert caught.value.kind == "malformed"
