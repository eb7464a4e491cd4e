"""What the tokens of a text depend on, besides the text."""

import dataclasses

__all__ = [
    "DEFAULT_VALIDATION_FRACTION",
    "DEFAULT_VOCABULARY_SIZE",
    "Options",
]

DEFAULT_VOCABULARY_SIZE = 24_000
# 256 bytes, the unknown and the end of a document; and letters.
_SMALLEST_VOCABULARY = 300
_LARGEST_VOCABULARY = 1 << 20
DEFAULT_VALIDATION_FRACTION = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to make tokens of documents.

    Attributes:
        vocabulary_size: Sub-words, with the 256 bytes; at least 300. Default
            24,000.
        validation_fraction: Share of the documents that validate, in (0, 1);
            or 0, where validation has files of its own. Default 0.05.
        split_seed: Draws which documents validate, >= 0. Default 0.
        num_train_tokens: Use only so many training tokens, the first ones.
            Default None: all.
        num_validation_tokens: Likewise of the validation tokens.

    Raises:
        ValueError: If one is out of range.
    """

    vocabulary_size: int = DEFAULT_VOCABULARY_SIZE
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION
    split_seed: int = 0
    num_train_tokens: int | None = None
    num_validation_tokens: int | None = None

    def __post_init__(self) -> None:
        _check_at_least(
            "vocabulary_size", self.vocabulary_size, _SMALLEST_VOCABULARY
        )
        if self.vocabulary_size > _LARGEST_VOCABULARY:
            raise ValueError(
                f"`vocabulary_size` must be <= {_LARGEST_VOCABULARY}; received "
                f"{self.vocabulary_size}."
            )
        _check_at_least("split_seed", self.split_seed, 0)
        for name in ("num_train_tokens", "num_validation_tokens"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 2)
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(
                "`validation_fraction` must be in (0, 1); received "
                f"{self.validation_fraction}."
            )

    def limit(self, split: str) -> int | None:
        """Returns how many tokens a split may have; None for all."""
        limits = {
            "train": self.num_train_tokens,
            "validation": self.num_validation_tokens,
        }
        return limits[split]


def _check_at_least(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise ValueError(
            f"`{name}` must be a whole number >= {least}; received {value!r}."
        )
