"""CIFAR-10: real photographs in ten classes, and small ResNets for them."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from models import rates
from models import residual
from models.cifar10 import files
from tfdistill import data as tfdistill_data

INPUT_SHAPE = files.IMAGE_SHAPE
NUM_CLASSES = len(files.CLASSES)
load = files.load

# For the training images in [0, 1], per color channel.
_MEAN = (0.4913, 0.4821, 0.4465)
_VARIANCE = (0.0601, 0.0589, 0.0679)
_PADDING = 4
_WIDTH = 16


def workload(
    learning_rate: float = 0.1,
    batch_size: int = 128,
    num_steps: int = 12_500,
    evaluate_every_steps: int = 500,
    warmup_steps: int = 400,
    depth: int = 20,
    norm: str = "group",
    num_train: int | None = None,
    num_test: int | None = None,
    data_dir: str | None = None,
    burn_in_steps: int = 2000,
    ramp_steps: int = 1000,
    weight: float = 1.0,
    temperature: float = 1.0,
    every_steps: int = 100,
    refresh_every_steps: int = 20,
) -> tfdistill.Workload:
    """Returns a run of ResNet-20 on CIFAR-10: 64 epochs of a group's half.

    For GPUs, or patience: on two cores a step takes seconds.
    """
    return tfdistill.Workload(
        model=lambda: build_model(depth=depth, norm=norm),
        data=functools.partial(
            make_datasets,
            num_train=num_train,
            num_test=num_test,
            data_dir=data_dir,
        ),
        schema=make_schema,
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        checkpoints="best",
        optimizer=lambda: keras.optimizers.SGD(
            rates.cosine(learning_rate, num_steps, warmup_steps=warmup_steps),
            momentum=0.9,
            nesterov=True,
            global_clipnorm=5.0,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
            from_logits=True, temperature=temperature
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, ramp_steps=ramp_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
    )


def small(
    learning_rate: float = 2e-3,
    batch_size: int = 64,
    num_steps: int = 800,
    evaluate_every_steps: int = 100,
    depth: int = 8,
    norm: str = "group",
    num_train: int = 10_000,
    num_test: int = 1_000,
    data_dir: str | None = None,
    burn_in_steps: int = 200,
    ramp_steps: int = 100,
    weight: float = 1.0,
    temperature: float = 1.0,
    every_steps: int = 25,
    refresh_every_steps: int = 5,
) -> tfdistill.Workload:
    """Returns a short run on 10,000 images of CIFAR-10: minutes on 2 cores."""
    given = dict(locals())
    rate = keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
    return dataclasses.replace(
        workload(**given, warmup_steps=0),
        checkpoints="none",
        optimizer=lambda: keras.optimizers.Adam(rate, global_clipnorm=5.0),
    )


def make_datasets(
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
    num_train: int | None = None,
    num_test: int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    For the common arguments see `models`. Elements are (images float32 `[batch,
    32, 32, 3]` in [0, 1], labels int64 `[batch]`). Training images are padded,
    cropped at random and flipped at random; which way depends on the seed, the
    group and the step.

    Further arguments:
        num_train: Use only so many training images, over all groups. Default
            None: all.
        num_test: Use only so many test images. Default None: all.
        data_dir: As for `load`.
        cache_dir: As for `load`.
    """
    train, test = load(data_dir=data_dir, cache_dir=cache_dir)
    train = _first(train, num_train, "num_train")
    test = _first(test, num_test, "num_test")
    train = tfdistill_data.group_shard(train, cluster, mode=mode)
    train_batches = tfdistill_data.shuffled_batches(
        len(train[1]),
        batch_size=batch_size,
        seed=seed,
        group=cluster.group,
        examples="images",
        read=_augmented(train, seed=seed, group=cluster.group),
    )
    validation = tf.data.Dataset.from_tensor_slices(test)
    validation = validation.batch(batch_size).map(_to_float)
    return train_batches, validation.prefetch(tf.data.AUTOTUNE)


def _first(
    arrays: files.Arrays, num_images: int | None, name: str
) -> files.Arrays:
    images, labels = arrays
    if num_images is None:
        return images, labels
    if not 1 <= num_images <= len(labels):
        raise ValueError(
            f"`{name}` must be from 1 to {len(labels)}; received {num_images}."
        )
    return images[:num_images], labels[:num_images]


def _augmented(
    arrays: files.Arrays, *, seed: int, group: int
) -> Callable[[tf.data.Dataset, int], tf.data.Dataset]:
    """Returns what makes images of batches of indices from a step on."""
    # Made once, outside the traced function: not a constant of its graph.
    images, labels = (tf.constant(np.asarray(array)) for array in arrays)
    # Another pair of numbers than the one that orders the images.
    base = tf.constant([seed, -1 - group], tf.int64)

    def read(step: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        fold = tf.random.experimental.stateless_fold_in(base, step)
        pixels = augment(tf.gather(images, rows), seed=fold)
        return _to_float(pixels, tf.gather(labels, rows))

    return lambda batches, first: batches.enumerate(first).map(
        read, num_parallel_calls=tf.data.AUTOTUNE
    )


def augment(images: tf.Tensor, *, seed: tf.Tensor) -> tf.Tensor:
    """Returns each image cropped at random from its padding, or mirrored.

    Four black pixels are added on each side, as in He et al. 2015 (section
    4.2 of arXiv:1512.03385).

    The two int64 numbers of the seed determine the result.
    """
    batch_size, height, width = (tf.shape(images)[axis] for axis in range(3))
    seeds = tf.random.split(seed, 2)
    offsets = tf.random.stateless_uniform(
        [2, batch_size, 1], seeds[0], maxval=2 * _PADDING + 1, dtype=tf.int32
    )
    border = [_PADDING, _PADDING]
    padded = tf.pad(images, [[0, 0], border, border, [0, 0]])
    rows, columns = offsets[0] + tf.range(height), offsets[1] + tf.range(width)
    mirrored = tf.random.stateless_uniform([batch_size, 1], seeds[1]) < 0.5
    columns = tf.where(mirrored, columns[:, ::-1], columns)
    cropped = tf.gather(padded, rows, axis=1, batch_dims=1)
    return tf.gather(cropped, columns, axis=2, batch_dims=1)


def _to_float(
    images: tf.Tensor, labels: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(images, tf.float32) / 255.0, labels


def make_schema(**arguments: Any) -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups."""
    return {
        "labels": list(files.CLASSES),
        "preprocessing": {"shape": INPUT_SHAPE, "divided_by": 255},
    }


def build_model(
    *,
    depth: int = 20,
    norm: str = "group",
) -> keras.Model:
    """Returns a residual network for small images.

    Three stages of basic blocks with 16, 32 and 64 channels (He et al. 2015,
    section 4.2 of arXiv:1512.03385), with 1x1 convolutions if the shape
    changes. Weights are not decayed here.

    Args:
        depth: Layers with weights: 6 n + 2 for n blocks a stage. Default 20.
        norm: `"group"` (default; every worker computes the same) or
            `"batch"`, whose moving statistics differ between workers.

    Returns:
        A model from images in [0, 1], `[batch, 32, 32, 3]`, to float32 logits
        `[batch, 10]`.
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ValueError(
            "`depth` must be 6 n + 2 with n >= 1 (8, 14, 20, 32, ...); "
            f"received {depth}."
        )
    residual.check(width=_WIDTH, norm=norm)
    inputs = keras.Input(INPUT_SHAPE, name="image")
    x = keras.layers.Normalization(mean=_MEAN, variance=_VARIANCE)(inputs)
    x = keras.layers.ReLU()(residual.convolve(x, _WIDTH, size=3, norm=norm))
    for stage in range(3):
        for block in range(blocks):
            strides = 2 if stage and not block else 1
            x = _block(x, _WIDTH * 2**stage, strides=strides, norm=norm)
    x = keras.layers.GlobalAveragePooling2D()(x)
    # float32 even under a mixed policy: losses want exact logits.
    logits = keras.layers.Dense(NUM_CLASSES, dtype="float32", name="logits")(x)
    return keras.Model(inputs, logits, name="cifar10")


def _block(
    x: keras.KerasTensor, filters: int, *, strides: int, norm: str
) -> keras.KerasTensor:
    shortcut = x
    if strides > 1 or x.shape[-1] != filters:
        shortcut = residual.convolve(
            x, filters, size=1, strides=strides, norm=norm
        )
    x = residual.convolve(x, filters, size=3, strides=strides, norm=norm)
    x = keras.layers.ReLU()(x)
    x = residual.convolve(x, filters, size=3, norm=norm)
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))
