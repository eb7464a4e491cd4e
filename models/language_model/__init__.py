"""A language model: which sub-word comes next, by LSTMs over real text."""

import dataclasses
import functools
from typing import Any

import keras
import tensorflow as tf

import tfdistill
from models import files as data_files
from models import rates
from models.language_model import batches
from models.language_model import lstm
from models.language_model import text
from models.language_model import tokens


def workload(
    learning_rate: float = 1e-3,
    batch_size: int = 128,
    num_steps: int = 20_000,
    evaluate_every_steps: int = 1000,
    steps_per_execution: int = 1,
    warmup_steps: int = 500,
    path: Any = None,
    vocabulary_size: int = 24_000,
    sequence_length: int = 32,
    validation_fraction: float = 0.01,
    num_train_tokens: int | None = None,
    num_validation_tokens: int | None = None,
    embedding_dim: int = 256,
    units: int = 1024,
    num_layers: int = 2,
    burn_in_steps: int = 2000,
    ramp_steps: int = 1000,
    weight: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    every_steps: int = 50,
    refresh_every_steps: int = 10,
    **text_options: Any,
) -> tfdistill.Workload:
    """Returns a run of the paper's language model on reviews, for clusters.

    The sizes of Anil et al. 2018 (arXiv:1804.03235), section 3.1: an embedding
    of 256, two layer-normalized LSTMs of 1024 units, 24,000 sub-words, Adam,
    an exchange every 50 steps, and 128 sequences of 32 tokens for each worker:
    set `batch_size` to 128 times the workers of a group. For more text set
    `path`, to `tfds:c4/en` for example, and how much of it by
    `num_train_tokens` and `num_validation_tokens`. With `top_k`, teachers are
    compared by their likeliest sub-words only. Further arguments are passed to
    `open_tokens`.
    """
    options = {
        **text_options,
        "path": path,
        "vocabulary_size": vocabulary_size,
        "validation_fraction": validation_fraction,
        "num_train_tokens": num_train_tokens,
        "num_validation_tokens": num_validation_tokens,
    }
    return tfdistill.Workload(
        model=lambda: build_model(
            vocabulary_size=vocabulary_size,
            sequence_length=sequence_length,
            embedding_dim=embedding_dim,
            units=units,
            num_layers=num_layers,
        ),
        data=functools.partial(
            make_datasets, sequence_length=sequence_length, **options
        ),
        schema=functools.partial(make_schema, **options),
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        steps_per_execution=steps_per_execution,
        checkpoints="best",
        optimizer=lambda: keras.optimizers.Adam(
            rates.cosine(learning_rate, num_steps, warmup_steps=warmup_steps),
            global_clipnorm=1.0,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
            from_logits=True, temperature=temperature, top_k=top_k
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, ramp_steps=ramp_steps, weight=weight
        ),
        every_steps=every_steps,
        refresh_every_steps=refresh_every_steps,
    )


def small(
    learning_rate: float = 3e-3,
    weight_decay: float | None = None,
    decays: bool = False,
    batch_size: int = 32,
    num_steps: int = 1500,
    evaluate_every_steps: int = 150,
    steps_per_execution: int = 5,
    vocabulary_size: int = 2000,
    validation_fraction: float = 0.05,
    num_train_tokens: int | None = 1_000_000,
    num_validation_tokens: int | None = 40_000,
    embedding_dim: int = 128,
    units: int = 128,
    num_layers: int = 1,
    burn_in_steps: int = 300,
    ramp_steps: int = 150,
    **others: Any,
) -> tfdistill.Workload:
    """Returns a short run on a million tokens of reviews: minutes on a core.

    A group sees its half three times: a constant learning rate, so that runs
    can be compared at any step; with `decays`, one that falls to zero by a
    cosine. Set `num_train_tokens` for more or less text.
    Further arguments are passed to `workload`.
    """
    given = dict(locals())
    del given["weight_decay"], given["decays"]

    def optimizer() -> keras.optimizers.Optimizer:
        schedules, rate = keras.optimizers.schedules, learning_rate
        kind: Any = keras.optimizers.Adam
        if weight_decay is not None:
            kind = tfdistill.optimizers.with_kernel_decay(kind, coupled=False)
        return kind(
            schedules.CosineDecay(rate, num_steps) if decays else rate,
            weight_decay=weight_decay,
            global_clipnorm=1.0,
        )

    return dataclasses.replace(
        workload(**given.pop("others"), **given),
        checkpoints="none",
        optimizer=optimizer,
    )


def make_datasets(
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
    path: data_files.Paths | None = None,
    sequence_length: int = 32,
    **text_options: Any,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    The text is made into tokens once, into `cache_dir`. Documents follow each
    other, each with a token for its end, and are cut into windows. For the
    common arguments see `models`. Elements are (tokens int32 `[batch,
    sequence_length]`, labels int32 alike: the token that follows each). Both
    data sets can be sent to processes that see the same `cache_dir`.

    Further arguments:
        path: As for `open_tokens`.
        sequence_length: Tokens of a window. Default 32.
        **text_options: The others of `open_tokens`.
    """
    if sequence_length < 1:
        raise ValueError(
            f"`sequence_length` must be >= 1; received {sequence_length}."
        )
    tokens = open_tokens(path=path, **text_options)
    train = batches.train_batches(
        tokens,
        cluster,
        batch_size=batch_size,
        sequence_length=sequence_length,
        mode=mode,
        seed=seed,
    )
    validation = batches.validation_batches(
        tokens,
        batch_size=batch_size,
        sequence_length=sequence_length,
    )
    return train, validation


def make_schema(**arguments: Any) -> dict[str, Any]:
    """Returns what inputs and outputs mean: the vocabulary.

    Groups whose machines made it from other text have other sub-words.
    """
    arguments.pop("sequence_length", None)
    return {"vocabulary": open_tokens(**arguments).vocabulary}


def open_tokens(
    *,
    path: data_files.Paths | None = None,
    cache_dir: data_files.Path | None = None,
    **options: Any,
) -> tokens.Tokens:
    """Returns the tokens of a text, which are made at the first call.

    Args:
        path: `.txt` files with a document on each line, `.tsv` files whose
            last TAB field is one, both also with `.gz` or `.xz`; patterns;
            directories; or `tfds:NAME[SPLIT]` of TensorFlow Datasets.
            Default: `imdb` in the data directory, which is the environment
            variable TFDISTILL_DATA, else `../shared/data` beside the
            repository.
        cache_dir: Where the tokens are kept. Default: `tfdistill` in the
            user's cache directory.
        **options: Arguments of `tokens.Options`.
    """
    return tokens.open_or_tokenize(
        text.sources(data_files.data_dir() / "imdb" if path is None else path),
        options=tokens.Options(**options),
        cache_dir=cache_dir,
    )


def build_model(
    *,
    vocabulary_size: int = tokens.DEFAULT_VOCABULARY_SIZE,
    sequence_length: int = 32,
    embedding_dim: int = 256,
    units: int = 1024,
    num_layers: int = 2,
) -> keras.Model:
    """Returns LSTMs over an embedding, with logits for each next token.

    The default sizes are from Anil et al. 2018 (arXiv:1804.03235), section
    3.1: an embedding of 256, two layers of 1024 units with layer
    normalization, and 24,000 sub-words. The state is zero at the beginning of
    each window.

    Args:
        vocabulary_size: As for `make_datasets`. Default 24,000.
        sequence_length: As for `make_datasets`. Default 32.
        embedding_dim: Numbers a token is embedded in, >= 1. Default 256.
        units: Units of each LSTM layer, >= 1. Default 1024.
        num_layers: LSTM layers, >= 1. Default 2.

    Returns:
        A model from tokens int32 `[batch, sequence_length]` to float32 logits
        `[batch, sequence_length, vocabulary_size]`.
    """
    sizes = {
        "vocabulary_size": vocabulary_size,
        "sequence_length": sequence_length,
        "embedding_dim": embedding_dim,
        "units": units,
        "num_layers": num_layers,
    }
    for argument, value in sizes.items():
        if value < 1:
            raise ValueError(f"`{argument}` must be >= 1; received {value}.")
    tokens = keras.Input((sequence_length,), dtype="int32", name="tokens")
    x = keras.layers.Embedding(vocabulary_size, embedding_dim)(tokens)
    for _ in range(num_layers):
        x = lstm.LayerNormLSTM(units)(x)
    # float32 even under a mixed policy: losses want exact logits.
    logits = keras.layers.Dense(vocabulary_size, dtype="float32", name="logits")
    return keras.Model(tokens, logits(x), name="language_model")
