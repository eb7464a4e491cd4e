"""TensorFlow Serving's PredictionService: what is asked, and what is answered.

An answer comes from another machine. Everything in it is compared with what
the model's signature says before it is made an array.
"""

import dataclasses
import math
import types
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

SERVICE = "tensorflow.serving.PredictionService"
SIGNATURE = "serving_default"
_METADATA = "signature_def"
# Of one message, either way: what is larger is refused before it is read.
MAX_BYTES = 512 * 1024 * 1024
# Options of gRPC. Without the last one, two servers may share a port.
CLIENT_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_BYTES),
    ("grpc.max_send_message_length", MAX_BYTES),
)
SERVER_OPTIONS = (*CLIENT_OPTIONS, ("grpc.so_reuseport", 0))
# Kinds of refused answers that a message itself can be.
MALFORMED, OUTPUTS, DTYPE, SHAPE, NOT_FINITE, VERSION = (
    *("malformed", "outputs", "dtype", "shape", "not_finite", "version"),
)

Specs = Mapping[str, tf.TensorSpec]


class BadAnswerError(ValueError):
    """An answer that must not be used: of what kind, and why."""

    def __init__(self, kind: str, reason: str) -> None:
        """`kind` is what it is counted as."""
        super().__init__(reason)
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """What a model takes and returns, by name; the batch dimension is None."""

    inputs: Specs
    outputs: Specs


def messages() -> types.SimpleNamespace:
    """Imports TensorFlow Serving's messages; ImportError names the extra."""
    try:
        from tensorflow_serving.apis import get_model_metadata_pb2
        from tensorflow_serving.apis import predict_pb2
    except ImportError as error:
        raise ImportError(
            "Labels from servers need the package tensorflow-serving-api, "
            f"which cannot be imported ({error}): pip install "
            "'tfdistill[labels]'."
        ) from error
    return types.SimpleNamespace(
        PredictRequest=predict_pb2.PredictRequest,
        PredictResponse=predict_pb2.PredictResponse,
        MetadataRequest=get_model_metadata_pb2.GetModelMetadataRequest,
        MetadataResponse=get_model_metadata_pb2.GetModelMetadataResponse,
        SignatureDefMap=get_model_metadata_pb2.SignatureDefMap,
    )


# ---- asking ----


def question(model: str, inputs: Mapping[str, np.ndarray]) -> bytes:
    """Returns a PredictRequest to a model about a batch."""
    request = messages().PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = SIGNATURE
    for name, values in inputs.items():
        proto = request.inputs[name]
        dtype = tf.as_dtype(values.dtype)
        if dtype == tf.string:
            proto.CopyFrom(tf.make_tensor_proto(values))
            continue
        # In half the time of `make_tensor_proto` and a copy of it.
        proto.dtype = dtype.as_datatype_enum
        proto.tensor_shape.CopyFrom(tf.TensorShape(values.shape).as_proto())
        proto.tensor_content = values.tobytes()
    return bytes(request.SerializeToString())


def metadata_question(model: str) -> bytes:
    """Returns a GetModelMetadataRequest about a model's signatures."""
    request = messages().MetadataRequest(metadata_field=[_METADATA])
    request.model_spec.name = model
    return bytes(request.SerializeToString())


def read_signature(content: bytes) -> Signature:
    """Reads a GetModelMetadataResponse; BadAnswerError if it is none."""
    response = parsed(messages().MetadataResponse, content)
    found = messages().SignatureDefMap()
    try:
        unpacked = response.metadata[_METADATA].Unpack(found)
    except Exception as error:  # protobuf's DecodeError has no public home.
        raise BadAnswerError(MALFORMED, str(error)) from error
    if not unpacked or SIGNATURE not in found.signature_def:
        raise BadAnswerError(
            MALFORMED,
            f"the model must have the signature {SIGNATURE!r}; it has "
            f"{sorted(found.signature_def)}.",
        )
    signature = found.signature_def[SIGNATURE]
    return Signature(
        inputs=_specs(signature.inputs), outputs=_specs(signature.outputs)
    )


def _specs(infos: Any) -> Specs:
    try:
        return {
            name: tf.TensorSpec(
                tf.TensorShape(info.tensor_shape), tf.as_dtype(info.dtype)
            )
            for name, info in infos.items()
        }
    except (TypeError, ValueError) as error:
        raise BadAnswerError(MALFORMED, str(error)) from error


def read_answer(
    content: bytes, expected: Mapping[str, tuple[Sequence[int], tf.DType]]
) -> tuple[int, list[np.ndarray]]:
    """Reads a PredictResponse: the version, and outputs in float32.

    `expected` are shape and dtype by name, in the order of what is returned.
    BadAnswerError for anything else.
    """
    response = parsed(messages().PredictResponse, content)
    spec = response.model_spec
    if not spec.HasField("version") or spec.version.value < 0:
        raise BadAnswerError(
            VERSION, "it must name the version that answered, >= 0."
        )
    if set(response.outputs) != set(expected):
        raise BadAnswerError(
            OUTPUTS,
            f"its outputs must be {sorted(expected)}; received "
            f"{sorted(response.outputs)[:5]}.",
        )
    outputs = []
    for name, (shape, dtype) in expected.items():
        proto = response.outputs[name]
        if proto.dtype != dtype.as_datatype_enum:
            raise BadAnswerError(
                DTYPE,
                f"its output {name!r} must be {dtype.name}; received the "
                f"dtype number {proto.dtype}.",
            )
        values = array(proto, shape)
        values = values.astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise BadAnswerError(
                NOT_FINITE,
                f"its output {name!r} must be finite; received NaN or "
                "infinity.",
            )
        outputs.append(values)
    return int(spec.version.value), outputs


def array(proto: Any, shape: Sequence[int | None]) -> np.ndarray:
    """Makes an array of a tensor that came in a message.

    BadAnswerError unless it has the shape, in which None stands for any size,
    and holds as many values: `make_ndarray` would repeat the last one.
    """
    sizes = [dim.size for dim in proto.tensor_shape.dim]
    fits = len(sizes) == len(shape) and all(
        size == wanted if wanted is not None else size >= 0
        for size, wanted in zip(sizes, shape, strict=True)
    )
    if not fits:
        raise BadAnswerError(
            SHAPE, f"its shape must be {list(shape)}; received {sizes}."
        )
    dtype, content = tf.as_dtype(proto.dtype), proto.tensor_content
    if content:
        # Strings, which have no size, are never there.
        held = len(content) / dtype.size if dtype.size else -1.0
    else:
        held = sum(
            len(values)
            for field, values in proto.ListFields()
            if field.name.endswith("_val")
        )
    if held != math.prod(sizes):
        raise BadAnswerError(
            MALFORMED, f"a tensor of the shape {sizes} must hold its values."
        )
    if content:
        # A view, where `make_ndarray` would copy.
        return np.frombuffer(content, dtype.as_numpy_dtype).reshape(sizes)
    return np.asarray(tf.make_ndarray(proto))


def parsed(kind: Any, content: bytes) -> Any:
    """Returns a message of this kind; BadAnswerError if the bytes are none."""
    try:
        return kind.FromString(content)
    except Exception as error:  # protobuf's DecodeError has no public home.
        raise BadAnswerError(
            MALFORMED, f"it must be a {kind.__name__}: {error}"
        ) from error


# ---- answering ----


def metadata(model: str, version: int, signature: Signature) -> Any:
    """Returns the GetModelMetadataResponse that describes a model."""
    found = messages().SignatureDefMap()
    described = found.signature_def[SIGNATURE]
    described.method_name = "tensorflow/serving/predict"
    for infos, specs in (
        (described.inputs, signature.inputs),
        (described.outputs, signature.outputs),
    ):
        for name, spec in specs.items():
            infos[name].name = f"{name}:0"
            infos[name].dtype = spec.dtype.as_datatype_enum
            infos[name].tensor_shape.CopyFrom(spec.shape.as_proto())
    response = messages().MetadataResponse()
    response.model_spec.name = model
    response.model_spec.version.value = version
    response.metadata[_METADATA].Pack(found)
    return response


def answer(model: str, version: int, outputs: Mapping[str, Any]) -> Any:
    """Returns the PredictResponse of a version."""
    response = messages().PredictResponse()
    response.model_spec.name = model
    response.model_spec.version.value = version
    response.model_spec.signature_name = SIGNATURE
    for name, tensor in outputs.items():
        response.outputs[name].CopyFrom(tf.make_tensor_proto(tensor))
    return response
