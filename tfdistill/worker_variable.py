"""Variables that every worker has for itself, on its own device.

Parameter servers hold what workers share. What a worker keeps for itself
(teachers' dense weights, counts of bad batches) must not cost a message each
step, and must come back by itself on a worker that was restarted. The public
operations of resource variables do both: a handle is found by name on the
worker that runs the function, and made there if it is not.
"""

import contextlib
import uuid
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class WorkerVariable:
    """A variable of the worker on which a function happens to run.

    Use it inside `opened`, in a function that a worker runs.
    """

    def __init__(self, initial: Any, *, name: str) -> None:
        """Makes nothing yet.

        Args:
            initial: Value, as an array, on a worker that has none yet.
            name: For people.
        """
        self._initial = np.asarray(initial)
        self.dtype = tf.as_dtype(self._initial.dtype)
        self.shape = tf.TensorShape(self._initial.shape)
        # Never that of an earlier run: servers outlive a coordinator.
        self._shared_name = f"tfdistill/{name}/{uuid.uuid4().hex}"
        self._handle: tf.Tensor | None = None

    def value(self) -> tf.Tensor:
        """Returns the value on this worker."""
        value = tf.raw_ops.ReadVariableOp(
            resource=self._opened_handle(), dtype=self.dtype
        )
        value.set_shape(self.shape)
        return value

    def assign(self, value: Any) -> None:
        """Sets the value on this worker."""
        tf.raw_ops.AssignVariableOp(
            resource=self._opened_handle(), value=tf.cast(value, self.dtype)
        )

    def __tf_tensor__(self, dtype: Any = None, name: Any = None) -> tf.Tensor:
        """Converts to a tensor: the value on this worker."""
        value = self.value()
        return value if dtype is None else tf.cast(value, dtype)

    def _opened_handle(self) -> tf.Tensor:
        if self._handle is None:
            raise RuntimeError(
                f"{self._shared_name} must be used inside worker_variable."
                "opened, in a function that a worker runs."
            )
        return self._handle

    def _open(self) -> None:
        self._handle = tf.raw_ops.VarHandleOp(
            dtype=self.dtype, shape=self.shape, shared_name=self._shared_name
        )
        tf.cond(
            tf.raw_ops.VarIsInitializedOp(resource=self._handle),
            lambda: tf.constant(True),
            self._initialize,
        )

    def _initialize(self) -> tf.Tensor:
        self.assign(self._initial)
        return tf.constant(True)


@contextlib.contextmanager
def opened(variables: Sequence[WorkerVariable]) -> Iterator[None]:
    """Makes variables usable while one function is traced.

    Args:
        variables: All that the function uses. Each gets one handle, so that
            reads and writes keep their order.
    """
    before = [variable._handle for variable in variables]
    for variable in variables:
        variable._open()
    try:
        yield
    finally:
        for variable, handle in zip(variables, before, strict=True):
            variable._handle = handle
