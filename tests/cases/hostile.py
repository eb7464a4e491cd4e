"""SavedModels that must never be loaded, made when a test asks for one."""

import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

_SPEC = tf.TensorSpec([None, 4], tf.float32, name="inputs")


class _Module(tf.Module):
    def __init__(self, body: Callable[[tf.Tensor], Any]) -> None:
        super().__init__()
        kernel = tf.Variable(tf.ones([4, 3]), trainable=False)
        self.model_variables = [kernel]

        @tf.function(input_signature=[_SPEC], autograph=False)
        def serve(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
            extra = body(inputs)
            outputs = inputs @ kernel
            if isinstance(extra, tf.Tensor):
                outputs += tf.cast(extra, tf.float32)
            return {"outputs": outputs}

        self.serve = serve


class _Resource(tf.saved_model.experimental.TrackableResource):
    """A table whose initialiser does something else."""

    def __init__(self, body: Callable[[Any], None]) -> None:
        super().__init__()
        self._body = body

    def _create_resource(self) -> Any:
        return tf.raw_ops.HashTableV2(
            key_dtype=tf.string, value_dtype=tf.int64, shared_name="hostile"
        )

    def _initialize(self) -> None:
        self._body(self.resource_handle)

    def _destroy_resource(self) -> None:
        pass


def save(directory: pathlib.Path, body: Callable[[tf.Tensor], Any]) -> None:
    """A SavedModel whose signature runs `body` besides a linear layer."""
    module = _Module(body)
    tf.saved_model.save(module, str(directory), signatures=module.serve)


def edit(directory: pathlib.Path, change: Callable[[Any], None]) -> None:
    path = directory / "saved_model.pb"
    model = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    change(model)
    path.write_bytes(model.SerializeToString())


def functions(model: Any) -> Any:
    return model.meta_graphs[0].graph_def.library.function


def _nested(inner: Callable[[], Any], depth: int = 3) -> Callable[[], Any]:
    for _ in range(depth):
        inner = tf.function(inner, autograph=False)
    return inner


def _branch(inner: Callable[[], Any]) -> Callable[[tf.Tensor], Any]:
    def body(inputs: tf.Tensor) -> Any:
        return tf.switch_case(
            tf.size(inputs), [lambda: tf.constant(1.0), inner]
        )

    return body


def bodies(path: str) -> dict[str, Callable[[tf.Tensor], Any]]:
    raw = tf.raw_ops

    def write() -> tf.Tensor:
        raw.WriteFile(filename=path, contents="x")
        return tf.constant(0.0)

    return {
        "WriteFile": lambda x: write(),
        "WriteFile nested": lambda x: _nested(write)(),
        "WriteFile in a branch": _branch(write),
        "SaveV2": lambda x: raw.SaveV2(
            prefix=path, tensor_names=["x"], shape_and_slices=[""], tensors=[x]
        ),
        "RestoreV2": lambda x: raw.RestoreV2(
            prefix=path,
            tensor_names=["x"],
            shape_and_slices=[""],
            dtypes=[tf.float32],
        )[0],
        "VarHandleOp": lambda x: raw.ReadVariableOp(
            resource=raw.VarHandleOp(
                dtype=tf.float32, shape=[], shared_name="another"
            ),
            dtype=tf.float32,
        ),
    }


def with_resource(directory: pathlib.Path, body: Callable[[Any], Any]) -> None:
    """A SavedModel with a table that `body` initialises from its handle."""
    module = _Module(lambda inputs: None)
    module.table = _Resource(body)
    tf.saved_model.save(module, str(directory), signatures=module.serve)


def with_unused_function(directory: pathlib.Path, path: str) -> None:
    """A SavedModel with one more function, which nothing calls."""
    module = _Module(lambda inputs: None)
    module.other = tf.function(
        lambda: [tf.io.write_file(path, "x")] and 0, input_signature=[]
    )
    tf.saved_model.save(module, str(directory), signatures=module.serve)


def copy_from(source: pathlib.Path) -> Callable[[str], None]:
    """What `Exchange.publish` calls to publish a directory as it is."""
    return lambda to: shutil.copytree(source, to, dirs_exist_ok=True) and None
