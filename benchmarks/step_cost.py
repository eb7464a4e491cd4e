"""What a teacher adds to a training step.

Six sides take turns: a plain Keras step, a codistilled step with one teacher
of the same architecture, the same with agree_on="both", the step of
`keras.distillation.Distiller` with the same teacher, an inference forward pass,
and a forward and backward pass without optimizer and metrics. A teacher must
cost one forward pass, so the target of codistilled / plain is
1.05 * (1 + forward / (forward + backward)). Mixed rows, half a batch, must cost
a codistilled step 1.35 at most.

XLA is off on all sides: Keras would turn it on by default, and on CPU it
makes every side slower.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from tfdistill.system import programs

_SLACK = 1.05
_MIXED_COST = 1.35
_TEACHER_GROUP = 1
_TEMPERATURE = 2.0
_WAIT_FOR_TEACHER_SECS = 120.0
_MODELS = ("resnet50", "mlp", "tiny")


def _build(name: str) -> keras.Model:
    if name == "resnet50":
        return keras.applications.ResNet50(
            weights=None,
            input_shape=(64, 64, 3),
            classes=100,
            classifier_activation=None,
        )
    widths, features = ((1024, 1024, 512), 784) if name == "mlp" else ((8,), 5)
    layers = [keras.layers.Dense(width, "relu") for width in widths]
    return keras.Sequential(
        [keras.Input((features,)), *layers, keras.layers.Dense(10)]
    )


def _task_loss() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _optimizer() -> keras.Optimizer:
    return keras.optimizers.SGD(1e-4, momentum=0.9)


class _Workload:
    """One architecture, its batch and the five sides."""

    def __init__(self, name: str, *, batch_size: int, num_steps: int) -> None:
        keras.utils.set_random_seed(0)
        self._name = name
        self._num_steps = num_steps
        self.batch_size = batch_size
        self.teacher = _build(name)
        shape = (batch_size, *self.teacher.input_shape[1:])
        self.x = tf.random.uniform(shape)
        self.y = tf.zeros([batch_size], tf.int64)
        one = tf.data.Dataset.from_tensors((self.x, self.y))
        self.data = one.repeat().prefetch(2)

    def sides(self, exchange: tfdistill.Exchange) -> dict[str, Any]:
        """Builds every side; each call of one gives seconds per step."""
        self._publish_teacher(exchange)
        student = _build(self._name)
        return {
            "plain": self._steps_of(self._plain()),
            "codistilled": self._steps_of(self._codistilled(exchange)),
            "both": self._steps_of(self._codistilled(exchange, "both")),
            "distiller": self._steps_of(self._distiller()),
            "forward": self._calls_of(lambda x, y: student(x, training=False)),
            "forward_backward": self._calls_of(_forward_backward(student)),
        }

    def _plain(self) -> keras.Model:
        return self._trained(_build(self._name))

    def _distiller(self) -> keras.Model:
        model = keras.distillation.Distiller(
            teacher=self.teacher,
            student=_build(self._name),
            # An instance: by the name Keras would leave the softmax out.
            distillation_losses=keras.distillation.LogitsDistillation(
                temperature=_TEMPERATURE, loss=keras.losses.KLDivergence()
            ),
        )
        return self._trained(model)

    def _trained(self, model: keras.Model) -> keras.Model:
        model.compile(
            _optimizer(), _task_loss(), metrics=["accuracy"], jit_compile=False
        )
        model.fit(self.data, steps_per_epoch=2, shuffle=False, verbose=0)
        return model

    def _codistilled(
        self, exchange: tfdistill.Exchange, agree_on: str = "batch"
    ) -> keras.Model:
        """A model whose teacher came through the exchange and is in use."""
        model = tfdistill.CodistillModel(
            _build(self._name),
            teachers=tfdistill.teachers.Peers(exchange, peers=[_TEACHER_GROUP]),
            agree_on=agree_on,
        )
        model.compile(
            _optimizer(),
            _task_loss(),
            metrics=["accuracy"],
            distillation_loss=tfdistill.losses.ForwardKL(
                temperature=_TEMPERATURE
            ),
            distillation_weight=1.0,
            jit_compile=False,
        )
        deadline = time.monotonic() + _WAIT_FOR_TEACHER_SECS
        while True:
            history = model.fit(
                self.data,
                steps_per_epoch=2,
                verbose=0,
                callbacks=[tfdistill.callbacks.TeacherLoader(every_steps=1)],
            )
            if np.isfinite(history.history["teacher_staleness"][-1]):
                return model
            if time.monotonic() > deadline:
                raise RuntimeError(
                    "No teacher was loaded: "
                    f"{model.teachers.status()}; the step would cost nothing."
                )

    def _publish_teacher(self, exchange: tfdistill.Exchange) -> None:
        model = tfdistill.CodistillModel(self.teacher)
        model.compile(_optimizer(), _task_loss(), jit_compile=False)
        exporter = tfdistill.callbacks.StudentExporter(
            exchange, every_steps=1, group=_TEACHER_GROUP
        )
        model.fit(self.data, steps_per_epoch=1, verbose=0, callbacks=[exporter])

    def _steps_of(self, model: keras.Model) -> Callable[[], float]:
        """Times what `fit` calls for each step; the model was fitted before."""
        batches = iter(self.data)
        return self._turn(lambda: model.train_function(batches))

    def _calls_of(self, function: Callable[..., Any]) -> Callable[[], float]:
        # Fed by an iterator inside the graph, as Keras feeds its steps.
        batches = iter(self.data)
        compiled = tf.function(lambda: function(*next(batches)))
        return self._turn(compiled)

    def _turn(self, step: Callable[[], Any]) -> Callable[[], float]:
        """Returns one turn of a side: the median time of a few steps."""

        def seconds_per_step() -> float:
            step()  # Brings this side's weights back into the caches.
            secs = [measure.timed(step) for _ in range(self._num_steps)]
            return statistics.median(secs)

        return seconds_per_step


def _forward_backward(student: keras.Model) -> Callable[..., Any]:
    loss = _task_loss()

    def forward_backward(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss(y, student(x, training=True))
        return tape.gradient(value, student.trainable_variables)

    return forward_backward


def _compare(
    secs: Mapping[str, Sequence[float]], *, flops: int
) -> dict[str, Any]:
    """Puts the six sides of one workload into a record."""
    medians = {k: measure.summary(v)["median"] for k, v in secs.items()}
    target = _SLACK * (1 + medians["forward"] / medians["forward_backward"])
    against_plain = measure.ratio_of(secs["codistilled"], secs["plain"])
    against_peer = measure.ratio_of(secs["codistilled"], secs["distiller"])
    against_batch = measure.ratio_of(secs["both"], secs["codistilled"])
    return {
        "codistilled_to_plain": {
            **measure.judge(against_plain["of_medians"], at_most=target),
            "ratios": against_plain,
        },
        "codistilled_to_distiller": {
            **measure.judge(against_peer["of_medians"], at_most=1.0),
            "ratios": against_peer,
        },
        "both_to_codistilled": {
            **measure.judge(against_batch["of_medians"], at_most=_MIXED_COST),
            "ratios": against_batch,
        },
        "step_secs": {k: measure.summary(v) for k, v in secs.items()},
        "bound": {
            "forward_flops": flops,
            "forward_gigaflops_per_second": round(
                flops / 1e9 / medians["forward"], 3
            ),
            "plain_plus_forward_secs": round(
                medians["plain"] + medians["forward"], 6
            ),
        },
    }


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures every model and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    models = {}
    for name in options.models:
        small = name != "resnet50"
        workload = _Workload(
            name,
            batch_size=options.mlp_batch_size if small else options.batch_size,
            num_steps=options.steps * (5 if small else 1),
        )
        with tempfile.TemporaryDirectory(prefix="tfdistill-bench-") as root:
            sides = workload.sides(tfdistill.Exchange(root))
            secs = measure.interleave(sides, rounds=options.rounds)
        flops = measure.forward_flops(workload.teacher, workload.batch_size)
        models[name] = _compare(secs, flops=flops)
    headline = models[options.models[0]]
    record.update(
        benchmark="step_cost",
        config=vars(options),
        headline=options.models[0],
        ratio=headline["codistilled_to_plain"]["ratio"],
        target=headline["codistilled_to_plain"]["target"],
        met=all(
            headline[key]["met"]
            for key in (
                "codistilled_to_plain",
                "codistilled_to_distiller",
                "both_to_codistilled",
            )
        ),
        models=models,
        machine=measure.machine(),
    )


def _add_options(options: programs.Program) -> None:
    options.add(
        "models",
        "models to measure",
        ["resnet50", "mlp"],
        enum_values=list(_MODELS),
    )
    options.add("batch_size", "of resnet50", 16)
    options.add("mlp_batch_size", "of the MLPs", 256)
    options.add("steps", "steps a turn; MLPs do 5 x that", 2)
    options.add("rounds", "turns of each side", 25, quick=2)


PROGRAM = measure.program("step_cost", __doc__, define=_add_options, run=run)

if __name__ == "__main__":
    PROGRAM.start()
