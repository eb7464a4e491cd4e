"""One task of the soak: trains on digits at a steady pace, and resumes.

Groups codistil, or mix their weights.

The pace stands for groups on machines of their own: here all groups share one,
and the restart of one would slow down the others for no reason of ours.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import os
import pathlib
import time
from typing import Any

import keras

import tfdistill
from models import digits
from tfdistill.system import programs

# Of each worker, in its group's directory: what it counted, and what it became.
STEPS = "steps_{}.txt"
DIGEST = "digest_{}.txt"
# Of each chief, in its group's directory: when it got on at its starts.
PHASES = "phases.txt"
# In the run's directory: a task hangs once this is there.
HANG = "{}.hang"
_BATCH_SIZE = 64
_STEPS_PER_EPOCH = 100
_WAIT_SECS = 0.5


class Phases:
    """Notes what a task is done with, and when, if it is a group's chief."""

    def __init__(self, cluster: tfdistill.Cluster) -> None:
        """Makes the group's directory."""
        self.directory = pathlib.Path(
            str(cluster.workdir), f"group_{cluster.group}"
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._is_chief = cluster.is_chief

    def note(self, name: str) -> None:
        """Adds a line."""
        if self._is_chief:
            with contextlib.suppress(OSError):
                with (self.directory / PHASES).open("a") as file:
                    file.write(f"{name} {time.time()}\n")


class Pace(keras.callbacks.Callback):
    """Makes steps take a given time at least, and hangs when it is told to."""

    def __init__(
        self, steps_per_second: float, phases: Phases, hang: pathlib.Path
    ) -> None:
        """Takes the pace.

        Args:
            steps_per_second: At most so many; 0 for no limit.
            phases: Of the task.
            hang: A file; once it is there, a step never ends.
        """
        super().__init__()
        self._note, self._hang = phases.note, hang
        self._secs = 1 / steps_per_second if steps_per_second else 0.0
        self._next = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes that the weights are restored."""
        self._note("restore")

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Waits until the step is due; a late one is not made up for."""
        if not self._next:
            self._note("data")
        if self._hang.exists():
            self._hang.unlink()
            ctypes.PyDLL(None).sleep(600)  # With Python's lock held.
        now = time.monotonic()
        time.sleep(max(0.0, self._next - now))
        self._next = max(now, self._next) + self._secs


class Steps(keras.callbacks.Callback):
    """Notes each step of this process: its id, the step and Unix seconds.

    The optimizer counts, so that nothing of the library's own counting is in
    it. Lines that a full disk refuses are written with the next that fits.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Takes the file, which grows over all attempts."""
        super().__init__()
        self._path = path
        self._lines: list[str] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Adds a line."""
        step = int(self.model.optimizer.iterations.numpy())
        self._lines.append(f"{os.getpid()} {step} {time.time()}\n")
        lines = "".join(self._lines).encode()
        with (
            contextlib.suppress(OSError),
            self._path.open("ab", buffering=0) as file,
        ):
            size = file.tell()
            if file.write(lines) == len(lines):
                self._lines.clear()
            else:
                file.truncate(size)


def _digest(model: keras.Model) -> str:
    found = hashlib.sha256()
    for variable in [*model.weights, *model.optimizer.variables]:
        found.update(keras.ops.convert_to_numpy(variable).tobytes())
    return found.hexdigest()


def _teachers(by: str, exchange: tfdistill.Exchange) -> Any:
    if by in ("weights", "fragments"):
        return None
    if by == "versions":
        return tfdistill.teachers.Peers(exchange)
    # Longer than a step: a group that was restarted catches up.
    return tfdistill.teachers.PeerPredictions(exchange, wait_secs=_WAIT_SECS)


def _train(options: programs.Options) -> int:
    cluster = tfdistill.Cluster.from_env()
    phases = Phases(cluster)
    phases.note("start")
    strategy = tfdistill.make_strategy(cluster)
    phases.note("connect")
    by_predictions = options.by == "predictions"
    mixes = options.by in ("weights", "fragments")
    # Groups that mix begin with equal weights.
    keras.utils.set_random_seed(
        options.seed * 100 + (0 if mixes else cluster.group)
    )
    exchange = tfdistill.Exchange(cluster.exchange)
    # Of predictions, all groups read what the first one would.
    workload = dataclasses.replace(
        digits.workload(batch_size=_BATCH_SIZE),
        mode="coordinated" if by_predictions else "disjoint",
        seed=options.seed,
    )
    train, _ = workload.datasets(cluster)
    with strategy.scope():
        model = tfdistill.CodistillModel(
            digits.build_model(),
            teachers=_teachers(options.by, exchange),
        )
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
            distillation_weight=tfdistill.schedules.BurnIn(
                steps=1 if by_predictions else 200
            ),
        )
    directory = phases.directory
    task = f"{directory.name}_{cluster.task_type}_{cluster.task_index}"
    phases.note("build")
    model.fit(
        train,
        steps_per_epoch=_STEPS_PER_EPOCH,
        epochs=options.num_steps // _STEPS_PER_EPOCH,
        callbacks=[
            tfdistill.callbacks.Backup(directory / "backup"),
            tfdistill.callbacks.StudentExporter(exchange, every_steps=50),
            _mixer(options.by)
            if mixes
            else tfdistill.callbacks.TeacherLoader(every_steps=5),
            Steps(directory / STEPS.format(cluster.task_index)),
            Pace(
                options.steps_per_second,
                phases,
                directory.parent / HANG.format(task),
            ),
        ],
        verbose=0,
    )
    (directory / DIGEST.format(cluster.task_index)).write_text(_digest(model))
    return 0


def _mixer(by: str) -> Any:
    if by == "weights":
        return tfdistill.mixing.WeightMixer(
            tfdistill.mixing.ModelAveraging(0.5), every_steps=50
        )
    outer = keras.optimizers.SGD(0.7, momentum=0.6, nesterov=True)
    return tfdistill.mixing.FragmentMixer(
        tfdistill.mixing.OuterOptimizer(outer),
        every_steps=10,
        num_fragments=4,
        choose=tfdistill.mixing.AboveRms(),
        bits=1,
    )


def _add_options(options: programs.Program) -> None:
    options.add("num_steps", "of the run", kind=int, required=True)
    options.add("steps_per_second", "0: as fast as it can", 0.0)
    options.add(
        "by",
        "how groups teach each other",
        "versions",
        enum_values=["versions", "predictions", "weights", "fragments"],
    )
    options.add("seed", "of data and weights", 0)


PROGRAM = programs.Program(
    name="python -m benchmarks.soak_task",
    about=__doc__,
    define=_add_options,
    run=_train,
)

if __name__ == "__main__":
    PROGRAM.start()
