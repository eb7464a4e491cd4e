"""How long a backup blocks training, against Keras' own.

Two sides take turns: a `fit` of five steps with a `callbacks.Backup`, and one
with a `keras.callbacks.BackupAndRestore`, both with one backup after the third
step, of the same model and optimizer. What blocks is the time that the
callback takes between two steps: all of Keras' backup, and our snapshot. What
is left of ours runs beside the next steps, whose times are told as well.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from tfdistill.system import programs

_MODELS = ("resnet50", "tiny")
_NUM_STEPS, _AT = 5, 3
_TARGET = 0.1


def _build(name: str) -> keras.Model:
    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(64, 64, 3),
            classes=100,
            classifier_activation=None,
        )
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(10)])


class _Steps(keras.callbacks.Callback):
    """Times the steps of one `fit`."""

    def __init__(self) -> None:
        super().__init__()
        self._start = 0.0
        self.secs: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.secs.append(time.perf_counter() - self._start)


class _Side:
    """One way to back up."""

    def __init__(self, model: keras.Model, data: tf.data.Dataset) -> None:
        self._model, self._data = model, data
        self.step_before: list[float] = []
        self.step_after: list[float] = []
        self.num_bytes = 0
        # So that the third step of each turn is a multiple of five.
        self._fit([], num_steps=_NUM_STEPS - _AT)

    def _fit(self, callbacks: list[Any], *, num_steps: int) -> None:
        self._model.fit(
            self._data,
            steps_per_epoch=num_steps,
            callbacks=callbacks,
            shuffle=False,
            verbose=0,
        )

    def turn(self, make: Callable[[str], keras.callbacks.Callback]) -> float:
        """Returns how long one backup has blocked.

        Args:
            make: Makes the callback for a directory.
        """
        with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
            callback, steps = make(root), _Steps()
            sizes = _Sizes(root)
            blocked = _timed_calls(callback)
            self._fit([steps, callback, sizes], num_steps=_NUM_STEPS)
            self.num_bytes = sizes.num_bytes or _size_of(root)
        self.step_before.append(steps.secs[_AT - 1])
        self.step_after.append(steps.secs[_AT])
        return blocked[_AT - 1]


class _Sizes(keras.callbacks.Callback):
    """Measures a directory before Keras removes it at the end."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root
        self.num_bytes = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.num_bytes = _size_of(self._root)


def _size_of(root: str) -> int:
    """Adds up what is there; a backup in progress may move its files away."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(folder, name))
    return total


def _timed_calls(callback: Any) -> list[float]:
    """Has a callback note how long it takes between steps."""
    found: list[float] = []
    original = callback.on_train_batch_end

    def timed(batch: int, logs: Any = None) -> None:
        found.append(measure.timed(lambda: original(batch, logs)))

    callback.on_train_batch_end = timed
    return found


def _compiled(model: keras.Model) -> keras.Model:
    model.compile(
        keras.optimizers.SGD(1e-4, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return model


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures both sides and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    keras.utils.set_random_seed(0)
    student = _build(options.model)
    shape = (options.batch_size, *student.input_shape[1:])
    labels = tf.zeros([options.batch_size], tf.int64)
    one = tf.data.Dataset.from_tensors((tf.random.uniform(shape), labels))
    data = one.repeat().prefetch(2)
    ours = _Side(_compiled(tfdistill.CodistillModel(student)), data)
    theirs = _Side(_compiled(_build(options.model)), data)
    secs = measure.interleave(
        {
            "ours": lambda: ours.turn(
                lambda root: tfdistill.callbacks.Backup(
                    root, every_steps=_NUM_STEPS
                )
            ),
            "keras": lambda: theirs.turn(
                lambda root: keras.callbacks.BackupAndRestore(
                    root, save_freq=_AT, delete_checkpoint=False
                )
            ),
        },
        rounds=options.rounds,
    )
    medians = {side: measure.summary(v)["median"] for side, v in secs.items()}
    record.update(
        benchmark="backup",
        config=vars(options),
        **measure.judge(medians["ours"] / medians["keras"], at_most=_TARGET),
        blocked_secs={k: measure.summary(v) for k, v in secs.items()},
        ratios=measure.ratio_of(secs["ours"], secs["keras"]),
        **{
            f"step_{when}_secs": {
                "ours": measure.summary(getattr(ours, f"step_{when}")),
                "keras": measure.summary(getattr(theirs, f"step_{when}")),
            }
            for when in ("before", "after")
        },
        bytes={"ours": ours.num_bytes, "keras": theirs.num_bytes},
        machine=measure.machine(),
    )


def _add_options(options: programs.Program) -> None:
    options.add(
        "model", "model to measure", "resnet50", enum_values=list(_MODELS)
    )
    options.add("batch_size", "examples a step", 16)
    options.add("rounds", "turns of each side", 9, quick=2)


PROGRAM = measure.program("backup", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
