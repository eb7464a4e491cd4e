"""What many swaps of a teacher leave behind: memory, and traces.

One process publishes its student as group 1 and learns from group 1: each
version is written, read and checked in the background, tried on a canary
batch, swapped in and learned from for a step. After a warm-up the resident
memory may grow by 20 MiB at most, and the step is never traced again.
"""

import gc
import os
import pathlib
import statistics
import tempfile
import time
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from benchmarks import timed_training
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import programs
from tfdistill.teachers import gates

_MOST_GROWTH_MIB = 20.0
_MIB = 2**20
_NUM_CLASSES = 10
_WAIT_SECS = 120.0
# Readings of the memory, and how many at either end are compared.
_NUM_READINGS, _NUM_COMPARED = 20, 3


class _Bench:
    """A student that is its own teacher."""

    def __init__(self, options: programs.Options, root: str) -> None:
        keras.utils.set_random_seed(0)
        x = tf.random.uniform([options.batch_size, options.units])
        y = tf.zeros([options.batch_size], tf.int64)
        self.data = tf.data.Dataset.from_tensors((x, y))
        self.exchange = tfdistill.Exchange(
            root, max_to_keep=2, min_keep_secs=0.0
        )
        student = keras.Sequential(
            [
                keras.Input((options.units,)),
                keras.layers.Dense(options.units, activation="relu"),
                keras.layers.Dense(_NUM_CLASSES),
            ]
        )
        self.model = timed_training.CountingModel(
            student,
            teachers=tfdistill.TeacherSet(
                self.exchange,
                [timed_training.GROUP],
                canary=gates.Canary(x, labels=y.numpy()),
                poll_secs=0.002,
            ),
        )
        self.model.compile(
            keras.optimizers.SGD(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
        )
        self._loader = tfdistill.TeacherLoader(every_steps=10**9)
        self._step(epochs=0)
        self._writer = saved_model.SavedModelWriter(self.model.graph)

    def _step(self, epochs: int = 1) -> None:
        self.model.fit(
            self.data, epochs=epochs, verbose=0, callbacks=[self._loader]
        )

    def swap(self, version: int) -> None:
        """Publishes a version, waits until it is in place, and trains."""
        graph, snapshot = self.model.graph, self._writer.snapshot()
        self.exchange.publish(
            lambda directory: self._writer.write(directory, snapshot),
            group=timed_training.GROUP,
            step=version,
            graph_fingerprint=graph.fingerprint,
            inputs=student_graph.to_json(graph.input_spec, "inputs"),
            outputs=student_graph.to_json(graph.output_spec, "outputs"),
            variables=self._writer.variables,
        )
        teachers = self.model.teachers
        deadline = time.monotonic() + _WAIT_SECS
        teachers.start()
        while teachers.versions()[timed_training.GROUP] != version:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Version {version} must be in place in {_WAIT_SECS:g} s; "
                    f"the teachers are {teachers.status()}."
                )
            teachers.refresh(step=version)
            time.sleep(0.001)
        teachers.stop()
        self._step()


def _resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text("utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def run(options: programs.Options, root: str) -> dict[str, Any]:
    """Swaps, and reads the memory now and then.

    Args:
        options: The options of the command line.
        root: An empty directory.

    Returns:
        The growth, judged, and what was counted.
    """
    bench = _Bench(options, root)
    for version in range(options.warm_up_swaps):
        bench.swap(version)
    resident, num_traces = [], bench.model.num_traces
    every, start = (
        max(1, options.num_swaps // _NUM_READINGS),
        time.perf_counter(),
    )
    for number in range(options.num_swaps):
        bench.swap(options.warm_up_swaps + number)
        if number % every == 0:
            gc.collect()
            resident.append(_resident_bytes() / _MIB)
            measure.log(f"swap {number}: {resident[-1]:.1f} MiB")
    first, last = (
        statistics.median(part)
        for part in (resident[:_NUM_COMPARED], resident[-_NUM_COMPARED:])
    )
    return {
        "growth_mib": measure.judge(last - first, at_most=_MOST_GROWTH_MIB),
        "resident_mib": [round(value, 1) for value in resident],
        "new_traces": bench.model.num_traces - num_traces,
        "num_swaps": options.num_swaps,
        "model_mib": round(
            sum(v.numpy().nbytes for v in bench.model.student.variables) / _MIB,
            2,
        ),
        "secs_per_swap": (time.perf_counter() - start) / options.num_swaps,
    }


def _add_options(options: programs.Flags) -> None:
    options.add("num_swaps", "swaps that are measured", 200, quick=30)
    options.add("warm_up_swaps", "swaps before", 20, quick=5)
    options.add("units", "of the layer", 1024)
    options.add("batch_size", "examples a step", 32)


def _run(options: programs.Options, record: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory(prefix="tfdistill-swaps-") as root:
        found = run(options, root)
        record.update(
            benchmark="teacher_swaps",
            config=vars(options),
            met=found["growth_mib"]["met"] and not found["new_traces"],
            **found,
            machine=measure.machine(),
        )


PROGRAM = measure.program(
    "teacher_swaps", __doc__, define=_add_options, run=_run
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
