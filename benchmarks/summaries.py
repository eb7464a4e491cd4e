"""What `tfdistill.Summaries` adds to a training step.

Three sides take turns, each a `fit` of the same small codistilled model with
one teacher in use: without any summaries, with `tfdistill.Summaries`, and with
`keras.callbacks.TensorBoard` told to write as often. A turn is the mean time of
a step. The step is as short as the digits recipe's, so that what a callback
costs shows at all; the target is 1.02 of a step without.
"""

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from tfdistill.system import programs

_EVERY_STEPS = 50
_TARGET = 1.02
_BATCH_SIZE = 64


def _build() -> keras.Model:
    layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,)), *layers])


def _data() -> tf.data.Dataset:
    x = tf.random.uniform((_BATCH_SIZE, 64))
    y = tf.zeros([_BATCH_SIZE], tf.int64)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)


def _codistilled(directory: str) -> tfdistill.CodistillModel:
    teacher = f"{directory}/teacher"
    _build().export(teacher, verbose=False)
    model = tfdistill.CodistillModel(
        _build(),
        teachers=tfdistill.TeacherSet(
            saved_models=[teacher], trust_saved_models=True
        ),
    )
    model.compile(
        keras.optimizers.SGD(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
        jit_compile=False,
    )
    return model


def _turn(
    make_callback: Callable[[str], keras.callbacks.Callback | None],
    directory: str,
    num_steps: int,
) -> Callable[[], float]:
    """Returns one turn of a side: seconds per step of a `fit`."""
    model, data = _codistilled(directory), _data()
    numbers = iter(range(1_000_000))

    def seconds_per_step() -> float:
        callback = make_callback(f"{directory}/logs/{next(numbers)}")
        callbacks = [callback] if callback else []

        def fit() -> None:
            model.fit(
                data, steps_per_epoch=num_steps, verbose=0, callbacks=callbacks
            )

        return measure.timed(fit) / num_steps

    return seconds_per_step


def _summaries(directory: str) -> keras.callbacks.Callback:
    return tfdistill.Summaries(directory, every_steps=_EVERY_STEPS)


def _keras(directory: str) -> keras.callbacks.Callback:
    return keras.callbacks.TensorBoard(
        directory, update_freq=_EVERY_STEPS, write_graph=False
    )


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    sides = {
        "without": lambda _: None,
        "summaries": _summaries,
        "keras": _keras,
    }
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
        turns = {
            name: _turn(make, f"{root}/{name}", options.steps)
            for name, make in sides.items()
        }
        secs = measure.interleave(turns, rounds=options.rounds)
    ratios = measure.ratio_of(secs["summaries"], secs["without"])
    record.update(
        benchmark="summaries",
        config={**vars(options), "every_steps": _EVERY_STEPS},
        **measure.judge(ratios["of_medians"], at_most=_TARGET),
        ratios=ratios,
        keras_ratios=measure.ratio_of(secs["keras"], secs["without"]),
        step_secs={name: measure.summary(v) for name, v in secs.items()},
        machine=measure.machine(),
    )


def _add_options(options: programs.Flags) -> None:
    options.add("rounds", "turns of each side", 9, quick=3)
    options.add("steps", "steps a turn", 400)


PROGRAM = measure.program("summaries", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
