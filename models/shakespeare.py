"""Which character comes next: a small network over a few characters of text.

By default the text is tiny Shakespeare (Karpathy 2015), 1.1 million characters.
The network and the training examples are few, so that a step takes
milliseconds and a group soon has nothing more to learn from larger batches.
"""

import functools
import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdistill
from models import files as data_files
from tfdistill import data as tfdistill_data

_VOCABULARY_SIZE = 65  # Tiny Shakespeare's.
_SEQUENCE_LENGTH = 8
# Characters at the end of the text that are held out, and as many before them
# for choosing settings.
_NUM_HELD_OUT = 110_000
# What is held out, from the end of the text.
_PARTS = ("report", "tuning")
# Seed for the positions that are evaluated: not the seed of a run.
_POSITIONS_SEED = 0


def workload(
    learning_rate: float = 0.02,
    weight_decay: float | None = None,
    batch_size: int = 4096,
    num_steps: int = 300,
    evaluate_every_steps: int = 20,
    path: str | None = None,
    num_train: int = 200_000,
    validation: str = "report",
    vocabulary_size: int = 65,
    sequence_length: int = 8,
    burn_in_steps: int = 50,
    weight: float = 1.0,
    temperature: float = 1.0,
    every_steps: int = 100,
    refresh_every_steps: int = 5,
) -> tfdistill.Workload:
    """Returns a run on 200,000 characters of Shakespeare: seconds on 2 cores.

    A doubled batch does not help here: training is limited by overfitting. Set
    `path` for any other text. docs/results.md has the comparison.
    """
    schema = functools.partial(
        make_schema, path=path, vocabulary_size=vocabulary_size
    )

    def optimizer() -> keras.optimizers.Optimizer:
        rate = keras.optimizers.schedules.CosineDecay(learning_rate, num_steps)
        kind: Any = keras.optimizers.Adam
        if weight_decay is not None:
            kind = tfdistill.optimizers.with_kernel_decay(kind, coupled=False)
        return kind(rate, beta_2=0.99, weight_decay=weight_decay)

    return tfdistill.Workload(
        model=lambda: build_model(
            vocabulary_size=vocabulary_size, sequence_length=sequence_length
        ),
        data=functools.partial(
            make_datasets,
            path=path,
            num_train=num_train,
            validation=validation,
            sequence_length=sequence_length,
            vocabulary_size=vocabulary_size,
        ),
        schema=schema,
        batch_size=batch_size,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        # A backup would take longer than the steps between evaluations.
        backup_every_steps=num_steps,
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: ["accuracy"],
        distillation_loss=tfdistill.losses.SoftTargetCrossEntropy(
            from_logits=True, temperature=temperature
        ),
        distillation_weight=tfdistill.schedules.BurnIn(
            steps=burn_in_steps, weight=weight
        ),
        # At the steps 50, 150 and 250, in all groups. A step takes
        # milliseconds: versions must be seen soon.
        every_steps=every_steps,
        exporter={"offset_steps": every_steps // 2},
        refresh_every_steps=refresh_every_steps,
    )


def make_datasets(
    cluster: tfdistill.Cluster,
    *,
    batch_size: int,
    mode: str = "disjoint",
    seed: int = 0,
    path: data_files.Path | None = None,
    num_train: int = 200_000,
    num_validation: int = 8_000,
    validation: str = "report",
    sequence_length: int = _SEQUENCE_LENGTH,
    vocabulary_size: int = _VOCABULARY_SIZE,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Returns a group's training data and the common validation data.

    For the common arguments see `models`. Elements are (characters int32
    `[batch, sequence_length]`, labels int32 `[batch]`: the character that
    follows each). Disjoint parts of groups are consecutive pieces of the text.

    Further arguments:
        path: A text file in UTF-8. Default: `tinyshakespeare/input.txt` in the
            data directory, which is the environment variable TFDISTILL_DATA,
            else `../shared/data` beside the repository.
        num_train: Train on so many first characters. Default 200,000.
        num_validation: Positions that are asked about, drawn once and for all.
            Default 8,000.
        validation: `"report"` (default): of the last 110,000 characters; or
            `"tuning"`: of the 110,000 before them, to choose settings by. No
            character is in both.
        sequence_length: Characters that the network sees. Default 8.
        vocabulary_size: Different characters; see `make_schema`. Default 65.
    """
    text = _read(path)
    _check_length("num_train", num_train, sequence_length, len(text))
    first, last = _held_out(text, validation, num_train=num_train)
    symbols = _symbols(text, vocabulary_size)
    ids = tf.constant(_encoded(text, symbols))

    def gather(starts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        offsets = tf.range(sequence_length + 1, dtype=tf.int64)
        found = tf.gather(ids, starts[:, tf.newaxis] + offsets)
        return found[:, :-1], found[:, -1]

    begin, size = _share(num_train - sequence_length, cluster, mode)
    train = tfdistill_data.shuffled_batches(
        size,
        batch_size=batch_size,
        seed=seed,
        group=cluster.group,
        examples="positions",
        read=lambda rows, _: rows.map(lambda starts: gather(starts + begin)),
    )
    num_positions = last - first - sequence_length
    _check_length("num_validation", num_validation, 0, num_positions)
    drawn = np.random.default_rng(_POSITIONS_SEED).permutation(num_positions)
    asked = tf.data.Dataset.from_tensor_slices(first + drawn[:num_validation])
    asked = asked.batch(batch_size).map(gather)
    return train, asked.cache().prefetch(tf.data.AUTOTUNE)


def make_schema(
    *,
    path: data_files.Path | None = None,
    vocabulary_size: int = _VOCABULARY_SIZE,
    **arguments: Any,
) -> dict[str, Any]:
    """Returns what inputs and outputs mean: the characters, in order.

    A text with more than `vocabulary_size` characters keeps the most frequent
    ones; the last number then stands for all others, and is null here.
    """
    return {"characters": _symbols(_read(path), vocabulary_size)}


def build_model(
    *,
    vocabulary_size: int = _VOCABULARY_SIZE,
    sequence_length: int = _SEQUENCE_LENGTH,
) -> keras.Model:
    """Returns a network with one hidden layer over embedded characters.

    The network of Bengio et al. 2003 (A Neural Probabilistic Language Model)
    without its direct connections: embeddings of 8 numbers, and 96 hidden
    units; 13,065 parameters by default.

    Args:
        vocabulary_size: Different characters. Default 65.
        sequence_length: Characters that the network sees. Default 8.

    Returns:
        A model from int32 characters `[batch, sequence_length]` to float32
        logits `[batch, vocabulary_size]`.
    """
    inputs = keras.Input((sequence_length,), dtype="int32", name="characters")
    x = keras.layers.Embedding(vocabulary_size, 8)(inputs)
    x = keras.layers.Flatten()(x)
    x = keras.layers.Dense(96, activation="relu")(x)
    # float32 even under a mixed policy: losses want exact logits.
    dense = keras.layers.Dense(vocabulary_size, dtype="float32", name="logits")
    return keras.Model(inputs, dense(x), name="shakespeare")


def _read(path: data_files.Path | None) -> str:
    file = (
        data_files.data_dir() / "tinyshakespeare" / "input.txt"
        if path is None
        else pathlib.Path(path)
    )
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise ValueError(
            f"`path` must be a text file in UTF-8; received {str(file)!r}: "
            f"{cause}. Override path, or set TFDISTILL_DATA to the directory "
            "that contains tinyshakespeare/input.txt."
        ) from cause


def _symbols(text: str, vocabulary_size: int) -> list[str | None]:
    if vocabulary_size < 2:
        raise ValueError(
            f"`vocabulary_size` must be >= 2; received {vocabulary_size}."
        )
    found, counts = np.unique(_code_points(text), return_counts=True)
    if len(found) <= vocabulary_size:
        return [chr(point) for point in found]
    # Stable: of equally frequent ones the first.
    often = np.argsort(-counts, kind="stable")[: vocabulary_size - 1]
    return [*(chr(point) for point in np.sort(found[often])), None]


def _encoded(text: str, symbols: list[str | None]) -> np.ndarray:
    """Returns the number of each character, int32 `[characters]`."""
    known = np.array([ord(symbol) for symbol in symbols if symbol], np.uint32)
    points = _code_points(text)
    places = np.minimum(np.searchsorted(known, points), len(known) - 1)
    found = np.where(known[places] == points, places, len(known))
    return found.astype(np.int32)


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _held_out(text: str, part: str, *, num_train: int) -> tuple[int, int]:
    """Returns where the held-out characters begin and end."""
    if part not in _PARTS:
        raise ValueError(
            f"`validation` must be one of {', '.join(_PARTS)}; received "
            f"{part!r}."
        )
    last = len(text) - _PARTS.index(part) * _NUM_HELD_OUT
    first = last - _NUM_HELD_OUT
    if first < num_train:
        raise ValueError(
            f"`num_train` must leave {len(text) - first} characters at the end "
            f'of the text for validation="{part}"; received {num_train} of '
            f"{len(text)}. Use a longer text, or a smaller num_train."
        )
    return first, last


def _check_length(name: str, value: int, above: int, most: int) -> None:
    if not above < value <= most:
        raise ValueError(
            f"`{name}` must be from {above + 1} to {most}; received {value}."
        )


def _share(
    num_positions: int, cluster: tfdistill.Cluster, mode: str
) -> tuple[int, int]:
    """Returns a group's first training position, and how many it has."""
    parts = np.arange(num_positions)
    # Checks `mode`, and says whether groups have parts at all.
    own = tfdistill_data.group_shard(parts, cluster, mode=mode)
    if len(own) == num_positions:
        return 0, num_positions
    borders = np.arange(cluster.num_groups + 1) * num_positions
    borders //= cluster.num_groups
    first, last = borders[cluster.group : cluster.group + 2].tolist()
    return first, last - first
