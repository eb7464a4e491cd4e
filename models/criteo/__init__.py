"""Criteo's display ads: data sets, schema and network."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from models import files as data_files
from models.criteo import batches
from models.criteo import converted
from models.criteo import networks

build_model, build_dlrm = networks.build_model, networks.build_dlrm


def workload(
    learning_rate: float = 1e-3,
    initial_accumulator_value: float = 0.1,
    decays_linearly: bool = False,
    batch_size: int = 512,
    num_steps: int = 36_000,
    evaluate_every_steps: int = 2000,
    steps_per_execution: int = 10,
    embedding_dim: int = 16,
    hidden_units: Sequence[int] = (2560, 1024, 256),
    field_sizes: int = 200_000,
    min_count: int = 10,
    burn_in_steps: int = 4000,
    ramp_steps: int = 2000,
    weight: float = 1.0,
    every_steps: int = 500,
    refresh_every_steps: int = 100,
    **data_options: Any,
) -> tfdistill.Workload:
    """Returns a run on Criteo's clicks with the paper's layers, for clusters.

    The network of Anil et al. 2018 (arXiv:1804.03235): 2560, 1024 and 256
    units, Adagrad. For the 45.8 million rows of the whole log: about one
    epoch of a group's half, on parameter servers. Further arguments, such as
    `path`, are passed to `make_datasets`.
    """
    options = {
        **data_options,
        "field_sizes": field_sizes,
        "min_count": min_count,
    }
    return tfdistill.Workload(
        # The tables must have the sizes that the rows are hashed for.
        model=lambda: build_model(
            field_sizes=field_sizes,
            embedding_dim=embedding_dim,
            hidden_units=hidden_units,
        ),
        data=functools.partial(make_datasets, **options),
        schema=functools.partial(make_schema, **options),
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        steps_per_execution=steps_per_execution,
        optimizer=lambda: keras.optimizers.Adagrad(
            keras.optimizers.schedules.PolynomialDecay(
                learning_rate, num_steps, 0.0
            )
            if decays_linearly
            else learning_rate,
            initial_accumulator_value=initial_accumulator_value,
        ),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.AUC(from_logits=True, name="auc")],
        distillation_loss=tfdistill.losses.BinarySoftTargetCrossEntropy(
            from_logits=True
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, ramp_steps=ramp_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
    )


def dlrm(
    batch_size: int = 512,
    num_steps: int = 36_000,
    evaluate_every_steps: int = 2000,
    embedding_dim: int = 16,
    bottom_units: Sequence[int] = (512, 256, 64),
    top_units: Sequence[int] = (512, 256),
    num_crosses: int = 0,
    rank: int = 64,
    field_sizes: int = 200_000,
    **others: Any,
) -> tfdistill.Workload:
    """Returns the run of `criteo` with a DLRM in the place of its network.

    The network of Naumov et al. 2019 (arXiv:1906.00091), of keras-rs' layers:
    `pip install tfdistill[recommenders]`. With `num_crosses`, cross layers are
    in the place of products. Further arguments are passed to `workload`.
    """
    return dataclasses.replace(
        workload(
            batch_size=batch_size,
            num_steps=num_steps,
            evaluate_every_steps=evaluate_every_steps,
            field_sizes=field_sizes,
            **others,
        ),
        model=lambda: build_dlrm(
            field_sizes=field_sizes,
            embedding_dim=embedding_dim,
            bottom_units=bottom_units,
            top_units=top_units,
            num_crosses=num_crosses,
            rank=rank,
        ),
    )


def dcn(
    num_steps: int = 36_000,
    evaluate_every_steps: int = 2000,
    num_crosses: int = 3,
    rank: int = 64,
    **others: Any,
) -> tfdistill.Workload:
    """Returns the run of `criteo_dlrm` with the cross layers of DCN-v2.

    Wang et al. 2021 (arXiv:2008.13535), in `models.dlrm`: no further package
    is needed. Further arguments are passed to `dlrm`.
    """
    return dlrm(
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        num_crosses=num_crosses,
        rank=rank,
        **others,
    )


def small(
    learning_rate: float = 3e-3,
    # Rows of few examples see tiny gradients: with Keras' 0.1 to start from,
    # the tables hardly learn in so few steps (log loss 0.496).
    initial_accumulator_value: float = 1e-6,
    batch_size: int = 128,
    num_steps: int = 300,
    evaluate_every_steps: int = 50,
    steps_per_execution: int = 5,
    hidden_units: Sequence[int] = (256, 128, 64),
    field_sizes: int = 2000,
    min_count: int = 5,
    burn_in_steps: int = 60,
    ramp_steps: int = 30,
    # So often that ten intervals, after which a silent peer fades, are a small
    # part of the run.
    every_steps: int = 5,
    refresh_every_steps: int = 5,
    **others: Any,
) -> tfdistill.Workload:
    """Returns a run on some thousand rows of clicks: a minute on 2 cores.

    Further arguments are passed to `workload`.
    """
    given = dict(locals())
    return workload(**given.pop("others"), **given)


def make_datasets(
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
    path: data_files.Paths | None = None,
    cache_dir: data_files.Path | None = None,
    **options: Any,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    The text is converted once, into `cache_dir`. An integer v becomes
    `sign(v) * log(1 + |v|)`, and a missing one 0. A category becomes a row of
    its column's table: 0 if missing, 1 if rare, else 2 + hash % (size - 2). The
    hash is of the column and the text, and the same on all machines.

    For the common arguments see `models`. Elements are (`{"integers": float32
    [batch, 13], "categories": int32 [batch, 26]}`, labels float32 `[batch,
    1]`). Both data sets can be sent to processes that see the same
    `cache_dir`.

    Further arguments:
        path: Files, patterns or directories of TAB-separated rows (a label, 13
            integers, 26 categories), plain or gzip, in the order of time; or
            `tfds:NAME` of TensorFlow Datasets, see `models.criteo.tfds`.
            Default: `criteo` in the data directory, which is the environment
            variable TFDISTILL_DATA, else `../shared/data` beside the
            repository.
        cache_dir: Where the converted rows are kept. Default: `tfdistill` in
            the user's cache directory.
        **options: Arguments of `converted.Options`.
    """
    binary = converted.open_or_convert(
        data_files.data_dir() / "criteo" if path is None else path,
        options=converted.Options(**options),
        cache_dir=cache_dir,
    )
    train = batches.train_batches(
        binary, cluster, batch_size=batch_size, mode=mode, seed=seed
    )
    return train, batches.validation_batches(binary, batch_size=batch_size)


def make_schema(
    *,
    field_sizes: int | Sequence[int] = converted.DEFAULT_FIELD_SIZE,
    min_count: int = 1,
    **arguments: Any,
) -> dict[str, Any]:
    """Returns what inputs and outputs mean, to compare between groups.

    With a `min_count` above 1, which categories are rare depends on the text
    too, and is not compared.
    """
    return {
        "labels": ["no click", "click"],
        "features": {
            "integers": {"missing": batches.MISSING},
            "field_sizes": converted.checked_field_sizes(field_sizes),
            "min_count": min_count,
        },
    }
