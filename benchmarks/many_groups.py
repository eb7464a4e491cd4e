"""What grows with the number of groups, and what `Peers(at_most=3)` keeps.

One group of N trains in this process; the others only publish. Sides take
turns: N = 2, 4, 8, 16 with all peers, and N = 16 with at most three of them. Of
each: the time of a step, and what the exchange is asked for while all groups
publish, one after the other. N = 16 with at most three may cost 1.15 of the
step of N = 4, and 1.3 of its calls.
"""

import collections
import functools
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
from tfdistill.system import programs

_SIDES: dict[str, Any] = {str(n): (n, None) for n in (2, 4, 8, 16)}
_SIDES |= {"16_at_most_3": (16, 3)}
_FEATURES, _WIDTHS, _CLASSES = 256, (512, 512), 10
_WAIT_SECS = 120.0


class _CountingFileSystem(filesystem.LocalFileSystem):
    """Counts what one group's reading thread asks the exchange for."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def list_dir(self, path: str) -> Any:
        self.calls["list_dir"] += 1
        return super().list_dir(path)

    def stat(self, path: str) -> Any:
        self.calls["stat"] += 1
        return super().stat(path)

    def blocks(self, path: str) -> Any:
        self.calls["read"] += 1
        for block in super().blocks(path):
            self.calls["bytes"] += len(block)
            yield block


def _student() -> keras.Model:
    layers = [keras.layers.Dense(width, "relu") for width in _WIDTHS]
    return keras.Sequential(
        [keras.Input((_FEATURES,)), *layers, keras.layers.Dense(_CLASSES)]
    )


class _Side:
    """A student among a number of groups."""

    def __init__(self, root: str, num_groups: int, at_most: Any) -> None:
        self._files = _CountingFileSystem()
        exchange = tfdistill.Exchange(root, file_system=self._files)
        teachers = tfdistill.teachers.Peers(
            exchange, peers=range(1, num_groups), at_most=at_most
        )
        self._model = tfdistill.CodistillModel(_student(), teachers=teachers)
        self._model.compile(
            keras.optimizers.SGD(1e-4),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
            jit_compile=False,
        )
        self._x = np.random.default_rng(0).normal(size=(256, _FEATURES))
        self._y = np.zeros(256, np.int64)
        self._fit(1)
        self._others = tfdistill.Exchange(root, min_keep_secs=5.0)
        self._groups, self._step = range(1, num_groups), 10
        self._load()

    def _fit(self, num_steps: int) -> None:
        # One batch again and again, without callbacks: what a step costs.
        for _ in range(num_steps):
            self._model.train_on_batch(self._x, self._y)

    def _publish(self, group: int) -> None:
        """Publishes the student as a group's next version."""
        graph = self._model.graph
        writer = saved_model.SavedModelWriter(graph)
        snapshot = writer.snapshot()
        self._others.publish(
            lambda directory: writer.write(directory, snapshot),
            group=group,
            step=self._step,
            graph_fingerprint=graph.fingerprint,
            inputs=student_graph.to_json(graph.input_spec, "inputs"),
            outputs=student_graph.to_json(graph.output_spec, "outputs"),
            variables=writer.variables,
            extras={"every_steps": 10},
        )

    def _refresh(self) -> None:
        self._model.teachers.refresh(step=self._step)
        time.sleep(0.05)

    def _load(self) -> None:
        for group in self._groups:
            self._publish(group)
        teachers = self._model.teachers
        deadline = time.monotonic() + _WAIT_SECS
        teachers.start()
        while any(each["step"] < 0 for each in teachers.status()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all arrived: {teachers.status()}")
            self._refresh()
        teachers.stop()

    def step_secs(self, num_steps: int) -> float:
        """Returns the median time of a step."""
        return statistics.median(
            measure.timed(lambda: self._fit(1)) for _ in range(num_steps)
        )

    def asked(self, secs: float, every_secs: float) -> dict[str, float]:
        """Returns what the exchange is asked for in a second.

        While the groups publish a version each every so many seconds, in turn:
        the student is held up by none for long.
        """
        teachers = self._model.teachers
        teachers.start()
        self._files.calls.clear()
        start, due = time.monotonic(), collections.deque[int]()
        while (now := time.monotonic()) < start + secs:
            if not due and now - start > every_secs * (self._step / 10 - 1):
                self._step += 10
                due.extend(self._groups)
            if due:
                self._publish(due.popleft())
            self._refresh()
        spent, calls = time.monotonic() - start, dict(self._files.calls)
        teachers.stop()
        num_bytes = calls.pop("bytes", 0)
        return {
            "calls": round(sum(calls.values()) / spent, 1),
            "kilobytes": round(num_bytes / spent / 1e3, 1),
        }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures all sides; fills the record."""
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
        sides = {
            name: _Side(f"{root}/{name}", *args)
            for name, args in _SIDES.items()
        }
        asked = {
            name: side.asked(options.secs, options.every_secs)
            for name, side in sides.items()
        }
        times = measure.interleave(
            {
                name: functools.partial(side.step_secs, options.steps)
                for name, side in sides.items()
            },
            rounds=options.rounds,
        )
    calls = asked["16_at_most_3"]["calls"] / asked["4"]["calls"]
    step = measure.ratio_of(times["16_at_most_3"], times["4"])["of_medians"]
    record.update(
        benchmark="many_groups",
        config=vars(options),
        step=measure.judge(step, at_most=1.15),
        calls=measure.judge(calls, at_most=1.3),
        groups={
            name: {
                "step_secs": measure.summary(times[name]),
                "a_second": asked[name],
            }
            for name in sides
        },
        machine=measure.machine(),
    )


def _add_options(options: programs.Flags) -> None:
    options.add("steps", "steps a turn", 50, quick=3)
    options.add("rounds", "turns of each side", 9, quick=1)
    options.add("secs", "for which calls are counted", 20.0, quick=2.0)
    options.add("every_secs", "between two versions of a group", 5.0, quick=1.0)


PROGRAM = measure.program("many_groups", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
