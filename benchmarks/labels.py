"""What labels by value cost, and what they change.

`coordinated` measures predictions of peers (labels_exchange.py), `served` and
`outage` labels from servers (labels_served.py).

`sampled` compares `contrib.SampledSoftTargetCrossEntropy` with the dense loss:
the mean gradient of many draws, in standard errors of that mean, with top-k
beside it; and forward and backward pass of an output layer, `SampledOutput`
against a dense one on the same rows.

`language_model` distils a fixed teacher into the student of the recipe
language_model_small by four losses. For each seed, they share the teacher, the
student's first weights and the order of the data, so differences are the
loss's. Printed are the log loss of held-out text and the expected calibration
error (Guo et al. 2017, arXiv:1706.04599, 15 bins of equal width) over its
positions.
"""

import statistics
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import labels_exchange
from benchmarks import labels_served
from benchmarks import measure
from launch import recipes
from launch.config import config as config_lib
from launch.task import optimizers
from launch.task import students
from launch.task import training
from tfdistill import contrib
from tfdistill import losses
from tfdistill.system import programs

_STANDARD_ERRORS = 3.0
_COST_TARGET = 0.4
_LOSS_TARGET_NATS = 0.01
_CALIBRATION_BINS = 15
_GRADIENT_CLASSES = 200
_DRAWS_AT_ONCE = 10_000


# ---- the mean of many draws ----


def _draws(
    loss: losses.DistillationLoss, target: np.ndarray, student: np.ndarray
) -> np.ndarray:
    """Returns value and gradient of equal rows, float64 `[rows, 1 + classes]`.

    Each row draws for itself.
    """
    rows = tf.tile(tf.constant(student), [_DRAWS_AT_ONCE, 1])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        values = loss.call(tf.tile(target, [_DRAWS_AT_ONCE, 1]), rows)
    found = [values[:, tf.newaxis], tape.gradient(values, rows)]
    return np.concatenate([np.asarray(f, np.float64) for f in found], axis=1)


def _gradients(options: programs.Options) -> dict[str, Any]:
    """Compares mean gradients with that of the dense loss."""
    rng = np.random.default_rng(0)
    shape = (1, _GRADIENT_CLASSES)
    student = (2.0 * rng.normal(size=shape)).astype(np.float32)
    target = tf.nn.softmax(2.0 * rng.normal(size=shape).astype(np.float32))
    exact = _draws(
        losses.SoftTargetCrossEntropy(from_logits=True), target, student
    )[0]
    sampled = contrib.SampledSoftTargetCrossEntropy
    sides = {
        "sampled": sampled(from_logits=True),
        "sampled_power_half": sampled(power=0.5, from_logits=True),
        "sampled_by_difference": sampled(
            proposal="difference", from_logits=True
        ),
    }
    top = losses.TopKSoftTargetCrossEntropy
    biased = {
        "top_k": top(from_logits=True),
        "top_k_without_tail": top(tail=False, from_logits=True),
    }
    record = {}
    for name, loss in sides.items():
        found = _draws(loss, target, student)
        errors = found.std(axis=0) / np.sqrt(len(found))
        distance = found.mean(axis=0) - exact
        record[name] = {
            # Of all classes together: expected is 1.
            **measure.judge(
                float(_norm(distance[1:]) / _norm(errors[1:])),
                at_most=_STANDARD_ERRORS,
            ),
            "value_in_standard_errors": round(
                float(abs(distance[0]) / errors[0]), 3
            ),
            "standard_error": round(float(_norm(errors[1:])), 6),
        }
    error = record["sampled"]["standard_error"]
    for name, loss in biased.items():
        distance = _draws(loss, target, student)[0] - exact
        record[name] = {"ratio": round(float(_norm(distance[1:])) / error, 3)}
    return {
        "draws": _DRAWS_AT_ONCE,
        "classes": _GRADIENT_CLASSES,
        "met": all(record[name]["met"] for name in sides),
        **record,
    }


def _norm(values: np.ndarray) -> Any:
    return np.sqrt(np.square(values).sum())


# ---- an output layer ----


def _output_layer(options: programs.Options) -> dict[str, Any]:
    """Compares forward and backward passes of both kinds of layer."""
    num_classes, num_rows = options.num_classes, options.rows
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=(num_rows, options.features)), tf.float32)
    sampled = tfdistill.contrib.SampledOutput(
        num_classes, num_sampled=options.num_sampled, seed=0
    )
    dense = keras.layers.Dense(num_classes)
    for layer in (sampled, dense):
        layer.build(x.shape)
    # As peaked as after training; with first weights all classes are alike,
    # and any few of them tell Z.
    kernel = 2.0 * rng.normal(size=(num_classes, options.features))
    kernel /= np.sqrt(options.features)
    sampled.set_weights([kernel, np.zeros(num_classes)])
    dense.set_weights([kernel.T, np.zeros(num_classes)])
    logits = 4.0 * rng.normal(size=(num_rows, num_classes))
    target = tf.nn.softmax(tf.constant(logits, tf.float32))
    top, classes = tf.math.top_k(target, options.k)
    rest = 1.0 - tf.reduce_sum(top, axis=-1)

    def dense_loss() -> tf.Tensor:
        return tf.nn.softmax_cross_entropy_with_logits(target, dense(x))

    def sampled_loss() -> tf.Tensor:
        return sampled.cross_entropy(
            sampled(x, training=True), classes, top, rest=rest
        )

    sides = {
        "dense": _pass(dense_loss, x, dense),
        "sampled": _pass(sampled_loss, x, sampled),
    }
    secs = measure.interleave(
        {name: _timed_pass(step) for name, step in sides.items()},
        rounds=options.rounds,
    )
    ratios = measure.ratio_of(secs["sampled"], secs["dense"])
    exact = sampled.cross_entropy(
        sampled(x), classes, top, rest=rest, training=False
    )
    drawn = [float(tf.reduce_mean(sampled_loss())) for _ in range(20)]
    per_class = 6 * num_rows * options.features
    few = min(options.num_sampled, num_classes) + options.k
    return {
        **measure.judge(ratios["of_medians"], at_most=_COST_TARGET),
        "ratios": ratios,
        "secs": {name: measure.summary(found) for name, found in secs.items()},
        "bound": {
            "dense_flops": per_class * num_classes,
            "sampled_flops": per_class * few,
            "ratio": round(few / num_classes, 5),
        },
        "mean_estimate_less_exact_nats": round(
            statistics.mean(drawn) - float(tf.reduce_mean(exact)), 5
        ),
    }


def _pass(
    loss: Callable[[], tf.Tensor], x: tf.Tensor, layer: keras.layers.Layer
) -> Callable[[], Any]:
    @tf.function
    def forward_backward() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_mean(loss())
        variables = [v.value for v in layer.trainable_variables]
        return value, tape.gradient(value, [x, *variables])

    return forward_backward


def _timed_pass(step: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        step()  # Brings this side's weights back into the caches.
        return statistics.median(measure.timed(step) for _ in range(3))

    return seconds


def _sampled(options: programs.Options) -> dict[str, Any]:
    gradient, layer = _gradients(options), _output_layer(options)
    return {
        "met": gradient["met"] and layer["met"],
        "gradient": gradient,
        "output_layer": layer,
    }


# ---- a language model ----

_DENSE, _SAMPLED = "dense", "sampled"


def _settings(k: int) -> dict[str, list[str]]:
    """The changes of the recipe, by side."""
    top = ["codistillation.loss=TopKSoftTargetCrossEntropy"]
    top.append(f"codistillation.k={k}")
    return {
        _DENSE: [],
        _SAMPLED: [
            "codistillation.loss=SampledSoftTargetCrossEntropy",
            f"codistillation.num_samples={k}",
        ],
        "top_k": top,
        "top_k_without_tail": [*top, "codistillation.tail=false"],
    }


def _config(options: programs.Options, seed: int) -> config_lib.Config:
    steps = options.language_steps
    return recipes.override(
        recipes.get("language_model_small"),
        [
            f"seed={seed}",
            f"num_steps={steps}",
            f"evaluate_every_steps={steps}",
            # At 1,500 steps those of the recipe.
            f"codistillation.burn_in_steps={steps // 5}",
            f"codistillation.ramp_steps={steps // 10}",
        ],
    )


def _language_model(options: programs.Options) -> dict[str, Any]:
    """Distils the same teachers by each loss."""
    settings = _settings(options.k)
    figures: dict[str, list[dict[str, float]]] = {n: [] for n in settings}
    of_teachers = []
    for seed in range(options.num_seeds):
        config = _config(options, seed)
        teacher, held_out = _train(config, group=1, teachers=[])
        of_teachers.append(_figures(teacher, held_out))
        measure.log(f"seed {seed}: teacher {of_teachers[-1]}")
        for name, changes in settings.items():
            changed = recipes.override(config, changes)
            student, held_out = _train(changed, group=0, teachers=[teacher])
            figures[name].append(_figures(student, held_out))
            measure.log(f"seed {seed}: {name} {figures[name][-1]}")
    against_dense = {
        name: _difference(figures[name], figures[_DENSE])
        for name in settings
        if name != _DENSE
    }
    found = against_dense[_SAMPLED]["mean"]
    return {
        **measure.judge(abs(found), at_most=_LOSS_TARGET_NATS),
        "log_loss_less_dense_nats": against_dense,
        "teacher": _summaries(of_teachers),
        **{name: _summaries(found) for name, found in figures.items()},
    }


def _train(
    config: config_lib.Config, *, group: int, teachers: list[keras.Model]
) -> tuple[keras.Model, tf.data.Dataset]:
    """Trains one model; returns it with the held-out text."""
    cluster = tfdistill.Cluster(group=group, num_groups=2)
    keras.utils.set_random_seed(students.seed_of(config.seed, group))
    train, held_out = training.make(config, cluster)
    student = students.build_student(config, group)
    model = tfdistill.CodistillModel(
        student, teachers=tfdistill.TeacherSet(models=teachers)
    )
    model.compile(
        optimizers.make(
            config.optimizer_of(learns=bool(teachers)),
            num_steps=config.num_steps,
        ),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss=students.make_loss(config.codistillation),
        distillation_weight=students.make_weight(config.codistillation),
        steps_per_execution=config.steps_per_execution,
    )
    model.fit(train, steps_per_epoch=config.num_steps, epochs=1, verbose=0)
    return student, held_out


def _probabilities(
    model: keras.Model, held_out: tf.data.Dataset
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for tokens, labels in held_out:
        logits = model(tokens, training=False)
        yield (
            tf.reshape(tf.nn.softmax(logits), [-1, logits.shape[-1]]).numpy(),
            np.reshape(labels, [-1]),
        )


def _figures(model: keras.Model, held_out: tf.data.Dataset) -> dict[str, float]:
    """Returns log loss and calibration error over all positions."""
    costs, confidences, hits = [], [], []
    for probabilities, labels in _probabilities(model, held_out):
        own = probabilities[np.arange(len(labels)), labels]
        costs.append(-np.log(np.maximum(own, losses.TINY)))
        confidences.append(probabilities.max(axis=-1))
        hits.append(probabilities.argmax(axis=-1) == labels)
    return {
        "log_loss": float(np.mean(np.concatenate(costs), dtype=np.float64)),
        "calibration_error": calibration_error(
            np.concatenate(confidences), np.concatenate(hits)
        ),
    }


def calibration_error(confidences: np.ndarray, hits: np.ndarray) -> float:
    """Returns the mean distance of confidence and accuracy, over bins.

    Args:
        confidences: Probabilities of the predicted classes, `[positions]`.
        hits: Whether these classes are the labels, bool `[positions]`.
    """
    bins = np.minimum(
        (confidences * _CALIBRATION_BINS).astype(int), _CALIBRATION_BINS - 1
    )
    gaps = np.bincount(
        bins, weights=confidences - hits, minlength=_CALIBRATION_BINS
    )
    return float(np.abs(gaps).sum() / len(confidences))


def _difference(
    found: list[dict[str, float]], dense: list[dict[str, float]]
) -> dict[str, float]:
    """Compares seed by seed; the error is one standard error of the mean."""
    paired = [
        one["log_loss"] - other["log_loss"]
        for one, other in zip(found, dense, strict=True)
    ]
    record = {"mean": round(statistics.mean(paired), 5)}
    if len(paired) > 1:
        error = statistics.stdev(paired) / len(paired) ** 0.5
        record["standard_error"] = round(error, 5)
    return record


def _summaries(figures: list[dict[str, float]]) -> dict[str, Any]:
    return {
        name: measure.summary([found[name] for found in figures])
        for name in figures[0]
    }


# By name, what fills its place in the record; `met` says what it came to.
_PARTS: dict[str, Callable[[programs.Options], dict[str, Any]]] = {
    "coordinated": labels_exchange.coordinated,
    "sampled": _sampled,
    "language_model": _language_model,
    "served": labels_served.served,
    "outage": labels_served.outage,
}


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Measures the parts and fills the record.

    Args:
        options: The options of the command line.
        record: What will be printed.
    """
    measure.fill_parts(record, "labels", _PARTS, options)


def _add_options(options: programs.Flags) -> None:
    options.add(
        "parts", "what to measure", list(_PARTS), enum_values=list(_PARTS)
    )
    labels_exchange.add_options(options)
    options.add("num_classes", "of the output layer", 32_000)
    options.add("features", "that the output layer gets", 256)
    options.add("rows", "of its batch, positions of sequences", 512)
    options.add("num_sampled", "classes that SampledOutput draws", 1024)
    options.add("k", "classes that a label names", 32)
    options.add("rounds", "turns of each output layer", 15, quick=3)
    options.add("num_seeds", "teachers of the language model", 6, quick=1)
    options.add(
        "language_steps", "of each training, a multiple of 5", 1500, quick=20
    )
    options.add("served_units", "of hidden layers beside a server", 1024)
    options.add("served_batch_size", "rows of a request", 512)
    options.add("served_steps", "of each turn beside a server", 24, quick=8)
    options.add("outage_secs", "between two faults", 120.0, quick=1.0)


PROGRAM = measure.program("labels", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
