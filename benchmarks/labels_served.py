"""What labels from a server cost a step, and what its loss costs.

For the cost, student and server are pinned to a core each, so that neither
takes the other's time. The sides take turns: a plain training, one with labels
from the server, one whose data hold such labels, which costs only the loss, and
one with the same teacher in the step. On a busy machine, the processor time of
the student's process says more than the time of a step.

For the loss, one of two servers is frozen and then killed, and then the other
one, while a student trains. Then somebody else takes their places, and answers
with nonsense, and after that slowly. What counts is the longest time between
two steps.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import grpc
import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from tfdistill.labels import attached
from tfdistill.labels import protocol
from tfdistill.system import programs

_TARGET = 1.05
_LONGEST_PAUSE_SECS = 1.0
_FEATURES, _CLASSES, _PREFETCH = 256, 100, 8


def _student(units: int, layers: int = 3) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((_FEATURES,)),
            *(keras.layers.Dense(units, "relu") for _ in range(layers)),
            keras.layers.Dense(_CLASSES),
        ]
    )


def _data(batch_size: int) -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * batch_size, _FEATURES)).astype("float32")
    y = rng.integers(0, _CLASSES, len(x))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache()
    return dataset.batch(batch_size, drop_remainder=True).repeat()


def _pin(pid: int, core: int) -> None:
    """Puts all threads of a process on one core; later ones follow."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


@contextlib.contextmanager
def _server(
    exchange: pathlib.Path, core: int | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Runs `launch.teach`, on a core; gives its address and the process."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "launch.teach", "--port=0", "--threads=1"),
            f"--exchange={exchange}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
            lines = map(json.loads, process.stdout or ())
            line = next(line for line in lines if line["version"] >= 0)
            yield f"127.0.0.1:{line['port']}", process
        finally:
            process.kill()


def _publish(
    exchange: tfdistill.Exchange, model: tfdistill.CodistillModel, data: Any
) -> None:
    exporter = tfdistill.StudentExporter(exchange, every_steps=1, group=0)
    model.fit(data, steps_per_epoch=1, verbose=0, callbacks=[exporter])


def _compiled(units: int, teachers: Any = None) -> tfdistill.CodistillModel:
    keras.utils.set_random_seed(1)
    model = tfdistill.CodistillModel(_student(units), teachers=teachers)
    model.compile(
        keras.optimizers.SGD(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
    )
    return model


class _Side:
    """One training that goes on in turns."""

    def __init__(self, model: tfdistill.CodistillModel, data: Any) -> None:
        self._model, self._data = model, data
        self.processor_secs: list[float] = []
        self._iterate(3)

    def _iterate(self, num_steps: int) -> None:
        self._model.fit(
            self._data, steps_per_epoch=num_steps, epochs=1, verbose=0
        )

    def step_secs(self, num_steps: int) -> float:
        """Returns the median seconds of a step, the first ones left out.

        The processor time, of all threads, is a mean: it has coarse ticks.
        """
        times: list[tuple[float, float]] = []
        watch = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: times.append(
                (time.perf_counter(), time.process_time())
            )
        )
        self._model.fit(
            self._data,
            steps_per_epoch=num_steps,
            verbose=0,
            callbacks=[watch],
        )
        wall, processor = np.diff(times[num_steps // 4 :], axis=0).T
        self.processor_secs.append(float(np.mean(processor)))
        return float(np.median(wall))


def served(options: programs.Options) -> dict[str, Any]:
    """Measures a step without a teacher, with labels, and with it inside.

    Args:
        options: `served_units`, of each hidden layer; `served_batch_size`;
            `served_steps` of each turn; `rounds`.

    Returns:
        Step times and processor times by side, the judgement of served
        against plain, and what share of rows had no label.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ValueError("Needs two cores; this process may use one.")
    with tempfile.TemporaryDirectory(prefix="labels-served-") as directory:
        exchange = tfdistill.Exchange(pathlib.Path(directory) / "exchange")
        units, data = options.served_units, _data(options.served_batch_size)
        _publish(exchange, _compiled(units), data)
        server = _server(pathlib.Path(directory) / "exchange", cores[1])
        with server as (address, _):
            _pin(os.getpid(), cores[0])
            try:
                teachers = tfdistill.labels.Teachers([address], timeout_secs=5)
                labelled = data.map(teachers, num_parallel_calls=2)
                newest = exchange.latest(0)
                same = attached.detach(next(iter(labelled)))[1]
                sides = {
                    "plain": _Side(_compiled(units), data),
                    "served": _Side(
                        _compiled(
                            units, tfdistill.TeacherSet(labels=["served"])
                        ),
                        labelled.prefetch(_PREFETCH),
                    ),
                    "labelled": _Side(
                        _compiled(
                            units, tfdistill.TeacherSet(labels=["served"])
                        ),
                        data.map(lambda x, y: attached.attach((x, y), same)),
                    ),
                    "in_step": _Side(
                        _compiled(
                            units,
                            tfdistill.TeacherSet(
                                saved_models=[newest.path] if newest else ()
                            ),
                        ),
                        data,
                    ),
                }
                times = measure.interleave(
                    {
                        name: functools.partial(
                            side.step_secs, options.served_steps
                        )
                        for name, side in sides.items()
                    },
                    rounds=options.rounds,
                )
                status = teachers.status()
                teachers.close()
            finally:
                for thread in os.listdir("/proc/self/task"):
                    os.sched_setaffinity(int(thread), cores)
    ratios = {
        name: measure.ratio_of(times[name], times["plain"])
        for name in ("served", "labelled", "in_step")
    }
    processor = {
        # Without the rounds that warmed up.
        name: side.processor_secs[-options.rounds :]
        for name, side in sides.items()
    }
    return {
        **measure.judge(ratios["served"]["of_medians"], at_most=_TARGET),
        "ratios": ratios,
        "step_secs": {n: measure.summary(t) for n, t in times.items()},
        "processor_secs": {n: measure.summary(t) for n, t in processor.items()},
        "processor_ratios": {
            name: measure.ratio_of(processor[name], processor["plain"])
            for name in ratios
        },
        "absent_rows": status["absent_rows"] / max(status["rows"], 1),
        "refused": status["refused"],
    }


class _Outage(keras.callbacks.Callback):
    """Does each deed at its time, and notes the longest time of a step."""

    def __init__(
        self, deeds: Mapping[str, Callable[[], None]], secs: float
    ) -> None:
        super().__init__()
        self._deeds = list(deeds.items())
        self._secs = secs
        self._phase = "both"
        self._last = self._began = 0.0
        self.longest: dict[str, float] = {}
        self.num_steps: dict[str, int] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Measures a step; the first ones trace."""
        now = time.perf_counter()
        if batch < 5:
            self._last = self._began = now
            return
        pause, self._last = now - self._last, now
        self.longest[self._phase] = max(
            self.longest.get(self._phase, 0.0), pause
        )
        self.num_steps[self._phase] = self.num_steps.get(self._phase, 0) + 1
        if now - self._began < self._secs:
            return
        self._began = now
        if not self._deeds:
            self.model.stop_training = True
            return
        self._phase, deed = self._deeds.pop(0)
        deed()
        self._last = time.perf_counter()


class _Liar(grpc.GenericRpcHandler):
    """Answers whatever it is asked, at the addresses of other servers."""

    def __init__(self) -> None:
        self.secs = 0.0
        self._method = grpc.unary_unary_rpc_method_handler(self._answer)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        """Returns what answers any call."""
        return self._method

    def _answer(self, question: bytes, context: Any) -> bytes:
        time.sleep(self.secs)
        return b"\xff\xfe nonsense"

    @contextlib.contextmanager
    def at(self, addresses: Sequence[str]) -> Iterator[None]:
        """Listens there."""
        server = grpc.server(
            concurrent.futures.ThreadPoolExecutor(8),
            handlers=[self],
            options=protocol.SERVER_OPTIONS,
        )
        for address in addresses:
            server.add_insecure_port(address)
        server.start()
        try:
            yield
        finally:
            server.stop(None).wait()


def outage(options: programs.Options) -> dict[str, Any]:
    """Measures the longest pause while servers are frozen, killed, replaced.

    Args:
        options: `served_units`, `served_batch_size`; `outage_secs` between two
            deeds.

    Returns:
        The longest time of a step by phase, and its judgement.
    """
    with (
        tempfile.TemporaryDirectory(prefix="labels-served-") as directory,
        contextlib.ExitStack() as stack,
    ):
        root = pathlib.Path(directory) / "exchange"
        units, data = options.served_units, _data(options.served_batch_size)
        _publish(tfdistill.Exchange(root), _compiled(units), data)
        first, second = (stack.enter_context(_server(root)) for _ in range(2))
        addresses = [first[0], second[0]]
        teachers = tfdistill.labels.Teachers(addresses)
        liar = _Liar()

        def replace() -> None:
            second[1].wait()
            stack.enter_context(liar.at(addresses))

        watch = _Outage(
            {
                "one_frozen": lambda: first[1].send_signal(signal.SIGSTOP),
                "one_killed": first[1].kill,
                "other_frozen": lambda: second[1].send_signal(signal.SIGSTOP),
                "both_killed": second[1].kill,
                "nonsense": replace,
                "slow": lambda: setattr(liar, "secs", 5.0),
            },
            options.outage_secs,
        )
        model = _compiled(units, tfdistill.TeacherSet(labels=["served"]))
        labelled = data.map(teachers, num_parallel_calls=2).prefetch(2)
        model.fit(labelled, steps_per_epoch=10**7, verbose=0, callbacks=[watch])
        status = teachers.status()
        teachers.close()
    return {
        **measure.judge(
            max(watch.longest.values()), at_most=_LONGEST_PAUSE_SECS
        ),
        "longest_secs": watch.longest,
        "steps": watch.num_steps,
        "absent_rows": status["absent_rows"] / max(status["rows"], 1),
        "refused": status["refused"],
    }
