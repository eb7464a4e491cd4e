"""Texts for tests: documents made up of words that follow one another."""

import gzip
import lzma
import random

_WORDS = (
    "the film was good bad long and short but actors played well in it a plot "
    "of love war money with music light dark scenes never boring again"
).split()


def document(number, *, words=40):
    """A document that no other number gives."""
    rng = random.Random(number)
    place, found = rng.randrange(len(_WORDS)), [f"Number {number}:"]
    for _ in range(words):
        found.append(_WORDS[place % len(_WORDS)])
        place += rng.choice((1, 1, 1, 5))
    return " ".join(found)


def documents(count, *, first=0):
    return [document(first + number) for number in range(count)]


def write(path, texts):
    content = "".join(f"{text}\n" for text in texts).encode()
    compress = {".gz": gzip.compress, ".xz": lzma.compress}.get(path.suffix)
    path.write_bytes(compress(content) if compress else content)
    return path
