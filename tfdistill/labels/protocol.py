"""TensorFlow Serving's PredictionService: what is asked, and what is answered.

An answer comes from another machine. Everything in it is compared with what
is expected before it is made an array.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import get_model_metadata_pb2
from tensorflow_serving.apis import predict_pb2
from tensorflow_serving.apis import prediction_service_pb2_grpc as service

from tfdistill.system import untrusted

SIGNATURE = "serving_default"
# Larger questions and answers are refused before they are read. A server has
# one question in memory, and needs nine times its size for it.
MAX_QUESTION_BYTES, MAX_BYTES = 2**27, 2**29
# Options of gRPC. Without the last two, two servers may share a port, and a
# server reads ahead of requests that wait: one is in memory, and 64 KiB of each
# of the others.
CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
)
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_QUESTION_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
)
# What servers derive from and register by, and what clients call.
Servicer = service.PredictionServiceServicer
register = service.add_PredictionServiceServicer_to_server
Stub = service.PredictionServiceStub

Specs = Mapping[str, tf.TensorSpec]


# ---- asking ----


def question(model: str, inputs: Mapping[str, np.ndarray]) -> Any:
    """Returns a PredictRequest to a model about a batch."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = SIGNATURE
    for name, values in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
    return request


def read_answer(response: Any, specs: Specs) -> tuple[int, list[np.ndarray]]:
    """Reads a PredictResponse: the version, and outputs in float32.

    Outputs come in the order of `specs`. BadMessageError unless they fit.
    """
    spec = response.model_spec
    if not spec.HasField("version") or spec.version.value < 0:
        raise untrusted.BadMessageError(
            "version", "it must name the version that answered, >= 0."
        )
    outputs = []
    for name, values in arrays(response.outputs, specs).items():
        outputs.append(values.astype(np.float32, copy=False))
        if not np.isfinite(outputs[-1]).all():
            raise untrusted.BadMessageError(
                "not_finite",
                f"its output {name!r} must be finite; received NaN or "
                "infinity.",
            )
    return int(spec.version.value), outputs


def arrays(protos: Mapping[str, Any], specs: Specs) -> dict[str, np.ndarray]:
    """Makes arrays of a message's tensors; BadMessageError unless they fit.

    Each must hold as many values as it says: `make_ndarray` would repeat the
    last one.
    """
    if set(protos) != set(specs):
        raise untrusted.BadMessageError(
            "outputs",
            f"its tensors must be {sorted(specs)}; received "
            f"{sorted(protos)[:5]}.",
        )
    return {name: _array(protos[name], name, s) for name, s in specs.items()}


def _array(proto: Any, name: str, spec: tf.TensorSpec) -> np.ndarray:
    if proto.dtype != spec.dtype.as_datatype_enum:
        raise untrusted.BadMessageError(
            "dtype",
            f"{name!r} must be {spec.dtype.name}; received the dtype number "
            f"{proto.dtype}.",
        )
    sizes = [dim.size for dim in proto.tensor_shape.dim]
    if min(sizes, default=0) < 0 or not spec.shape.is_compatible_with(sizes):
        raise untrusted.BadMessageError(
            "shape",
            f"the shape of {name!r} must be {spec.shape}; received {sizes}.",
        )
    if content := proto.tensor_content:
        # Strings, which have no size, are never there.
        held = len(content) / (spec.dtype.size or math.nan)
    else:
        fields = proto.ListFields()
        held = sum(len(v) for f, v in fields if f.name.endswith("_val"))
    if held != math.prod(sizes):
        raise untrusted.BadMessageError(
            "malformed",
            f"{name!r} must contain all of its values, as many as its shape "
            f"{sizes} has.",
        )
    return np.asarray(tf.make_ndarray(proto))


# ---- answering ----


def metadata(model: str, version: int, inputs: Specs, outputs: Specs) -> Any:
    """Returns the GetModelMetadataResponse that says what a model takes."""
    found = get_model_metadata_pb2.SignatureDefMap()
    signature = found.signature_def[SIGNATURE]
    signature.method_name = "tensorflow/serving/predict"
    for said, specs in (
        (signature.inputs, inputs),
        (signature.outputs, outputs),
    ):
        for name, spec in specs.items():
            said[name].name = f"{name}:0"
            said[name].dtype = spec.dtype.as_datatype_enum
            said[name].tensor_shape.CopyFrom(spec.shape.as_proto())
    response = get_model_metadata_pb2.GetModelMetadataResponse()
    response.model_spec.name = model
    response.model_spec.version.value = version
    response.metadata["signature_def"].Pack(found)
    return response


def answer(model: str, version: int, outputs: Mapping[str, Any]) -> Any:
    """Returns the PredictResponse of a version."""
    response = predict_pb2.PredictResponse()
    response.model_spec.name = model
    response.model_spec.version.value = version
    response.model_spec.signature_name = SIGNATURE
    for name, tensor in outputs.items():
        response.outputs[name].CopyFrom(tf.make_tensor_proto(tensor))
    return response
