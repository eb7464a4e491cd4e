"""Opens the tokens of a text, made from its files at the first call.

Vocabulary and tokens are kept apart: one vocabulary serves all cuts of a text.
A split is a file of little-endian uint16 or int32 numbers; header.json says
the rest. Which documents validate is drawn by their text: the order does not
matter, and equal documents always fall on the same side.

SentencePiece makes the vocabulary from training documents only. A character
that isn't a sub-word becomes the bytes of its UTF-8, so that no token is
unknown. Before that, text is normalized by NFKC, runs of white space become one
space, and control characters and U+FFFD are dropped.
"""

import array
import contextlib
import dataclasses
import hashlib
import io
import itertools
import pathlib
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import sentencepiece

from models import files as data_files

DEFAULT_VOCABULARY_SIZE = 24_000
# 256 bytes, the unknown and the end of a document; and letters.
_SMALLEST_VOCABULARY = 300


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to make tokens of documents.

    Attributes:
        vocabulary_size: Sub-words, with the 256 bytes; at least 300. They are
            made from training documents, the same for all numbers of tokens.
            Default 24,000.
        validation_fraction: Share of the documents that validate, by a hash of
            their text, in (0, 1). Default 0.05.
        num_train_tokens: Use only so many training tokens, over all groups:
            the first ones. Default None: all.
        num_validation_tokens: Likewise of the validation tokens. With both
            set, no more text is read than they need.
    """

    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE
    validation_fraction: float = 0.05
    num_train_tokens: int | None = None
    num_validation_tokens: int | None = None

    def __post_init__(self) -> None:
        data_files.check_at_least(
            "vocabulary_size", self.vocabulary_size, _SMALLEST_VOCABULARY
        )
        for name in ("num_train_tokens", "num_validation_tokens"):
            if getattr(self, name) is not None:
                data_files.check_at_least(name, getattr(self, name), 2)
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must be in (0, 1); received "
                f"{self.validation_fraction}."
            )

    def limit(self, split: str) -> int | None:
        """Returns how many tokens a split may have; None for all."""
        return getattr(self, f"num_{split}_tokens")


Draw = tuple[str, int, str]
_RANGE = 1 << 64


def _draw(text: str) -> int:
    """Returns a number from 0 to 2**64 - 1 that the text determines."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def split_documents(sources: Sequence[Any], options: Options) -> Iterator[Draw]:
    """Yields (split, draw, text) of all documents, in their order."""
    border = int(options.validation_fraction * _RANGE)
    for source in sources:
        for text in source.documents():
            number = _draw(text)
            yield "validation" if number < border else "train", number, text


def dtype_of(vocabulary_size: int) -> np.dtype:
    """Returns the smallest of uint16 and int32 that holds the tokens."""
    return np.dtype("<u2" if vocabulary_size <= 1 << 16 else "<i4")


class Stream:
    """Takes the documents of one split.

    Attributes:
        num_tokens: So many so far.
    """

    def __init__(
        self, path: pathlib.Path, dtype: np.dtype, *, limit: int | None
    ) -> None:
        """Begins a file."""
        self.num_tokens = 0
        self._dtype, self._limit = dtype, limit
        self._path = path
        self._file = path.open("wb")
        self._ends = array.array("q")
        self._draws = array.array("Q")

    @property
    def is_full(self) -> bool:
        """Whether the limit was reached."""
        return self._limit is not None and self.num_tokens >= self._limit

    def add(self, tokens: list[int], *, draw: int) -> None:
        """Takes a document, or as much of it as there is room for."""
        if self._limit is not None:
            tokens = tokens[: self._limit - self.num_tokens]
        if not tokens:
            return
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self.num_tokens += len(tokens)
        self._ends.append(self.num_tokens)
        self._draws.append(draw)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()

    def sort(self) -> np.ndarray:
        """Puts the documents of a closed file in the order of their draws.

        Whatever order the files had, by label say, any part of the new one is
        a sample of all.

        Returns where each document ends, int64 `[documents]`.
        """
        ends = np.frombuffer(self._ends, np.int64)
        starts = np.concatenate([[0], ends[:-1]])
        order = np.argsort(np.frombuffer(self._draws, np.uint64), kind="stable")
        unsorted = np.memmap(self._path, self._dtype, "r")
        aside = self._path.with_suffix(".sorted")
        with aside.open("wb") as file:
            for document in order.tolist():
                tokens = unsorted[starts[document] : ends[document]]
                file.write(tokens.tobytes())
        aside.replace(self._path)
        return np.cumsum((ends - starts)[order])


# Stands behind each document. Number 0 is SentencePiece's unknown, which
# never comes.
END_ID = 1
# Enough to count sub-words by; all of a corpus would take hours.
_MAX_CHARACTERS = 32_000_000
# The rarest characters, one in ten thousand, become bytes.
_CHARACTER_COVERAGE = 0.9999

Processor = sentencepiece.SentencePieceProcessor


def train_vocabulary(
    documents: Iterable[str], *, vocabulary_size: int
) -> bytes:
    """Returns a SentencePiece model of documents.

    The same documents and size give the same one.

    The first 32 million characters are used, and no more are read. The 256
    bytes, the unknown and the end of a document count as sub-words.
    """
    chosen, left = [], _MAX_CHARACTERS
    for text in documents:
        chosen.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    if not chosen:
        raise ValueError(
            "A vocabulary needs training documents, and there are none. Lower "
            "`validation_fraction`, or check that `path` has text."
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(chosen),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocabulary_size,
            byte_fallback=True,
            character_coverage=_CHARACTER_COVERAGE,
            # Else longer documents are left out.
            max_sentence_length=4 * max(map(len, chosen)) + 1,
            unk_id=0,
            eos_id=END_ID,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as cause:
        raise ValueError(
            f"`vocabulary_size` must fit the text; received {vocabulary_size}, "
            f"for which SentencePiece reports: {cause}"
        ) from cause
    return model.getvalue()


def load_vocabulary(path: pathlib.Path) -> Processor:
    """Returns the processor of a model on file."""
    return Processor(model_proto=path.read_bytes())


SPLITS = ("train", "validation")
# Change it with anything that changes what is written.
_VERSION = 1
_VOCABULARY = "vocabulary.model"
_DOCUMENTS = "train_documents.npy"
_BATCH_DOCUMENTS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a text.

    Attributes:
        directory: Holds the files of the splits.
        vocabulary: The SentencePiece model.
        vocabulary_size: Tokens are from 0 to this, exclusive.
        num_tokens: By split, `"train"` and `"validation"`.
    """

    directory: pathlib.Path
    vocabulary: pathlib.Path
    vocabulary_size: int
    num_tokens: Mapping[str, int]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of a token on file."""
        return dtype_of(self.vocabulary_size)

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
    sources: Sequence[Any],
    *,
    options: Options,
    cache_dir: data_files.Path | None = None,
) -> Tokens:
    """Returns the tokens of a text, which are made at the first call."""
    root = data_files.directory(cache_dir)
    limits = {f"num_{split}_tokens": options.limit(split) for split in SPLITS}

    def describe() -> dict[str, Any]:
        """What both the vocabulary and the tokens depend on."""
        return {
            "version": _VERSION,
            "sources": [source.identity() for source in sources],
            "vocabulary_size": options.vocabulary_size,
            "validation_fraction": options.validation_fraction,
        }

    def make_vocabulary(aside: pathlib.Path) -> dict[str, Any]:
        documents = split_documents(sources, options)
        model = train_vocabulary(
            (text for split, _, text in documents if split == "train"),
            vocabulary_size=options.vocabulary_size,
        )
        (aside / _VOCABULARY).write_bytes(model)
        return {}

    made = data_files.open_or_make(
        "language-model-vocabulary", describe, make_vocabulary, root=root
    )
    vocabulary = made / _VOCABULARY

    def make(aside: pathlib.Path) -> dict[str, Any]:
        documents = split_documents(sources, options)
        processor = load_vocabulary(vocabulary)
        return {"num_tokens": _tokenize(documents, processor, options, aside)}

    final = data_files.open_or_make(
        "language-model", lambda: {**describe(), **limits}, make, root=root
    )
    tokens = Tokens(
        directory=final,
        vocabulary=vocabulary,
        vocabulary_size=options.vocabulary_size,
        num_tokens=data_files.read_header(final)["num_tokens"],
    )
    for split, number in tokens.num_tokens.items():
        data_files.check_size(
            tokens.path(split), number * tokens.dtype.itemsize
        )
    return tokens


def _tokenize(
    documents: Iterator[Draw],
    processor: Processor,
    options: Options,
    directory: pathlib.Path,
) -> dict[str, int]:
    """Writes the splits, and returns the number of tokens of each."""
    dtype = dtype_of(options.vocabulary_size)
    streams = {
        split: Stream(
            directory / f"{split}.tokens", dtype, limit=options.limit(split)
        )
        for split in SPLITS
    }
    progress, num_documents = data_files.Progress(), 0
    with contextlib.ExitStack() as stack:
        for stream in streams.values():
            stack.callback(stream.close)
        while not all(stream.is_full for stream in streams.values()):
            batch = list(itertools.islice(documents, _BATCH_DOCUMENTS))
            if not batch:
                break
            needed = [one for one in batch if not streams[one[0]].is_full]
            encoded = processor.encode([text for _, _, text in needed])
            for (split, draw, _), tokens in zip(needed, encoded, strict=True):
                tokens.append(END_ID)
                streams[split].add(tokens, draw=draw)
            num_documents += len(batch)
            counted = ", ".join(
                f"{stream.num_tokens} {split} tokens"
                for split, stream in streams.items()
            )
            progress.report(
                f"Text: {num_documents} documents read, {counted} so far"
            )
    found = {split: stream.num_tokens for split, stream in streams.items()}
    for split, number in found.items():
        _check_enough(split, number, options)
    np.save(directory / _DOCUMENTS, streams["train"].sort())
    return found


def _check_enough(split: str, number: int, options: Options) -> None:
    limit = options.limit(split)
    if limit is not None and number < limit:
        raise ValueError(
            f"`num_{split}_tokens` must be at most the {number} tokens of the "
            f"text; received {limit}."
        )
    if not number:
        raise ValueError(
            f"The text must have documents for {split}; found none. Change "
            "`validation_fraction`, or use more text."
        )
