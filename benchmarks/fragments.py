"""What a mix by fragments costs the training thread.

One real `fit` of a ResNet-50 mixes by fragments with a peer, whose outer
gradients are this group's own, and the training thread's pauses are measured.
In the same run, and taking turns with it, a whole version is mixed in the
foreground: checked and read, averaged with the weights, and assigned.
"""

import contextlib
import pathlib
import tempfile
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from models import imagenet
from tfdistill.exchange import publisher
from tfdistill.exports import saved_model
from tfdistill.system import programs

_TARGET = 1 / 100
_PIXELS, _BATCH_SIZE, _LIMIT_SECS = 64, 4, 60.0
_EVERY = 4


class _Turns(keras.callbacks.Callback):
    """Plays the peer between two steps, and mixes in the foreground."""

    def __init__(self, mixer: Any, exchange: Any) -> None:
        super().__init__()
        self._mixer, self._exchange = mixer, exchange
        self._num_mixes, self._average = 0, tf.function(_mean)
        self.blocked_secs: list[float] = []
        self.foreground_secs: list[float] = []
        # Steps, by how many since the last mix.
        self.step_secs: list[list[float]] = [[] for _ in range(_EVERY)]
        self._began = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes when a step begins."""
        self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publishes what this group has sent, as the peer, and has it read."""
        step, mixer = batch + 1, self._mixer
        if mixer.num_mixes > mixer._num_fragments:
            secs = time.perf_counter() - self._began
            self.step_secs[batch % _EVERY].append(secs)
        if step % _EVERY == 0:
            self._note()
            self._publish_as_peer(step)
        elif step % _EVERY == 1 and step > 1:
            _wait(lambda: mixer._mean[0] is not None)

    def _publish_as_peer(self, step: int) -> None:
        place = self._exchange.outer_gradients
        _wait(lambda: place.steps(0)[-1:] == [step])
        version = place.open(0, step)
        content = pathlib.Path(
            version.path, publisher.OUTER_GRADIENT
        ).read_bytes()
        found = version.manifest
        self._exchange.publish_outer_gradient(
            [content],
            group=1,
            step=step,
            graph_fingerprint=found.graph_fingerprint,
            extras=found.extras,
        )
        follower = self._mixer._followers[1]
        _wait(lambda: follower.newest == step)

    def _note(self) -> None:
        """Files the mix that just took place, and does one in front."""
        if self._mixer.num_mixes == self._num_mixes:
            return
        self._num_mixes = self._mixer.num_mixes
        _wait(lambda: self._exchange.latest(0) is not None)
        secs = self._mixer.blocked.last_secs or 0.0
        foreground = measure.timed(self._in_front)
        measure.log(f"mix {self._num_mixes}: {secs:.4f} {foreground:.4f}")
        if self._num_mixes > self._mixer._num_fragments:
            self.blocked_secs.append(secs)
            self.foreground_secs.append(foreground)

    def _in_front(self) -> None:
        version = self._exchange.latest(0)
        self._exchange.verify(version)
        variables = self.model.graph.variables
        values = saved_model.read_variables(
            version.path, saved_model.in_order(version.manifest.variables)
        )
        pairs = [
            (variable, value)
            for variable, value in zip(variables, values, strict=True)
            if variable.dtype == "float32"
        ]
        own = [tf.convert_to_tensor(variable.value) for variable, _ in pairs]
        new = self._average(own, [value for _, value in pairs])
        for (variable, _), value in zip(pairs, new, strict=True):
            variable.assign(value)


def _mean(own: list[Any], others: list[Any]) -> list[Any]:
    return [(a + b) / 2 for a, b in zip(own, others, strict=True)]


def _wait(done: Any) -> None:
    deadline = time.monotonic() + _LIMIT_SECS
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError("The mixer's threads do nothing.")
        time.sleep(0.01)


def run(options: Any, record: dict[str, Any]) -> None:
    """Measures, and fills the record."""
    keras.utils.set_random_seed(0)
    student = imagenet.build_model(
        depth=options.depth,
        width=options.width,
        image_size=_PIXELS,
        num_classes=100,
    )
    model = tfdistill.CodistillModel(student)
    model.compile(
        keras.optimizers.SGD(1e-4, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x = tf.random.uniform([_BATCH_SIZE, _PIXELS, _PIXELS, 3])
    y = tf.zeros([_BATCH_SIZE], tf.int64)
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(tempfile.TemporaryDirectory())
        exchange = tfdistill.Exchange(root, key=None)
        outer = keras.optimizers.SGD(0.7, momentum=0.6, nesterov=True)
        mixer = tfdistill.mixing.FragmentMixer(
            tfdistill.mixing.OuterOptimizer(outer),
            every_steps=_EVERY,
            num_fragments=options.fragments,
            choose=tfdistill.contrib.AboveRms(ratio=options.ratio),
            bits=options.bits,
            peers=[1],
        )
        turns = _Turns(mixer, exchange)
        # Only the first step's version is for the foreground.
        exporter = tfdistill.callbacks.StudentExporter(
            exchange, every_steps=10**6, offset_steps=1, group=0
        )
        model.fit(
            tf.data.Dataset.from_tensors((x, y)).repeat(),
            steps_per_epoch=_EVERY * (options.fragments + options.rounds + 2),
            verbose=0,
            callbacks=[exporter, mixer, turns],
        )
    num_weights = sum(
        int(v.shape.num_elements())
        for v in map(tf.convert_to_tensor, student.trainable_variables)
    )
    blocked = measure.ratio_of(turns.blocked_secs, turns.foreground_secs)
    record |= {
        **measure.judge(blocked["of_medians"], at_most=_TARGET),
        "ratios": blocked,
        "blocked_secs": measure.summary(turns.blocked_secs),
        "foreground_secs": measure.summary(turns.foreground_secs),
        # The next step copies what is held, while it is encoded.
        "step_after_secs": measure.summary(turns.step_secs[0]),
        "other_steps_secs": measure.summary(sum(turns.step_secs[1:-1], [])),
        "bound": {
            # Weights and changes are read, and weights are written.
            "moved_bytes": round(3 * 4 * num_weights / options.fragments),
            "copy_secs": round(
                measure.timed(
                    np.ones(num_weights // options.fragments, "float32").copy
                ),
                6,
            ),
        },
    }


def _add_options(options: programs.Flags) -> None:
    options.add("depth", "layers of the ResNet: 26, 50, 101 or 152", 50)
    options.add("width", "of its first stage", 64)
    options.add("fragments", "into which the weights are cut", 20)
    options.add("ratio", "to the root mean square of what is sent", 1.0)
    options.add("bits", "of a number", 1)
    options.add("rounds", "turns of a mix and the foreground", 9, quick=3)


PROGRAM = measure.program("fragments", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
