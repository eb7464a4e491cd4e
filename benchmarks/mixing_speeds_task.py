"""One group of benchmarks.mixing_speeds: a classifier at a set speed.

A sleep for each example stands for the group's machine, so that the groups
differ by what is asked and not by what else runs here. Its chief notes its loss
on the common test images in DIR/group_<g>/losses.txt, as monotonic seconds,
loss and batch size.
"""

import pathlib
import time
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from models import digits
from tfdistill.system import programs
from tfdistill.training import steps

LOSSES = "losses.txt"
_BATCH_SIZE = 64


class _Pace(steps.SteppedCallback):
    """Makes each example take its time, and notes the loss every few steps."""

    def __init__(
        self, path: pathlib.Path, options: programs.Options, group: int
    ) -> None:
        super().__init__()
        self._path, self._every = path, options.look_every_steps
        path.parent.mkdir(parents=True, exist_ok=True)
        self._secs = options.slow_secs if group else options.fast_secs
        self._end = time.monotonic() + options.limit_secs
        self._test = digits.load()[1]
        self._loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        super().on_train_batch_end(batch, logs)
        size = int(self.model.trainer.last.examples)
        time.sleep(self._secs * size)
        if self.step % self._every == 0:
            images, labels = self._test
            loss = float(self._loss(labels, self.model.student(images)))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.monotonic()} {loss} {size}\n")
        if time.monotonic() > self._end:
            self.model.stop_training = True


def _train(options: programs.Options) -> None:
    cluster = tfdistill.Cluster.from_env()
    strategy = tfdistill.make_strategy(cluster)
    exchange = tfdistill.Exchange(cluster.exchange)
    # All groups begin with equal weights.
    keras.utils.set_random_seed(options.seed)
    scaler = tfdistill.contrib.BatchScaler(
        exchange, batch_size=_BATCH_SIZE, every_steps=options.every_steps
    )
    with strategy.scope():
        model = tfdistill.CodistillModel(digits.build_model())
        model.compile(
            keras.optimizers.SGD(options.learning_rate),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    part = tfdistill.data.shard_arrays(digits.load()[0], cluster)
    examples = tf.data.Dataset.from_tensor_slices(part)
    examples = examples.shuffle(1000, seed=options.seed).repeat()
    directory = pathlib.Path(str(cluster.workdir), f"group_{cluster.group}")
    mixer = tfdistill.WeightMixer(
        exchange,
        tfdistill.mixing.ModelAveraging(),
        every_steps=options.every_steps,
        quorum="all" if options.waits else 1,
        grace_secs=30.0 if options.waits else 0.0,
        weigh_by="examples" if options.scales else "groups",
    )
    callbacks = [
        tfdistill.StudentExporter(exchange, every_steps=options.every_steps),
        _Pace(directory / LOSSES, options, cluster.group),
        mixer,
        tfdistill.StartTogether(cluster),
    ]
    if options.scales:
        train, callbacks = scaler.batched(examples), [*callbacks, scaler]
    else:
        train = examples.batch(_BATCH_SIZE)
    model.fit(train, steps_per_epoch=10**6, callbacks=callbacks, verbose=0)


def _add_options(options: programs.Flags) -> None:
    options.add("scales", "whether batches follow the speeds", False)
    options.add("waits", "whether mixes wait for the other group", False)
    options.add("fast_secs", "of group 0 for each example", 0.25e-3)
    options.add("slow_secs", "of the other groups", 0.5e-3)
    options.add("every_steps", "between mixes, and between sizes", 40)
    options.add("look_every_steps", "between two looks at the loss", 10)
    options.add("learning_rate", "of descent, without momentum", 0.02)
    options.add("limit_secs", "after which the training ends", 60.0)
    options.add("seed", "of weights and data", 0)


def _run(options: programs.Options) -> int:
    _train(options)
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.mixing_speeds_task",
    about=__doc__,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
