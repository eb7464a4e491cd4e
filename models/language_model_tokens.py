"""Opens the tokens of a text, made from its files at the first call.

Vocabulary and tokens are kept apart: one vocabulary serves all cuts of a text.
A split is a file of little-endian uint16 or int32 numbers; header.json tells
the rest, and is written last.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from models import data_places
from models import language_model_options
from models import language_model_split
from models import language_model_streams
from models import language_model_vocabulary
from models import made_once

__all__ = ["SPLITS", "Tokens", "open_or_tokenize"]

SPLITS = ("train", "validation")
# Change it with anything that changes what is written.
_VERSION = 1
_HEADER = "header.json"
_VOCABULARY = "vocabulary.model"
_DOCUMENTS = "train_documents.npy"
_BATCH_DOCUMENTS = 256
_TELL_EVERY_SECS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a text.

    Attributes:
        directory: Holds the files of the splits.
        vocabulary: The SentencePiece model.
        vocabulary_size: Tokens are from 0 to this, exclusive.
        num_tokens: By split, `"train"` and `"validation"`.
        header: All that header.json says.
    """

    directory: pathlib.Path
    vocabulary: pathlib.Path
    vocabulary_size: int
    num_tokens: Mapping[str, int]
    header: Mapping[str, Any]

    @property
    def dtype(self) -> np.dtype:
        """Of a token on file."""
        return language_model_streams.dtype_of(self.vocabulary_size)

    def path(self, split: str) -> pathlib.Path:
        """Returns the file of a split."""
        return self.directory / f"{split}.tokens"

    def array(self, split: str) -> np.ndarray:
        """Returns the tokens of a split, `[tokens]`, mapped into memory."""
        return np.memmap(self.path(split), self.dtype, "r")

    def train_documents(self) -> np.ndarray:
        """Returns where each training document ends, int64 `[documents]`."""
        return np.load(self.directory / _DOCUMENTS)


def open_or_tokenize(
    train: Sequence[Any],
    validation: Sequence[Any],
    *,
    options: language_model_options.Options,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Tokens:
    """Returns the tokens of a text, which are made at the first call.

    Args:
        train: Sources, as of `language_model_text.sources`.
        validation: Those of the validation documents; none for a share of
            the first.
        options: How to make them.
        cache_dir: Where they are kept. Default: `tfdistill` in the user's
            cache directory.

    Returns:
        The tokens, checked for completeness.

    Raises:
        ValueError: If the files or options are at fault.
        RuntimeError: If files change meanwhile, or what was made before is
            damaged.
    """
    root = data_places.cache_dir(cache_dir)
    wanted = _wanted(train, validation, options)
    vocabulary = _vocabulary(train, validation, options, wanted, root)
    limits = {f"num_{split}_tokens": options.limit(split) for split in SPLITS}
    final = root / f"language-model-{_key({**wanted, **limits})}"

    def make(aside: pathlib.Path) -> None:
        documents = language_model_split.documents(train, validation, options)
        processor = language_model_vocabulary.load(vocabulary)
        found = _tokenize(documents, processor, options, aside)
        _check_unchanged(train, validation, options, wanted)
        header = {**wanted, **limits, "num_tokens": found}
        (aside / _HEADER).write_text(json.dumps(header, indent=1), "utf-8")

    made_once.made_once(final, make)
    return _open(final, vocabulary)


def _wanted(
    train: Sequence[Any],
    validation: Sequence[Any],
    options: language_model_options.Options,
) -> dict[str, Any]:
    """Returns what both the vocabulary and the tokens depend on."""
    return {
        "version": _VERSION,
        "train": [source.identity() for source in train],
        "validation": [source.identity() for source in validation],
        "vocabulary_size": options.vocabulary_size,
        "validation_fraction": options.validation_fraction,
        "split_seed": options.split_seed,
    }


def _key(wanted: Mapping[str, Any]) -> str:
    text = json.dumps(wanted, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check_unchanged(
    train: Sequence[Any],
    validation: Sequence[Any],
    options: language_model_options.Options,
    wanted: Mapping[str, Any],
) -> None:
    if _wanted(train, validation, options) != wanted:
        raise RuntimeError(
            "Files of the text changed while they were read. Start again once "
            "they are complete."
        )


def _vocabulary(
    train: Sequence[Any],
    validation: Sequence[Any],
    options: language_model_options.Options,
    wanted: Mapping[str, Any],
    root: pathlib.Path,
) -> pathlib.Path:
    # With what validates elsewhere known, no training document is held back.
    def make(aside: pathlib.Path) -> None:
        documents = language_model_split.documents(train, (), options)
        model = language_model_vocabulary.train(
            (text for split, _, text in documents if split == "train"),
            vocabulary_size=options.vocabulary_size,
        )
        _check_unchanged(train, validation, options, wanted)
        (aside / _VOCABULARY).write_bytes(model)

    final = root / f"language-model-vocabulary-{_key(wanted)}"
    return made_once.made_once(final, make) / _VOCABULARY


def _tokenize(
    documents: Iterator[language_model_split.Draw],
    processor: language_model_vocabulary.Processor,
    options: language_model_options.Options,
    directory: pathlib.Path,
) -> dict[str, int]:
    """Writes the splits, and returns the number of tokens of each."""
    dtype = language_model_streams.dtype_of(options.vocabulary_size)
    train, validation = (
        language_model_streams.Stream(
            directory / f"{split}.tokens", dtype, limit=options.limit(split)
        )
        for split in SPLITS
    )
    streams = dict(zip(SPLITS, (train, validation), strict=True))
    progress = _Progress(streams)
    with train, validation:
        while not all(stream.is_full for stream in streams.values()):
            batch = list(itertools.islice(documents, _BATCH_DOCUMENTS))
            if not batch:
                break
            needed = [one for one in batch if not streams[one[0]].is_full]
            encoded = processor.encode([text for _, _, text in needed])
            for (split, draw, _), tokens in zip(needed, encoded, strict=True):
                tokens.append(language_model_vocabulary.END_ID)
                streams[split].add(tokens, draw=draw)
            progress.add(len(batch))
    found = {split: stream.num_tokens for split, stream in streams.items()}
    for split, number in found.items():
        _check_enough(split, number, options)
    np.save(directory / _DOCUMENTS, train.sort())
    return found


def _check_enough(
    split: str, number: int, options: language_model_options.Options
) -> None:
    limit = options.limit(split)
    if limit is not None and number < limit:
        raise ValueError(
            f"`num_{split}_tokens` must be at most what the text has; received "
            f"{limit} of {number}. Lower it."
        )
    if not number:
        raise ValueError(
            f"The text must have documents for {split}; found none. Change "
            "`validation_fraction`, or give more text."
        )


class _Progress:
    """Tells on standard error how far it has come."""

    def __init__(
        self, streams: Mapping[str, language_model_streams.Stream]
    ) -> None:
        self._streams = streams
        self._num_documents = 0
        self._told = time.monotonic()

    def add(self, num_documents: int) -> None:
        self._num_documents += num_documents
        if time.monotonic() - self._told < _TELL_EVERY_SECS:
            return
        self._told = time.monotonic()
        counted = ", ".join(
            f"{stream.num_tokens} {split} tokens"
            for split, stream in self._streams.items()
        )
        print(
            f"Text: {self._num_documents} documents read, {counted} so far ...",
            file=sys.stderr,
            flush=True,
        )


def _open(directory: pathlib.Path, vocabulary: pathlib.Path) -> Tokens:
    header = json.loads((directory / _HEADER).read_text("utf-8"))
    tokens = Tokens(
        directory=directory,
        vocabulary=vocabulary,
        vocabulary_size=header["vocabulary_size"],
        num_tokens=header["num_tokens"],
        header=header,
    )
    for split, number in tokens.num_tokens.items():
        path, expected = tokens.path(split), number * tokens.dtype.itemsize
        if not path.is_file() or path.stat().st_size != expected:
            raise RuntimeError(
                f"{path} must have {expected} bytes; it was damaged after it "
                f"was made. Delete {directory}, and start again."
            )
    return tokens
