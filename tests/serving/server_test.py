"""The small server of teachers, asked by a client of the protocol alone."""

import contextlib
import threading

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow_serving.apis import get_model_metadata_pb2
from tensorflow_serving.apis import predict_pb2
from tensorflow_serving.apis import prediction_service_pb2_grpc

from tests.cases import codistillation as cases
from tests.cases import prediction_servers as server_cases
from tests.cases import waits

_X, _ = cases.data(8)


@contextlib.contextmanager
def _stub(server):
    with grpc.insecure_channel(server.address) as channel:
        yield prediction_service_pb2_grpc.PredictionServiceStub(channel)


def _request(x=_X, *, name="inputs", **spec):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = spec.get("name", "default")
    request.model_spec.signature_name = spec.get("signature", "")
    if "version" in spec:
        request.model_spec.version.value = spec["version"]
    request.inputs[name].CopyFrom(tf.make_tensor_proto(x))
    return request


def test_a_bare_client_gets_predictions(exchange):
    model = cases.deep(5)
    with server_cases.serving(exchange, wait=False) as server:
        with _stub(server) as stub:
            with pytest.raises(grpc.RpcError) as caught:
                stub.Predict(_request(), timeout=60)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            _serve(exchange, server, model, 7)
            answer = stub.Predict(_request(version=7), timeout=60)
    assert answer.model_spec.version.value == 7
    np.testing.assert_allclose(
        tf.make_ndarray(answer.outputs["outputs"]), model(_X), rtol=1e-6
    )
    assert server.counts == {"requests": 1, "failed": 1}


def _serve(exchange, server, model, step, **options):
    """Publishes a version, and waits until it is served."""
    cases.publish(exchange, model, step=step, **options)
    waits.until(lambda: server.followed.version == step)


def _ask(server, x=_X):
    with _stub(server) as stub:
        answer = stub.Predict(_request(x), timeout=60)
    return tf.make_ndarray(answer.outputs["outputs"])


def test_versions_may_hold_their_weights_in_other_ways(exchange):
    """Their graphs have the same fingerprint, and other variables.

    The last one has another fingerprint, and the same variables.
    """
    kinds = [(kind, "tanh") for kind in (None, "int8", "int4", None)]
    kinds.append((None, "relu"))
    with server_cases.serving(exchange, wait=False) as server:
        for step, (kind, activation) in enumerate(kinds, start=1):
            model = cases.deep(step, activation)
            _serve(exchange, server, model, step, variables_dtype=kind)
            for variable in model.variables if kind else ():
                variable.assign(cases.rounded(variable, kind))
            np.testing.assert_allclose(_ask(server), model(_X), rtol=1e-5)


def test_a_bare_client_gets_the_signature(exchange):
    asked = get_model_metadata_pb2.GetModelMetadataRequest(
        metadata_field=["signature_def"]
    )
    asked.model_spec.name = "default"
    cases.publish(exchange, cases.deep(5), step=7)
    with server_cases.serving(exchange) as server, _stub(server) as stub:
        described = stub.GetModelMetadata(asked, timeout=60)
        asked.model_spec.version.value = 9
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModelMetadata(asked, timeout=60)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert described.model_spec.version.value == 7
    found = get_model_metadata_pb2.SignatureDefMap()
    assert described.metadata["signature_def"].Unpack(found)
    signature = found.signature_def["serving_default"]
    (taken,) = signature.inputs.items()
    (given,) = signature.outputs.items()
    for (name, tensor), wanted, width in (
        (taken, "inputs", _X.shape[1]),
        (given, "outputs", 3),
    ):
        assert name == wanted
        assert tensor.dtype == tf.float32.as_datatype_enum
        assert [dim.size for dim in tensor.tensor_shape.dim] == [-1, width]
    assert server.counts == {"requests": 1, "failed": 1}


def test_requests_that_cannot_be_answered_say_why(exchange):
    other = _request()
    other.model_spec.name = "other"
    large = _request(np.zeros([2**23, 4], "float32"))
    huge = _request()
    huge.inputs["inputs"].tensor_shape.dim[0].size = 10**9
    cases.publish(exchange, cases.linear(5), step=7)
    with server_cases.serving(exchange) as server, _stub(server) as stub:
        for request, code, text in (
            (_request(name="x"), "INVALID_ARGUMENT", "be ['inputs']"),
            (_request(_X[:, :2]), "INVALID_ARGUMENT", "(None, 4)"),
            (_request(signature="train"), "NOT_FOUND", "'train'"),
            (_request(version=9), "NOT_FOUND", "('default', 7,"),
            (other, "NOT_FOUND", "'other'"),
            (huge, "INVALID_ARGUMENT", "must contain all of its values"),
            (large, "RESOURCE_EXHAUSTED", "larger than max"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Predict(request, timeout=60)
            assert caught.value.code().name == code
            assert text in caught.value.details()
        assert stub.Predict(_request(), timeout=60).outputs
        assert server.counts["failed"] == 6


def test_inputs_of_different_numbers_of_rows_are_refused(exchange):
    inputs = {name: keras.Input((2,), name=name) for name in ("a", "b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    model = keras.Model(inputs, keras.layers.Dense(3)(joined))
    spec = {name: cases.input_spec(2) for name in inputs}
    cases.publish(exchange, model, spec=spec)
    with server_cases.serving(exchange) as server, _stub(server) as stub:
        request = _request(np.ones([4, 2], "float32"), name="a")
        values = tf.make_tensor_proto(np.ones([3, 2], "float32"))
        request.inputs["b"].CopyFrom(values)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Predict(request, timeout=60)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "same number of rows" in caught.value.details()


@pytest.mark.slow("asks for answers while versions are swapped")
def test_versions_are_swapped_without_a_failed_or_mixed_answer(exchange):
    models = {step: cases.deep(step) for step in (10, 20, 30, 40)}
    expected = {step: m(_X).numpy() for step, m in models.items()}
    cases.publish(exchange, models[10], step=10)
    seen, stop = ([], [], []), threading.Event()

    def ask(server, answers):
        with _stub(server) as stub:
            while not stop.is_set():
                try:
                    answers.append(stub.Predict(_request(), timeout=60))
                except grpc.RpcError as error:
                    answers.append(error)

    with server_cases.serving(exchange) as server:
        threads = [
            threading.Thread(target=ask, args=(server, answers))
            for answers in seen
        ]
        for thread in threads:
            thread.start()
        try:
            for step in (20, 30, 40):
                _serve(exchange, server, models[step], step)
        finally:
            count = len(seen[0])
            waits.until(lambda: len(seen[0]) > count + 1)
            stop.set()
            for thread in threads:
                thread.join()
    for answers in seen:
        found = [answer.model_spec.version.value for answer in answers]
        assert found == sorted(found) and found[-1] == 40
        for step, answer in zip(found, answers, strict=True):
            np.testing.assert_allclose(
                tf.make_ndarray(answer.outputs["outputs"]),
                expected[step],
                rtol=1e-5,
            )


def test_a_version_that_fails_its_checks_is_never_served(exchange):
    lost = cases.linear(7)
    lost.set_weights([np.full_like(w, np.nan) for w in lost.get_weights()])
    with server_cases.serving(exchange, wait=False) as server:
        _serve(exchange, server, cases.linear(5), 10)
        for number, (step, bad) in enumerate(
            [(30, cases.linear(4, classes=5)), (40, lost)]
        ):
            cases.publish(exchange, bad, step=step, finite=False)
            waits.until(lambda n=number: server.followed.num_refused > n)
            assert server.followed.version == 10
        _serve(exchange, server, cases.linear(6), 50)
