"""What grows with the number of groups, and what `Peers(at_most=3)` keeps.

One group of N trains in this process; the others only publish, in turn. N = 16
with at most three teachers may cost 1.15 of the step of N = 4, and 1.3 of its
calls to the exchange. `bound` is what a step computes relative to N = 4: three
passes of the student, of `pass_flops` each, and one of each teacher.
"""

import collections
import statistics
import tempfile
import time
from typing import Any

import keras
import numpy as np

import tfdistill
from benchmarks import measure
from tfdistill.exchange import filesystem
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.system import processes
from tfdistill.system import programs

_SIDES: dict[str, Any] = {"2": (2, None), "4": (4, None)}
_SIDES |= {"16_at_most_3": (16, 3), "8": (8, None), "16": (16, None)}
_X, _Y = np.ones([256, 256]), np.zeros([256, 10])
_PAUSE_SECS, _MOST_REFRESHES = 5.0, 2000


class _CountingFileSystem(filesystem.LocalFileSystem):
    """Counts what one group asks the exchange for."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    def list_dir(self, path: str) -> Any:
        self.counts["calls"] += 1
        return super().list_dir(path)

    def stat(self, path: str) -> Any:
        self.counts["calls"] += 1
        return super().stat(path)

    def blocks(self, path: str) -> Any:
        self.counts.update(calls=1, reads=1)
        for block in super().blocks(path):
            self.counts["bytes"] += len(block)
            yield block


class _Side:
    """A student among a number of groups, whose newest versions teach it."""

    def __init__(
        self, options: Any, root: str, num_groups: int, at_most: Any
    ) -> None:
        before, began = processes.resident_bytes() or 0, time.perf_counter()
        self._options, self._step = options, 0
        self._files = _CountingFileSystem()
        self._others = tfdistill.Exchange(root, min_keep_secs=5.0)
        self._groups = range(1, num_groups)
        exchange = tfdistill.Exchange(root, file_system=self._files)
        peers = tfdistill.teachers.Peers(
            exchange, peers=self._groups, at_most=at_most
        )
        layers = [keras.layers.Dense(n, "relu") for n in (512, 512, 10)]
        self.student = keras.Sequential([keras.Input((256,)), *layers])
        self._model = tfdistill.CodistillModel(self.student, teachers=peers)
        loss = tfdistill.losses.LogitsMeanSquaredError(from_logits=True)
        self._model.compile("sgd", "mse", distillation_loss=loss)
        self._take_step()
        self.teachers = self._model.teachers
        self.teachers.start()
        self._publish(*self._groups)
        for _ in range(_MOST_REFRESHES):
            if all(each["step"] >= 0 for each in self.teachers.status()):
                break
            self._refresh()
        self.teachers.stop()
        num_bytes = (processes.resident_bytes() or 0) - before
        self.figures: dict[str, Any] = {
            "start_secs": round(time.perf_counter() - began, 2),
            "megabytes": round(num_bytes / 1e6, 1),
            "bound": round((3 + len(self.teachers)) / (3 + 3), 2),
        }

    def _take_step(self) -> None:
        # The same batch, without callbacks: what a step costs.
        self._model.train_on_batch(_X, _Y)

    def _publish(self, *groups: int) -> None:
        graph = self._model.graph
        writer = saved_model.SavedModelWriter(graph)
        for group in groups:
            self._others.publish(
                lambda path: writer.write(path, writer.snapshot()),
                group=group,
                step=self._step,
                graph_fingerprint=graph.fingerprint,
                inputs=student_graph.to_json(graph.input_spec, "inputs"),
                outputs=student_graph.to_json(graph.output_spec, "outputs"),
                variables=writer.variables,
            )

    def _refresh(self) -> None:
        self.teachers.refresh(step=self._step)
        time.sleep(0.05)

    def step_secs(self) -> float:
        return statistics.median(
            measure.timed(self._take_step) for _ in range(self._options.steps)
        )

    def asked(self) -> dict[str, float]:
        """What a second asks of the exchange, with a version each 5 s."""
        self.teachers.start()
        self._files.counts.clear()
        start, due = time.monotonic(), collections.deque[int]()
        while (spent := time.monotonic() - start) < self._options.secs:
            if not due and spent > _PAUSE_SECS * self._step:
                self._step += 1
                due.extend(self._groups)
            if due:
                self._publish(due.popleft())
            self._refresh()
        self.teachers.stop()
        return {k: round(n / spent, 1) for k, n in self._files.counts.items()}


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides; fills the record."""
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
        _Side(options, f"{root}/first", 2, None)  # TensorFlow starts, too.
        sides = {
            name: _Side(options, f"{root}/{name}", *args)
            for name, args in _SIDES.items()
        }
        for side in sides.values():
            side.figures["a_second"] = side.asked()
        turns = {name: side.step_secs for name, side in sides.items()}
        times = measure.interleave(turns, rounds=options.rounds)
    for name, side in sides.items():
        side.figures["step_secs"] = measure.summary(times[name])
    few, four = sides["16_at_most_3"].figures, sides["4"].figures
    calls = few["a_second"]["calls"] / four["a_second"]["calls"]
    step = few["step_secs"]["median"] / four["step_secs"]["median"]
    record.update(
        benchmark="many_groups",
        config=vars(options),
        step=measure.judge(step, at_most=1.15),
        calls=measure.judge(calls, at_most=1.3),
        pass_flops=measure.forward_flops(sides["4"].student, len(_X)),
        groups={name: side.figures for name, side in sides.items()},
        machine=measure.machine(),
    )


def _add_options(options: programs.Flags) -> None:
    options.add("steps", "steps a turn", 50, quick=3)
    options.add("rounds", "turns of each side", 9, quick=1)
    options.add("secs", "for which calls are counted", 20.0, quick=5.0)


PROGRAM = measure.program("many_groups", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
