"""What predictions of peers cost a step: processor time, and bytes.

Sides take turns in this process: a plain Keras step, a step with a teacher in
it, and steps that swap predictions with one and with three peers, which are
processes without a model (predictions_peer.py). The processor time is that of
this whole process, with all threads that send and receive: waiting costs none,
and what else the machine does changes little.
"""

import contextlib
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from benchmarks import predictions_peer
from launch import recipes
from tfdistill import callbacks
from tfdistill import teachers
from tfdistill.labels import forms
from tfdistill.system import programs

# At most, of coordinated steps against plain ones, by number of groups.
_COST_TARGETS = {2: 1.10, 4: 1.15}
_CLICK_BYTES_TARGET = 2000
_LANGUAGE_SHARE_TARGET = 0.01
_WAIT_SECS = 5.0
_TOP_K = 32
_CHECKOUT = pathlib.Path(__file__).resolve().parents[1]


class _Clicks:
    """The student of criteo_small, and batches of its shapes."""

    def __init__(self) -> None:
        self.recipe = recipes.get("criteo_small")
        self.loss = keras.losses.BinaryCrossentropy(from_logits=True)
        self.distillation_loss = tfdistill.losses.BinarySoftTargetCrossEntropy()
        rng = np.random.default_rng(0)
        rows = self.recipe.arguments["batch_size"]
        student = self.build()
        shapes = {i.name: tuple(i.shape[1:]) for i in student.inputs}
        x = {
            "integers": rng.normal(size=(rows, *shapes["integers"])),
            "categories": rng.integers(0, 500, (rows, *shapes["categories"])),
        }
        x = {
            "integers": x["integers"].astype("float32"),
            "categories": x["categories"].astype("int32"),
        }
        y = rng.integers(0, 2, (rows, 1)).astype("float32")
        self.batches = tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)

    def build(self) -> keras.Model:
        return self.recipe.workload().model()

    def optimizer(self) -> keras.Optimizer:
        return keras.optimizers.Adagrad(3e-3)


class _Images:
    """A perceptron whose step is mostly products of matrices."""

    def __init__(self) -> None:
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.distillation_loss = tfdistill.losses.SoftTargetCrossEntropy()
        x = np.random.default_rng(0).normal(size=(256, 784)).astype("float32")
        y = np.zeros([256], "int64")
        self.batches = tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)

    def build(self) -> keras.Model:
        layers = [keras.layers.Dense(w, "relu") for w in (1024, 1024, 512)]
        return keras.Sequential(
            [keras.Input((784,)), *layers, keras.layers.Dense(10)]
        )

    def optimizer(self) -> keras.Optimizer:
        return keras.optimizers.SGD(1e-4, momentum=0.9)


_WORKLOADS: dict[str, Any] = {"criteo_small": _Clicks, "mlp": _Images}


@contextlib.contextmanager
def _peers(root: str, groups: range) -> Iterator[None]:
    code = (
        "import sys; from benchmarks import predictions_peer; "
        "predictions_peer.run(sys.argv[1], int(sys.argv[2]))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, root, str(group)], cwd=_CHECKOUT
        )
        for group in groups
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _codistilled(
    workload: Any, teacher: teachers.Teacher
) -> tfdistill.CodistillModel:
    model = tfdistill.CodistillModel(workload.build(), teachers=teacher)
    model.compile(
        workload.optimizer(),
        workload.loss,
        distillation_loss=workload.distillation_loss,
        jit_compile=False,
    )
    return model


def _plain(workload: Any) -> keras.Model:
    model = workload.build()
    model.compile(workload.optimizer(), workload.loss, jit_compile=False)
    return model


def _turns(model: Any, workload: Any, num_steps: int) -> Callable[[], float]:
    """Returns one turn: mean processor seconds of a step."""
    loader = [callbacks.TeacherLoader(every_steps=10**9)]
    has_teachers = isinstance(model, tfdistill.CodistillModel)
    model.fit(
        workload.batches,
        steps_per_epoch=3,
        verbose=0,
        callbacks=loader if has_teachers else [],
    )
    if has_teachers:
        model.teachers.start()
    batches = iter(workload.batches)

    def turn() -> float:
        model.train_function(batches)
        start = time.process_time()
        for _ in range(num_steps):
            logs = model.train_function(batches)
        float(logs["loss"])
        return (time.process_time() - start) / num_steps

    return turn


def _cost(name: str, options: programs.Options) -> dict[str, Any]:
    workload = _WORKLOADS[name]()
    with contextlib.ExitStack() as stack:
        swapping = {}
        for num_groups in _COST_TARGETS:
            root = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="tfdistill-bench-")
            )
            stack.enter_context(_peers(root, range(1, num_groups)))
            peers = teachers.PeerPredictions(
                tfdistill.Exchange(root, key=predictions_peer.KEY),
                peers=range(1, num_groups),
                wait_secs=_WAIT_SECS,
            )
            swapping[num_groups] = _codistilled(workload, peers)
            stack.callback(swapping[num_groups].teachers.stop)
        fixed = teachers.FixedTeacher(workload.build())
        models = {
            "plain": _plain(workload),
            "teacher_in_step": _codistilled(workload, fixed),
            **{f"groups_{n}": model for n, model in swapping.items()},
        }
        sides = {
            side: _turns(model, workload, options.steps)
            for side, model in models.items()
        }
        secs = measure.interleave(sides, rounds=options.rounds)
    record: dict[str, Any] = {
        "processor_secs": {k: measure.summary(v) for k, v in secs.items()},
        "teacher_in_step": measure.ratio_of(
            secs["teacher_in_step"], secs["plain"], best=statistics.median
        ),
    }
    for num_groups, model in swapping.items():
        ratio = measure.ratio_of(
            secs[f"groups_{num_groups}"], secs["plain"], best=statistics.median
        )
        status = model.teachers.status()
        answers = sum(found["num_answers"] for found in status)
        record[f"groups_{num_groups}"] = {
            **measure.judge(
                ratio["of_medians"], at_most=_COST_TARGETS[num_groups]
            ),
            "ratios": ratio,
            "answers": answers,
            "missed": sum(found["num_missed"] for found in status),
            "bytes_per_message": max(f["last_bytes"] or 0 for f in status),
        }
    return record


def _bytes(costs: dict[str, Any]) -> dict[str, Any]:
    """Bytes of a step of one of two groups, sent and received."""
    found: dict[str, Any] = {}
    if "criteo_small" in costs:
        message = costs["criteo_small"]["groups_2"]["bytes_per_message"]
        found["criteo_small"] = measure.judge(
            2 * message, at_most=_CLICK_BYTES_TARGET
        )
    names = ("batch_size", "sequence_length", "vocabulary_size")
    arguments = recipes.get("language_model").arguments
    shape = tuple(arguments[name] for name in names)
    output = tf.zeros(shape)
    for dtype in ("float32", "float16"):
        kept = forms.Form(top_k=_TOP_K, dtype=dtype).encode(output)
        size = sum(part.numpy().nbytes for part in kept.values())
        found[f"language_model_{dtype}"] = {
            **measure.judge(
                size / output.numpy().nbytes, at_most=_LANGUAGE_SHARE_TARGET
            ),
            "bytes": size,
        }
    return found


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures cost and bytes, and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    costs = {name: _cost(name, options) for name in options.models}
    sizes = _bytes(costs)
    judged = [c[f"groups_{n}"] for c in costs.values() for n in _COST_TARGETS]
    record.update(
        benchmark="predictions",
        config=vars(options),
        met=all(found["met"] for found in [*judged, *sizes.values()]),
        cost=costs,
        bytes=sizes,
        machine=measure.machine(),
    )


def _add_options(options: programs.Program) -> None:
    options.add(
        "models",
        "students that swap predictions",
        list(_WORKLOADS),
        enum_values=list(_WORKLOADS),
    )
    options.add("steps", "of a turn", 100, quick=5)
    options.add("rounds", "turns of each side", 15, quick=3)


PROGRAM = measure.program("predictions", __doc__, define=_add_options, run=run)

if __name__ == "__main__":
    PROGRAM.start()
