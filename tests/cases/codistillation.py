"""Small students, data and peers for the tests of codistillation."""

import contextlib
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from tfdistill.exports import key_frames
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.teachers import teacher

NUM_FEATURES, NUM_CLASSES = 4, 3
WAIT_SECS = 60.0


def data(num_examples: int = 16, seed: int = 0) -> tuple:
    """Features `[n, 4]` and class indices `[n]`."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num_examples, NUM_FEATURES)).astype("float32")
    return x, (np.abs(x[:, 0] * 3).astype("int64") % NUM_CLASSES)


def linear(seed: int = 0, classes: int = NUM_CLASSES) -> keras.Model:
    model = keras.Sequential(
        [keras.Input((NUM_FEATURES,)), keras.layers.Dense(classes)]
    )
    randomize(model, seed)
    return model


def deep(seed: int = 0, activation: str = "tanh") -> keras.Model:
    inputs = keras.Input((NUM_FEATURES,))
    hidden = keras.layers.Dense(5, activation=activation)(inputs)
    model = keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(hidden))
    randomize(model, seed)
    return model


def randomize(model: keras.Model, seed: int) -> None:
    rng = np.random.default_rng(seed + 100)
    for variable in model.variables:
        if tf.as_dtype(variable.dtype).is_floating:
            variable.assign(rng.uniform(0.1, 1.0, variable.shape))


def rounded(value: Any, dtype: str, *, by_row: bool = False) -> np.ndarray:
    """What "int8" or "int4" leaves of a weight, in NumPy."""
    value = np.asarray(value, "float32")
    if value.ndim < 2:
        return value
    axes = tuple(range(1, value.ndim) if by_row else range(value.ndim - 1))
    largest = np.abs(value).max(axis=axes, keepdims=True)
    scale = largest / np.float32({"int8": 127, "int4": 7}[dtype])
    scale[scale == 0] = 1
    return np.rint(value / scale) * scale + np.float32(0)


def input_spec(*shape: int, dtype: Any = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec([None, *(shape or (NUM_FEATURES,))], dtype)


# A student is traced once for all versions that a test publishes of it.
_writers: Any = weakref.WeakKeyDictionary()


def _writer(
    student: keras.Model, spec: Any, variables_dtype: str | None
) -> saved_model.SavedModelWriter:
    known = _writers.setdefault(student, {})
    key = (repr(spec), variables_dtype)
    if key not in known:
        graph = student_graph.StudentGraph(student, spec)
        known[key] = saved_model.SavedModelWriter(
            graph, variables_dtype=variables_dtype
        )
    return known[key]


def publish(
    exchange: tfdistill.Exchange,
    student: keras.Model,
    *,
    group: int = 1,
    step: int = 10,
    spec: Any = None,
    variables_dtype: str | None = None,
    values: Any = None,
    finite: bool = True,
    frames: key_frames.KeyFrames | None = None,
    **changes: Any,
) -> Any:
    """Publishes a student as another group would; `changes` to the manifest.

    `values` are written in place of the student's. Unless they must be
    `finite`, as by a peer without this package's own gate. With `frames` most
    are deltas.
    """
    writer = _writer(
        student, input_spec() if spec is None else spec, variables_dtype
    )
    snapshot = writer.snapshot() if values is None else values
    found = writer.described
    with contextlib.ExitStack() as stack:
        if not finite:
            gate = mock.patch.object(saved_model, "check_finite")
            stack.enter_context(gate)
        if frames:
            return frames.publish(
                exchange,
                writer,
                snapshot,
                whole=False,
                group=group,
                step=step,
                extras={},
                **found,
            )
        return exchange.publish(
            lambda directory: writer.write(directory, snapshot),
            group=group,
            step=step,
            **{**found, **changes},
        )


def codistill(
    student: keras.Model,
    teachers: Any = None,
    *,
    optimizer: Any = None,
    loss: Any = None,
    kind: type = tfdistill.CodistillModel,
    **kwargs: Any,
) -> tfdistill.CodistillModel:
    """A compiled model; call it in the strategy's scope."""
    model = kind(student, teachers=teachers)
    if teachers is not None:
        kwargs.setdefault(
            "distillation_loss", tfdistill.losses.SoftTargetCrossEntropy()
        )
        kwargs.setdefault("distillation_weight", 1.0)
    model.compile(
        optimizer or keras.optimizers.SGD(0.1),
        loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **kwargs,
    )
    return model


def peers(exchange: Any = None, peers: Any = (1,), **kwargs: Any) -> Any:
    """Other groups as teachers; group 1 unless told."""
    return tfdistill.teachers.Peers(exchange, peers=peers, **kwargs)


def following(
    exchange: Any = None, student: Any = None, **kwargs: Any
) -> tfdistill.CodistillModel:
    """A model that is ready to train, and follows group 1 unless told."""
    return taught(peers(exchange, **kwargs), student)


def taught(teachers: Any, student: Any = None) -> tfdistill.CodistillModel:
    """A model that is ready to train, with these teachers."""
    model = codistill(student or linear(0), teachers)
    prepare(model, *data())
    return model


def outputs_of_teachers(
    model: Any, x: Any, step: int = 20
) -> tuple[list[np.ndarray], np.ndarray]:
    """What the teachers say of a batch, and what each is worth by row."""
    soft = ask(model, x, step)
    return [o.numpy() for o in soft.outputs[0]], soft.weights.numpy()


def ask(model: Any, x: Any, step: int = 20, *, active: bool = True) -> Any:
    outputs = model.student(x)
    batch = teacher.Batch(
        inputs=tf.constant(x),
        outputs=outputs,
        step=tf.constant(step, tf.int64),
        losses=[None] * len(keras.tree.flatten(outputs)),
    )
    return model.teachers.ask(batch, active=tf.constant(active))


def teacher_variables(model: Any) -> list[tf.Variable]:
    """Where the first teacher's version in use lies."""
    return model.teachers._teachers[0]._copy.variables


class Unwatched(keras.callbacks.TerminateOnNaN):
    """Takes the place of the checks of `fit`, and goes on whatever comes."""

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops nothing."""


def exporter(
    exchange: Any, every_steps: Any = 1, *, group: int = 0, **kwargs: Any
) -> tfdistill.callbacks.StudentExporter:
    """Exports each step as group 0 unless told."""
    return tfdistill.callbacks.StudentExporter(
        exchange, every_steps=every_steps, group=group, **kwargs
    )


def never() -> tfdistill.callbacks.TeacherLoader:
    """A loader that is never due, so that a test decides on refreshes."""
    return tfdistill.callbacks.TeacherLoader(every_steps=10**9)


def fit(model: Any, x: Any, y: Any = None, **kwargs: Any) -> dict[str, list]:
    """Trains without shuffling or refreshes; returns the logs."""
    kwargs.setdefault("callbacks", [never()])
    kwargs.setdefault("verbose", 0)
    kwargs.setdefault("shuffle", False)
    return model.fit(x, y, **kwargs).history


def refresh_until(model: Any, done: Callable[[], bool]) -> None:
    """Refreshes as `TeacherLoader` does until `done()`, or fails."""
    deadline = time.monotonic() + WAIT_SECS
    generation = model.teachers.generation
    model.teachers.start()
    try:
        while not done():
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"no such news within {WAIT_SECS} s: "
                    f"{model.teachers.status()}"
                )
            model.teachers.refresh()
            time.sleep(0.002)
    finally:
        model.teachers.stop()
    if model.teachers.generation != generation:
        model.make_train_function(force=True)


def load(model: Any, *steps: int) -> None:
    refresh_until(
        model,
        lambda: [s["step"] for s in model.teachers.status()] == list(steps),
    )


def prepare(model: Any, x: Any, y: Any = None, **kwargs: Any) -> None:
    """Makes the model and its teachers as `fit` does, without a step."""
    fit(model, x, y, epochs=0, **kwargs)


def quarantined(model: Any) -> dict[int, str]:
    return model.teachers.status()[0]["quarantined"]


def assert_close(found: Any, expected: Any, **tolerance: float) -> None:
    """Of models or structures: to the bit, unless there is a tolerance."""
    for one, other in zip(_arrays(found), _arrays(expected), strict=True):
        if tolerance:
            np.testing.assert_allclose(one, other, **tolerance)
        else:
            np.testing.assert_array_equal(one, other)


def _arrays(values: Any) -> list[Any]:
    is_model = isinstance(values, keras.Model)
    return values.get_weights() if is_model else keras.tree.flatten(values)


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exp / exp.sum(axis=-1, keepdims=True)


def run_python(code: str, *arguments: str, **kwargs: Any) -> str:
    """Runs code in a plain interpreter without this package on its path."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        **kwargs,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
