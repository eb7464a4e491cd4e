"""What an export and a refresh cost the training thread.

One process plays two groups: its student publishes as group 1 and learns from
group 1, so `StudentExporter`, the exchange on disk, the background reader and
`TeacherLoader` all run inside one real `fit`. In the same run, and taking
turns with it, `model.export` and `tf.saved_model.load` with a retrace are
timed, which is what does the same without tfdistill.
"""

import dataclasses
import pathlib
import tempfile
import time
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from benchmarks import measure
from tfdistill.exports import saved_model
from tfdistill.system import programs

_TARGET = 1 / 30
_NUM_CLASSES = 100


# The group that the one process both publishes as and learns from.
_GROUP = 1
# One round: steps in which the newest version is read and swapped in, quiet
# steps with one snapshot held among them, an export, steps beside its writing
# and the reading that follows, and an export at the end for the next round.
_FIRST_QUIET_STEP, _HOLD_STEP, _EXPORT_STEP = 6, 8, 12
_NUM_STEPS = 2 * _EXPORT_STEP
_READING_SECS = 0.5


@dataclasses.dataclass
class _Steps:
    """Seconds of training steps, by what happened beside them."""

    quiet: list[float] = dataclasses.field(default_factory=list)
    after_snapshot: list[float] = dataclasses.field(default_factory=list)
    after_export: list[float] = dataclasses.field(default_factory=list)


class _TimedExchange(tfdistill.Exchange):
    """Notes how long versions take to be written, in the background."""

    def __init__(self, root: str) -> None:
        super().__init__(root, max_to_keep=2, min_keep_secs=5.0)
        self.write_secs: list[float] = []

    def publish(self, *args: Any, **kwargs: Any) -> Any:
        """Publishes a version and notes the seconds."""
        start = time.perf_counter()
        version = super().publish(*args, **kwargs)
        self.write_secs.append(time.perf_counter() - start)
        return version


class _TimedExporter(tfdistill.callbacks.StudentExporter):
    """Notes how long each export holds up the training thread."""

    def __init__(self, exchange: _TimedExchange) -> None:
        super().__init__(exchange, every_steps=_EXPORT_STEP, group=_GROUP)
        self.blocked_secs: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Lets an export happen where one is due, under the clock."""
        skipped = self.totals["skipped"]
        start = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        elapsed = time.perf_counter() - start
        due = (batch + 1) % _EXPORT_STEP == 0
        if due and self.totals["skipped"] == skipped:
            self.blocked_secs.append(elapsed)


class _TimedLoader(tfdistill.callbacks.TeacherLoader):
    """Notes how long each refresh holds up the training thread."""

    def __init__(self) -> None:
        super().__init__(every_steps=1)
        self.swapped_secs: list[float] = []
        self.idle_secs: list[float] = []
        self._waits = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to read, and to wait for the first version."""
        super().on_train_begin(logs)
        self._waits = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Lets a refresh happen where one is ready, under the clock."""
        refreshes = self.num_refreshes
        start = time.perf_counter()
        super().on_train_batch_end(batch, logs)
        elapsed = time.perf_counter() - start
        swapped = self.num_refreshes > refreshes
        (self.swapped_secs if swapped else self.idle_secs).append(elapsed)
        self._waits = self._waits and not swapped
        if self._waits and batch + 1 < _FIRST_QUIET_STEP:
            # A small model's `fit` is over before anything could be read.
            time.sleep(_READING_SECS)


class _CountingModel(tfdistill.CodistillModel):
    """Counts how often its training step is traced."""

    num_traces = 0

    def train_step(self, data: Any) -> dict[str, Any]:
        """Runs in Python once for each trace."""
        self.num_traces += 1
        return super().train_step(data)


class _StepClock(keras.callbacks.Callback):
    """Times steps; must come first, so that no callback is in the time."""

    def __init__(self, steps: _Steps) -> None:
        super().__init__()
        self._steps = steps
        self._held: list[tf.Tensor] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Files the time of the step under what happened beside it."""
        elapsed = time.perf_counter() - self._start
        step = batch + 1
        if step == _HOLD_STEP + 1:
            self._steps.after_snapshot.append(elapsed)
        elif step == _EXPORT_STEP + 1:
            self._steps.after_export.append(elapsed)
        elif _FIRST_QUIET_STEP <= step <= _EXPORT_STEP:
            self._steps.quiet.append(elapsed)
        # Reading shares the variables' buffers, as an exporter's snapshot
        # does: the next update pays for copies, here without a writer beside.
        held = self.model.student.variables if step == _HOLD_STEP else []
        self._held = [tf.convert_to_tensor(v.value) for v in held]


class _Bench:
    """The student, its training and both baselines."""

    def __init__(self, options: programs.Options, root: pathlib.Path) -> None:
        keras.utils.set_random_seed(0)
        size, self._root = options.image_size, root
        self.student = _build(options.model, size)
        self.x = tf.random.uniform([options.batch_size, size, size, 3])
        y = tf.zeros([options.batch_size], tf.int64)
        self.data = tf.data.Dataset.from_tensors((self.x, y)).repeat()
        self.exchange = _TimedExchange(str(root / "exchange"))
        self.exporter, self.loader = (
            _TimedExporter(self.exchange),
            _TimedLoader(),
        )
        self.steps = _Steps()
        self.model = _CountingModel(
            self.student,
            teachers=tfdistill.teachers.Peers(self.exchange, peers=[_GROUP]),
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(
            keras.optimizers.SGD(1e-4, momentum=0.9),
            loss,
            distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(),
        )

    def train(self) -> None:
        """Runs one `fit`, which swaps teachers in and exports the student."""
        self.model.fit(
            self.data,
            steps_per_epoch=_NUM_STEPS,
            verbose=0,
            callbacks=[
                _StepClock(self.steps),
                self.exporter,
                self.loader,
            ],
        )

    def newest(self) -> Any:
        """The version published last."""
        version = self.exchange.latest(_GROUP)
        if version is None:
            raise RuntimeError("No version was published.")
        return version

    def keras_export(self) -> float:
        path = str(self._root / "keras_export")
        return measure.timed(lambda: self.student.export(path, verbose=False))

    def load_and_retrace(self) -> tuple[float, float]:
        """Seconds to use a version without tfdistill.

        Returns:
            With a retrace of the teacher alone; and of the whole training
            step, which `fit` with a new teacher would need.
        """
        version = self.newest()
        start = time.perf_counter()
        teacher = tf.saved_model.load(version.path)
        load = time.perf_counter() - start
        step = _training_step(self.student, teacher.serve)
        return load + self._retrace(teacher.serve), load + self._retrace(step)

    def _retrace(self, function: Any) -> float:
        """Seconds that the first call takes longer than the second."""
        compiled = tf.function(function)
        first, second = (
            measure.timed(lambda: compiled(self.x)) for _ in range(2)
        )
        return first - second

    def read(self) -> float:
        """Seconds in which the newest version is checked and read, idle."""
        version = self.newest()

        def read() -> None:
            self.exchange.verify(version)
            saved_model.read_variables(
                version.path, saved_model.in_order(version.manifest.variables)
            )

        return measure.timed(read)


def _build(name: str, size: int) -> keras.Model:
    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(size, size, 3),
            classes=_NUM_CLASSES,
            classifier_activation=None,
        )
    return keras.Sequential(
        [
            keras.Input((size, size, 3)),
            keras.layers.Conv2D(4, 3, strides=2, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(_NUM_CLASSES),
        ]
    )


def _training_step(student: keras.Model, teacher: Any) -> Any:
    """The least that a training step with a teacher has to trace."""

    def step(x: tf.Tensor) -> list[tf.Tensor]:
        target = tf.nn.softmax(teacher(x))
        with tf.GradientTape() as tape:
            logits = student(x, training=True)
            loss = tf.nn.softmax_cross_entropy_with_logits(target, logits)
        return tape.gradient(loss, student.trainable_variables)

    return step


def _measure(bench: _Bench, rounds: int) -> dict[str, list[float]]:
    """Lets our side and the baselines take turns."""
    taken: dict[str, list[float]] = {
        name: [] for name in ("export", "retrace", "retrace_step", "read")
    }
    for number in range(rounds + 1):
        bench.train()
        export = bench.keras_export()
        retrace, retrace_step = bench.load_and_retrace()
        values = (export, retrace, retrace_step, bench.read())
        measure.log(f"round {number}: " + " ".join(f"{v:.3f}" for v in values))
        if number == 0:  # The warm-up: traces, first files, nothing to read.
            traces = bench.model.num_traces
            for kept in (
                bench.exporter.blocked_secs,
                bench.loader.swapped_secs,
                bench.loader.idle_secs,
                bench.exchange.write_secs,
                *vars(bench.steps).values(),
            ):
                kept.clear()
            continue
        for name, value in zip(taken, values, strict=True):
            taken[name].append(value)
    bench.model.num_traces -= traces
    if not (bench.loader.swapped_secs and bench.exporter.blocked_secs):
        raise RuntimeError(
            "No teacher was swapped in or no export was made in time; "
            f"teachers: {bench.model.teachers.status()}. Try more --rounds."
        )
    return taken


def _size(directory: pathlib.Path) -> int:
    return sum(p.stat().st_size for p in directory.rglob("*") if p.is_file())


def _export_record(
    bench: _Bench, taken: dict[str, list[float]], root: pathlib.Path
) -> dict[str, Any]:
    blocked, steps = bench.exporter.blocked_secs, bench.steps
    blocked_all = measure.ratio_of(blocked, taken["export"])
    quiet = measure.summary(steps.quiet)["median"]
    extra = max(0.0, measure.summary(steps.after_export)["median"] - quiet)
    with_step = [value + extra for value in blocked]
    size = _size(pathlib.Path(bench.newest().path))
    return {
        **measure.judge(blocked_all["of_medians"], at_most=_TARGET),
        "ratios": blocked_all,
        "ratio_with_extra_step_time": measure.ratio_of(
            with_step, taken["export"]
        )["of_medians"],
        "blocked_secs": measure.summary(blocked),
        "model_export_secs": measure.summary(taken["export"]),
        "quiet_step_secs": measure.summary(steps.quiet),
        "step_after_snapshot_secs": measure.summary(steps.after_snapshot),
        "step_after_export_secs": measure.summary(steps.after_export),
        "extra_step_secs": round(extra, 6),
        "background_write_secs": measure.summary(bench.exchange.write_secs),
        "bytes": size,
        "model_export_bytes": _size(root / "keras_export"),
    }


def _refresh_record(
    bench: _Bench, taken: dict[str, list[float]]
) -> dict[str, Any]:
    swapped = bench.loader.swapped_secs
    ratios = measure.ratio_of(swapped, taken["retrace"])
    return {
        **measure.judge(ratios["of_medians"], at_most=_TARGET),
        "ratios": ratios,
        "blocked_secs": measure.summary(swapped),
        "blocked_without_news_secs": measure.summary(bench.loader.idle_secs),
        "load_and_retrace_teacher_secs": measure.summary(taken["retrace"]),
        "load_and_retrace_training_step_secs": measure.summary(
            taken["retrace_step"]
        ),
        "background_read_secs": measure.summary(taken["read"]),
        "retraces": bench.model.num_traces,
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures both sides and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as directory:
        root = pathlib.Path(directory)
        bench = _Bench(options, root)
        taken = _measure(bench, options.rounds)
        num_bytes = sum(
            v.dtype.size * v.shape.num_elements()
            for v in (tf.convert_to_tensor(v) for v in bench.student.variables)
        )
        export = _export_record(bench, taken, root)
        refresh = _refresh_record(bench, taken)
    record.update(
        benchmark="teacher_refresh",
        config=vars(options),
        met=export["met"] and refresh["met"],
        export=export,
        refresh=refresh,
        bound={
            "variable_bytes": num_bytes,
            "num_variables": len(bench.student.variables),
            "copy_secs": round(measure.copy_secs(num_bytes), 6),
        },
        machine=measure.machine(),
    )


def _add_options(options: programs.Flags) -> None:
    options.add(
        "model",
        "model to measure",
        "resnet50",
        enum_values=("resnet50", "tiny"),
    )
    options.add("image_size", "pixels a side", 64)
    options.add("batch_size", "images a step", 8)
    options.add("rounds", "turns of each side", 5, quick=1)


PROGRAM = measure.program(
    "teacher_refresh", __doc__, define=_add_options, run=run
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
