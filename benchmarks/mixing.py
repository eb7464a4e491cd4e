"""What mixing weights costs the training thread, and what it changes.

`blocked` lets one real `fit` of a ResNet-50 average its weights with those of
its peers, and measures for how long the training thread is held up. In the same
run, and taking turns with it, the same is done in the foreground: versions are
checked and read, averaged with the model's weights and assigned.

`quasi_global` (mixing_quasi_global.py) is about optimizers in a ring with
skewed data, `speeds` (mixing_speeds.py) about groups of two speeds.
"""

import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from benchmarks import mixing_quasi_global
from benchmarks import mixing_speeds
from models import imagenet
from tfdistill import mixing
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import programs

_BLOCKED_TARGET = 1 / 30
_PIXELS, _BATCH_SIZE = 64, 4
_READ_LIMIT_SECS = 60.0


class _Turns(keras.callbacks.Callback):
    """Between two steps, has the peers publish and the foreground mix."""

    def __init__(self, bench: "_Blocked") -> None:
        super().__init__()
        self._bench = bench

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Publishes versions and waits until they were read."""
        self._bench.note_mix()
        self._bench.publish(batch + 2)
        self._bench.wait_until_read()


class _Blocked:
    """The model, its mixer and the foreground."""

    def __init__(self, options: programs.Options, root: pathlib.Path) -> None:
        keras.utils.set_random_seed(0)
        self._peers = range(1, options.num_peers + 1)
        size = _PIXELS
        student = imagenet.build_model(
            depth=options.depth,
            width=options.width,
            image_size=size,
            num_classes=100,
        )
        self.model = tfdistill.CodistillModel(student)
        self.model.compile(
            keras.optimizers.SGD(1e-4, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        x = tf.random.uniform([_BATCH_SIZE, size, size, 3])
        y = tf.zeros([_BATCH_SIZE], tf.int64)
        self.data = tf.data.Dataset.from_tensors((x, y)).repeat()
        self.exchange = tfdistill.Exchange(
            root / "exchange", max_to_keep=2, min_keep_secs=0.0
        )
        self.mixer = tfdistill.WeightMixer(
            self.exchange,
            mixing.ModelAveraging(0.5),
            every_steps=1,
            peers=[*self._peers],
            quorum="all",
        )
        self._rounds = options.rounds
        self._writer: saved_model.SavedModelWriter | None = None
        self._num_mixes = 0
        self._averaged: Any = None
        self.blocked_secs: list[float] = []
        self.foreground_secs: list[float] = []
        self.read_secs: list[float] = []

    def train(self) -> None:
        """Runs one `fit` that mixes at each step but the first."""
        # Publishes nothing: what an export costs, `teacher_refresh` measures.
        exporter = tfdistill.StudentExporter(
            tfdistill.Exchange(None), every_steps=1, group=0
        )
        self.model.fit(
            self.data,
            # A warm-up, which traces, after the step without a version.
            steps_per_epoch=self._rounds + 2,
            verbose=0,
            callbacks=[exporter, self.mixer, _Turns(self)],
        )

    def publish(self, step: int) -> None:
        """Publishes the student as a version of each peer."""
        graph = self.model.graph
        if self._writer is None:
            self._writer = saved_model.SavedModelWriter(graph)
        writer = self._writer
        snapshot = writer.snapshot()
        for peer in self._peers:
            self.exchange.publish(
                lambda directory: writer.write(directory, snapshot),
                group=peer,
                step=step,
                graph_fingerprint=graph.fingerprint,
                variables=writer.variables,
                inputs=student_graph.to_json(graph.input_spec, "inputs"),
                outputs=student_graph.to_json(graph.output_spec, "outputs"),
                extras=self.mixer.manifest_extras(),
            )

    def wait_until_read(self) -> None:
        """Waits for the reading thread, as the steps of a training would."""
        deadline = time.monotonic() + _READ_LIMIT_SECS
        readers = [self.mixer._readers[peer] for peer in self._peers]
        while readers[0].announced >= 0 and not self.mixer.has_mean:
            if time.monotonic() > deadline:
                found = [reader.rejected for reader in readers]
                raise RuntimeError(f"Not read: {found}.")
            time.sleep(0.01)

    def note_mix(self) -> None:
        """Files the mix that just took place, and does one in front."""
        if self.mixer.num_mixes == self._num_mixes:
            return
        self._num_mixes = self.mixer.num_mixes
        secs = self.mixer.blocked.last_secs or 0.0
        foreground = measure.timed(self._in_front)
        measure.log(f"mix {self._num_mixes}: {secs:.4f} {foreground:.4f}")
        if self._num_mixes > 1:
            self.blocked_secs.append(secs)
            self.foreground_secs.append(foreground)

    def _in_front(self) -> None:
        """Reads, averages and assigns; the weights stay what they are."""
        others: list[Any] = []
        secs = measure.timed(
            lambda: others.extend(map(self._read, self._peers))
        )
        self.read_secs.append(secs)
        if self._averaged is None:
            self._averaged = tf.function(
                lambda *versions: [
                    sum(values) / len(values)
                    for values in zip(*versions, strict=True)
                ]
            )
        variables = [
            v for v in self.model.graph.variables if v.dtype == "float32"
        ]
        own = [tf.convert_to_tensor(v.value) for v in variables]
        new = self._averaged(own, *others)
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value)

    def _read(self, peer: int) -> list[Any]:
        version = self.exchange.latest(peer)
        if version is None:
            raise RuntimeError("No version was published.")
        self.exchange.verify(version)
        values = saved_model.read_variables(
            version.path, saved_model.in_order(version.manifest.variables)
        )
        return [v for v in values if v is not None and v.dtype == tf.float32]


def _blocked(options: programs.Options) -> dict[str, Any]:
    """Compares a mix with reading, averaging and assigning in front."""
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as directory:
        bench = _Blocked(options, pathlib.Path(directory))
        bench.train()
        values: list[Any] = [
            tf.convert_to_tensor(v.value) for v in bench.model.graph.variables
        ]
    num_bytes = sum(v.dtype.size * v.shape.num_elements() for v in values)
    ratios = measure.ratio_of(bench.blocked_secs, bench.foreground_secs)
    return {
        **measure.judge(ratios["of_medians"], at_most=_BLOCKED_TARGET),
        "ratios": ratios,
        "blocked_secs": measure.summary(bench.blocked_secs),
        "foreground_secs": measure.summary(bench.foreground_secs),
        "foreground_read_secs": measure.summary(bench.read_secs),
        "bound": {
            "variable_bytes": num_bytes,
            # A mix reads the weights and the mean, and writes the weights.
            "moved_bytes": 3 * num_bytes,
            "copy_secs": round(measure.copy_secs(num_bytes), 6),
        },
    }


_PARTS: dict[str, Callable[[programs.Options], dict[str, Any]]] = {
    "blocked": _blocked,
    "quasi_global": mixing_quasi_global.quasi_global,
    "speeds": mixing_speeds.speeds,
}


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures the parts and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    measure.fill_parts(record, "mixing", _PARTS, options)


def _add_options(options: programs.Flags) -> None:
    options.add(
        "parts", "what to measure", list(_PARTS), enum_values=list(_PARTS)
    )
    options.add("depth", "layers of the ResNet: 26, 50, 101 or 152", 50)
    options.add("width", "of its first stage", 64)
    options.add("num_peers", "whose versions are averaged", 1)
    options.add("rounds", "turns of a mix and the foreground", 9, quick=3)
    mixing_quasi_global.add_options(options)
    mixing_speeds.add_options(options)


PROGRAM = measure.program("mixing", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
