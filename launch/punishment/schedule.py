"""Which faults come when, drawn in advance from a seed."""

import dataclasses
import random
from collections.abc import Sequence
from typing import ClassVar
from typing import TypeVar

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Injection:
    """One fault to come.

    Attributes:
        number: Its place in the order, from 0.
        due_secs: When, in seconds from the first moment with faults.
        fault: Name of the fault.
        group: Index of the group it hits.
        draw: Uniform in [0, 1); picks the task, the file and so on, among
            what there is at that time.
    """

    SPREAD: ClassVar[float] = 0.2
    number: int
    due_secs: float
    fault: str
    group: int
    draw: float


def plan(
    faults: Sequence[str],
    *,
    num_groups: int,
    seed: int,
    duration_secs: float,
    every_secs: float,
) -> list[Injection]:
    """Draws the faults of a round.

    Each fault comes equally often, in shuffled order, and the groups take
    turns in shuffled order too: a short round has them all.

    Args:
        faults: Names to draw from.
        num_groups: Number of groups in the run.
        seed: The same seed gives the same round.
        duration_secs: Length of the round.
        every_secs: Mean time between two faults; each comes up to
            `Injection.SPREAD` of it early or late.

    Returns:
        The faults, by time.
    """
    rng = random.Random(seed)
    count = max(1, int(duration_secs / every_secs))
    names = _shuffled_rounds(faults, count, rng)
    groups = _shuffled_rounds(range(num_groups), count, rng)
    return [
        Injection(
            number=number,
            due_secs=every_secs
            * (number + rng.uniform(-1, 1) * Injection.SPREAD * (number > 0)),
            fault=names[number],
            group=groups[number],
            draw=rng.random(),
        )
        for number in range(count)
    ]


def _shuffled_rounds(
    values: Sequence[_T], count: int, rng: random.Random
) -> list[_T]:
    drawn: list[_T] = []
    while len(drawn) < count:
        drawn += rng.sample(values, len(values))
    return drawn[:count]
