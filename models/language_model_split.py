"""Which documents train and which validate, by a hash of their text.

The draw does not depend on the order of the documents, and equal documents
always fall on the same side.
"""

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

from models import language_model_options

__all__ = ["Draw", "documents", "draw"]

Draw = tuple[str, int, str]
_RANGE = 1 << 64


def draw(text: str, *, seed: int) -> int:
    """Returns a number from 0 to 2**64 - 1 that the text and seed determine."""
    salt = seed.to_bytes(16, "little")
    digest = hashlib.blake2b(text.encode(), digest_size=8, salt=salt).digest()
    return int.from_bytes(digest, "little")


def documents(
    train: Sequence[Any],
    validation: Sequence[Any],
    options: language_model_options.Options,
) -> Iterator[Draw]:
    """Yields (split, draw, text) of all documents, in the order of the files.

    Args:
        train: Sources of documents that train.
        validation: Those that validate; if there are none, a share of the
            first does. Read first, so that a limit of the training tokens
            need not wait for them.
        options: Say which share.
    """
    seed = options.split_seed
    for source in validation:
        for text in source.documents():
            yield "validation", draw(text, seed=seed), text
    border = 0
    if not validation:
        border = int(options.validation_fraction * _RANGE)
    for source in train:
        for text in source.documents():
            number = draw(text, seed=seed)
            yield "validation" if number < border else "train", number, text
