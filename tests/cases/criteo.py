"""Click logs for tests: rows made up, in the format of the real ones."""

import random


def fields(number, *, seed=0):
    """The 40 columns of a row, which no other number gives."""
    rng = random.Random(seed * 1_000_003 + number)
    integers = [
        "" if rng.random() < 0.2 else str(rng.randint(-3, 5000))
        for _ in range(13)
    ]
    integers[0] = str(number)
    categories = [
        "" if rng.random() < 0.1 else f"{rng.randrange(50):08x}"
        for _ in range(26)
    ]
    label = str(int(rng.random() < (0.1 if number % 2 else 0.4)))
    return [label, *integers, *categories]


def line(number, *, seed=0):
    return "\t".join(fields(number, seed=seed)).encode() + b"\n"


def lines(num_rows, *, first=0, seed=0):
    return b"".join(line(first + n, seed=seed) for n in range(num_rows))


def write(path, num_rows, **kwargs):
    path.write_bytes(lines(num_rows, **kwargs))
    return path
