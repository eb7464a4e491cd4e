"""Quasi-global against local momentum, in a ring of groups with skewed data.

Four groups in one process take their steps in turn and average with their
neighbours after each, by the product's topology and rule. Each sees its part
of CIFAR-10 by `tfdistill.contrib.dirichlet_shard`. Both optimizers are SGD with
Nesterov's momentum 0.9, as in Lin et al. 2021 (arXiv:2102.04761, table 1: there
16 groups and residual networks). Each gets the best of the
same learning rates, by seeds that the report does not use. The figure is the
mean accuracy of the groups' own models on the whole test set, in percent.
"""

import functools
import statistics
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from benchmarks import measure
from models import cifar10
from tfdistill import mixing
from tfdistill.mixing import topologies
from tfdistill.system import programs

_TARGET_POINTS = 3.0
_MOMENTUM = 0.9
# Points of a curve.
_LOOKS = 10


def _images(options: programs.Options) -> list[Any]:
    """Smaller images in [-1, 1] and labels, of training and test."""
    factor = 32 // options.image_size
    found = []
    for (images, labels), number in zip(
        cifar10.load(), (options.num_train, options.num_test), strict=True
    ):
        pixels = tf.cast(images[:number], tf.float32) / 127.5 - 1.0
        pooled = tf.nn.avg_pool2d(pixels, factor, factor, "VALID")
        found.append((pooled, np.asarray(labels[:number])))
    return found


def _network(size: int) -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((size, size, 3)),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def _optimizer(name: str, rate: float) -> keras.optimizers.Optimizer:
    if name == "local":
        return keras.optimizers.SGD(rate, momentum=_MOMENTUM, nesterov=True)
    return tfdistill.contrib.QuasiGlobalMomentum(
        keras.optimizers.SGD(rate), momentum=_MOMENTUM, nesterov=True
    )


def _parts(options: programs.Options, seed: int) -> list[np.ndarray]:
    """The indices of each group's images; read once for each seed."""
    if seed not in options.parts_by_seed:
        labels = options.images[0][1]
        examples = tf.data.Dataset.from_tensor_slices(
            (np.arange(len(labels)), labels)
        )
        found = []
        for group in range(options.num_groups):
            part = tfdistill.contrib.dirichlet_shard(
                examples,
                tfdistill.Cluster(group=group, num_groups=options.num_groups),
                alpha=options.alpha,
                seed=seed,
                num_classes=10,
            )
            found.append(np.array([i for i, _ in part.as_numpy_iterator()]))
        options.parts_by_seed[seed] = found
    return options.parts_by_seed[seed]


class _Ring:
    """Groups that begin alike and differ in their data."""

    def __init__(
        self, name: str, rate: float, seed: int, options: programs.Options
    ) -> None:
        self._train, self._test = options.images
        self._options = options
        keras.utils.set_random_seed(seed)
        self._rule = mixing.ModelAveraging(1.0)
        first = _network(options.image_size)
        self._groups: list[tuple[keras.Model, Any]] = []
        for _ in range(options.num_groups):
            network = _network(options.image_size)
            network.set_weights(first.get_weights())
            optimizer = _optimizer(name, rate)
            optimizer.build(network.trainable_variables)
            self._groups.append((network, optimizer))
        self._batches = iter(self._data(seed))

    def _data(self, seed: int) -> tf.data.Dataset:
        """Indices of each group's batch, int64 `[groups, rows]`."""
        parts = []
        for group, own in enumerate(_parts(self._options, seed)):
            shuffled = tfdistill.data.shuffled_indices(
                len(own), seed=seed, group=group
            )
            rows = shuffled.map(functools.partial(tf.gather, own))
            parts.append(rows.batch(self._options.batch_size))
        return tf.data.Dataset.zip(tuple(parts)).map(
            lambda *rows: tf.stack(rows)
        )

    @tf.function(autograph=False)
    def _steps(self, batches: Any, num_steps: tf.Tensor) -> None:
        def step(done: tf.Tensor) -> tf.Tensor:
            self._step(batches.get_next())
            return done + 1

        tf.while_loop(
            lambda done: done < num_steps,
            step,
            [0],
            parallel_iterations=1,
        )

    def _step(self, rows: tf.Tensor) -> None:
        images, labels = self._train
        for group, (network, optimizer) in enumerate(self._groups):
            with tf.GradientTape() as tape:
                logits = network(tf.gather(images, rows[group]), training=True)
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(
                    tf.gather(labels, rows[group]), logits
                )
                loss = tf.reduce_mean(loss)
            variables = network.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
        self._mix()

    def _mix(self) -> None:
        """Averages with both neighbours; all read before anyone writes."""
        num_groups = len(self._groups)
        weights = [
            [tf.identity(v.value) for v in network.trainable_variables]
            for network, _ in self._groups
        ]
        for group, (network, _) in enumerate(self._groups):
            peers = topologies.Topology(
                "ring", group=group, num_groups=num_groups
            ).peers(0)
            taking_part = [weights[g] for g in (group, *peers)]
            mean = [
                tf.add_n(each) / len(each)
                for each in zip(*taking_part, strict=True)
            ]
            new, _ = self._rule.mixed(
                weights[group], mean, [], num=len(taking_part)
            )
            for variable, value in zip(
                network.trainable_variables, new, strict=True
            ):
                variable.assign(value)

    def accuracies(self) -> list[float]:
        """Percent of the test set, of each group's model."""
        images, labels = self._test
        return [
            100.0
            * float(
                np.mean(_predicted(network, images).argmax(axis=-1) == labels)
            )
            for network, _ in self._groups
        ]

    def curve(self) -> list[float]:
        """Trains; returns the groups' mean accuracy at equal distances."""
        found = []
        steps = tf.constant(self._options.num_steps // _LOOKS)
        for _ in range(_LOOKS):
            self._steps(self._batches, steps)
            found.append(round(statistics.mean(self.accuracies()), 2))
        return found


def _predicted(network: keras.Model, images: tf.Tensor) -> np.ndarray:
    return np.concatenate(
        [np.asarray(network(rows)) for rows in tf.split(images, 4)]
    )


def _best_rate(name: str, options: programs.Options) -> tuple[float, Any]:
    """The rate with the best accuracy at the end, and all accuracies."""
    ends: dict[float, float] = {}
    for rate in map(float, options.rates):
        curves = [
            _Ring(name, rate, 1000 + seed, options).curve()
            for seed in range(options.sweep_seeds)
        ]
        ends[rate] = statistics.mean(curve[-1] for curve in curves)
        measure.log(f"{name}: rate {rate}, accuracy {ends[rate]:.2f}")
    return max(ends, key=ends.__getitem__), ends


def quasi_global(options: programs.Options) -> dict[str, Any]:
    """Compares both optimizers seed by seed."""
    options.images, options.parts_by_seed = _images(options), {}
    names = ("local", "quasi_global")
    chosen = {name: _best_rate(name, options) for name in names}
    curves: dict[str, list[list[float]]] = {name: [] for name in names}
    for seed in range(options.num_seeds):
        for name in names:
            curve = _Ring(name, chosen[name][0], seed, options).curve()
            curves[name].append(curve)
            measure.log(f"seed {seed}: {name} {curve}")
    del options.images, options.parts_by_seed
    points = [
        quasi[-1] - local[-1]
        for quasi, local in zip(
            curves["quasi_global"], curves["local"], strict=True
        )
    ]
    found = round(statistics.mean(points), 2)
    error = statistics.stdev(points) / len(points) ** 0.5 if points[1:] else 0
    return {
        "met": found >= _TARGET_POINTS,
        "points_gained": found,
        "standard_error": round(error, 2),
        "at_least": _TARGET_POINTS,
        "by_seed": [round(point, 2) for point in points],
        **{
            name: {
                "rate": rate,
                "sweep": ends,
                "accuracy": measure.summary([c[-1] for c in curves[name]]),
                "curve": np.mean(curves[name], axis=0).round(2).tolist(),
            }
            for name, (rate, ends) in chosen.items()
        },
    }


def add_options(options: programs.Flags) -> None:
    """Adds the options of this part."""
    options.add("num_groups", "groups of the ring", 4)
    options.add("alpha", "of the Dirichlet proportions", 0.1)
    options.add("image_size", "8, 16 or 32 pixels", 8)
    options.add("num_train", "training images", 20_000, quick=2_000)
    options.add("num_test", "test images", 4_000, quick=400)
    options.add("batch_size", "images of a group's step", 32)
    options.add("num_steps", "of each training", 4_000, quick=40)
    options.add(
        "rates",
        "learning rates tried",
        ["0.005", "0.01", "0.02", "0.04"],
        quick=["0.01"],
    )
    options.add("sweep_seeds", "trainings for each rate", 1)
    options.add("num_seeds", "trainings that are compared", 6, quick=1)
