"""The sub-words of a text, by byte pair encoding (Sennrich et al. 2016).

Made by SentencePiece from training documents alone. A character that is no
sub-word becomes the bytes of its UTF-8, so that no token is unknown. Before
that, text is normalized by NFKC, runs of white space become one space, and
control characters and U+FFFD are dropped.
"""

import io
import pathlib
from collections.abc import Iterable

import sentencepiece

__all__ = ["END_ID", "Processor", "load", "train"]

# Stands behind each document. Number 0 is SentencePiece's unknown, which
# never comes.
END_ID = 1
# Enough to count sub-words by; all of a corpus would take hours.
_MAX_CHARACTERS = 32_000_000
# The rarest characters, one in ten thousand, become bytes.
_CHARACTER_COVERAGE = 0.9999

Processor = sentencepiece.SentencePieceProcessor


def train(documents: Iterable[str], *, vocabulary_size: int) -> bytes:
    """Returns a SentencePiece model of documents.

    The same documents and size give the same one.

    Args:
        documents: The first 32 million characters are used; no more are read.
        vocabulary_size: Sub-words, with the 256 bytes, the unknown and the end
            of a document.

    Raises:
        ValueError: If so many sub-words cannot be found, or so few will not
            do.
    """
    chosen, left = [], _MAX_CHARACTERS
    for text in documents:
        chosen.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    if not chosen:
        raise ValueError(
            "A vocabulary must have documents to be made of; received none "
            "that train. Lower `validation_fraction`, or see whether `path` "
            "has text."
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
            "`vocabulary_size` must fit the text; received "
            f"{vocabulary_size}, of which SentencePiece says: {cause}"
        ) from cause
    return model.getvalue()


def load(path: pathlib.Path) -> Processor:
    """Returns the processor of a model on file."""
    return Processor(model_proto=path.read_bytes())
