"""ImageNet: 1,281,167 photographs of 1,000 classes, and ResNet-50 for them."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from models import files as data_files
from models import rates
from models import residual
from models.imagenet import files
from models.imagenet import images
from tfdistill import data as tfdistill_data

# For the training images in [0, 1], per color channel.
_MEAN = (0.485, 0.456, 0.406)
_VARIANCE = (0.229**2, 0.224**2, 0.225**2)
_BLOCKS = {
    26: (2, 2, 2, 2),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
_EXPANSION = 4
_convolve = functools.partial(
    residual.convolve, batch_norm={"momentum": 0.9, "epsilon": 1e-5}
)


def workload(
    learning_rate: float = 6.4,
    weight_decay: float = 1e-4,
    batch_size: int = 16_384,
    num_steps: int = 7020,
    evaluate_every_steps: int = 390,
    warmup_steps: int = 390,
    boundaries: Sequence[int] = (2340, 4680, 6240),
    learning_boundaries: Sequence[int] = (2808, 5928, 6864),
    learning_decay_factors: Sequence[float] = (0.1, 0.0, 0.0),
    path: str | None = None,
    image_size: int = 224,
    num_classes: int = 1000,
    depth: int = 50,
    width: int = 64,
    norm: str = "batch",
    burn_in_steps: int = 3000,
    weight: float = 1.0,
    temperature: float = 1.0,
    every_steps: int = 50,
    refresh_every_steps: int = 10,
) -> tfdistill.Workload:
    """Returns a run of ResNet-50 on ImageNet at batch 16,384, for clusters.

    The large-batch setting of Anil et al. 2018 (arXiv:1804.03235), by the
    recipe of Goyal et al. 2017 (arXiv:1706.02677): 78 steps are a pass over
    the 1,281,167 images, and the run has 90 of them; two groups that share
    the images out see each their half twice as often. The rate rises to
    0.1 x batch / 256 in 5 passes and drops after 30, 60 and 80. A group that
    learns from others drops later, and its weight decay falls with the rate,
    as Sodhani et al. 2020 (arXiv:2010.02838) found needful: 36, 76 and 88
    passes are their schedule at twice its length. Keras keeps the rate in the
    momentum and does not correct it at a drop (Goyal et al., remark 2). On
    hardware for it override dtype_policy=mixed_bfloat16.
    """
    source: dict[str, Any] = {
        "path": path,
        "image_size": image_size,
    }

    def optimizer(drops: Sequence[int], decay: Any) -> Any:
        sgd = tfdistill.optimizers.with_kernel_decay(
            keras.optimizers.SGD, coupled=True
        )
        rate = rates.stepped(
            learning_rate, drops, warmup_steps=warmup_steps, warmup_share=0.1
        )
        return sgd(rate, momentum=0.9, nesterov=True, weight_decay=decay)

    return tfdistill.Workload(
        model=lambda: build_model(
            depth=depth,
            width=width,
            norm=norm,
            image_size=image_size,
            num_classes=num_classes,
        ),
        data=functools.partial(
            make_datasets, num_classes=num_classes, **source
        ),
        schema=functools.partial(make_schema, **source),
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        checkpoints="best",
        optimizer=lambda: optimizer(
            learning_boundaries,
            rates.piecewise(
                weight_decay, learning_boundaries, learning_decay_factors
            ),
        ),
        optimizer_alone=lambda: optimizer(boundaries, weight_decay),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
            from_logits=True, temperature=temperature
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
    )


def make_datasets(
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
    path: data_files.Path | None = None,
    image_size: int = 224,
    num_classes: int = 1000,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    For the common arguments see `models`. Elements are (images float32 `[batch,
    image_size, image_size, 3]` in [0, 1], labels int64 `[batch]`). Workers
    decode only their own training images if the batch size is a multiple of
    their number; only `fit` can read such data. A training image is a random
    part of a photograph, by chance mirrored; which depends on the seed, the
    group and the step. A validation image is the middle of its photograph.

    Further arguments:
        path: A directory with `train/<class>/<image>` and
            `val/<class>/<image>` (.jpg, .jpeg or .png). Default None: the
            `imagenet2012` that TensorFlow Datasets has prepared.
        image_size: Height and width of the images. Default 224.
        num_classes: Number of classes in the data. Default 1000.
    """
    if image_size < 1:
        raise ValueError(f"`image_size` must be >= 1; received {image_size}.")
    source = files.find(path)
    if source.num_classes != num_classes:
        raise ValueError(
            "`num_classes` must match the data, which have "
            f"{source.num_classes}; received {num_classes}. Override "
            "num_classes."
        )
    share = functools.partial(
        tfdistill_data.worker_shard,
        cluster=cluster,
        global_batch_size=batch_size,
    )
    encoded, num_images = source.train(
        cluster, mode=mode, seed=seed, share=share
    )
    tfdistill_data.check_batch_size(
        batch_size, num_examples=num_images, examples="images"
    )
    auto = tf.data.AUTOTUNE
    # Another pair of numbers than the one that orders the images.
    base = tf.constant([seed, -1 - cluster.group], tf.int64)

    def crop(
        number: tf.Tensor, example: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        fold = tf.random.experimental.stateless_fold_in(base, number)
        image, label = example
        return images.random_crop(image, size=image_size, seed=fold), label

    def batches(first: int) -> tf.data.Dataset:
        cropped = encoded(first * batch_size).map(crop, num_parallel_calls=auto)
        return cropped.batch(batch_size, drop_remainder=True).prefetch(auto)

    validation = source.validation().map(
        lambda image, label: (
            images.central_crop(image, size=image_size),
            label,
        ),
        num_parallel_calls=auto,
    )
    validation = validation.batch(batch_size)
    return tfdistill_data.resumable(batches), validation.prefetch(auto)


def make_schema(
    *,
    path: data_files.Path | None = None,
    image_size: int = 224,
    **arguments: Any,
) -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups."""
    return {
        "labels": files.find(path).class_names,
        "preprocessing": {"image_size": image_size, "range": [0, 1]},
    }


def build_model(
    *,
    depth: int = 50,
    width: int = 64,
    norm: str = "batch",
    image_size: int = 224,
    num_classes: int = 1000,
) -> keras.Model:
    """Returns a residual network of bottleneck blocks.

    ResNet-50 (He et al. 2015, arXiv:1512.03385) as Goyal et al. 2017
    (arXiv:1706.02677, section 5.1) train it: strides in the 3x3
    convolutions, the last normalization of each block starts at zero, so that
    blocks begin as the identity, and the classifier's weights are drawn with
    standard deviation 0.01. Built of Keras' layers: `keras.applications`
    has strides elsewhere, biases in the convolutions, and other
    normalization settings. Weights are not decayed here.

    Args:
        depth: 26, 50 (default), 101 or 152 layers with weights.
        width: Channels of the first stage; a multiple of 8. Default 64.
        norm: `"batch"` (default; over a replica's own rows, with momentum
            0.9; moving statistics differ between workers) or `"group"`
            (every worker computes the same).
        image_size: Height and width of the images. Default 224.
        num_classes: Number of classes. Default 1000.

    Returns:
        A model from images in [0, 1], `[batch, image_size, image_size, 3]`,
        to float32 logits `[batch, num_classes]`.
    """
    if depth not in _BLOCKS:
        raise ValueError(
            f"`depth` must be one of {', '.join(map(str, _BLOCKS))}; "
            f"received {depth}."
        )
    residual.check(width=width, norm=norm)
    inputs = keras.Input((image_size, image_size, 3), name="image")
    x = keras.layers.Normalization(mean=_MEAN, variance=_VARIANCE)(inputs)
    x = keras.layers.ReLU()(_convolve(x, width, size=7, strides=2, norm=norm))
    x = keras.layers.MaxPooling2D(3, strides=2, padding="same")(x)
    for stage, num_blocks in enumerate(_BLOCKS[depth]):
        for block in range(num_blocks):
            strides = 2 if stage and not block else 1
            x = _block(x, width * 2**stage, strides=strides, norm=norm)
    x = keras.layers.GlobalAveragePooling2D()(x)
    # float32 even under a mixed policy: losses want exact logits.
    logits = keras.layers.Dense(
        num_classes,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),
        dtype="float32",
        name="logits",
    )(x)
    return keras.Model(inputs, logits, name="imagenet")


def _block(
    x: keras.KerasTensor, filters: int, *, strides: int, norm: str
) -> keras.KerasTensor:
    shortcut, wide = x, _EXPANSION * filters
    if strides > 1 or x.shape[-1] != wide:
        shortcut = _convolve(x, wide, size=1, strides=strides, norm=norm)
    x = keras.layers.ReLU()(_convolve(x, filters, size=1, norm=norm))
    x = _convolve(x, filters, size=3, strides=strides, norm=norm)
    x = keras.layers.ReLU()(x)
    x = _convolve(x, wide, size=1, norm=norm, gamma="zeros")
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))
