"""The options of a `TeacherSet`, checked."""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from tfdistill import data_schema
from tfdistill import staleness


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """What a `TeacherSet` was made with; see there for the meaning."""

    peers: tuple[int, ...] = ()
    saved_models: tuple[str, ...] = ()
    weights: Sequence[float] | None = None
    bounds: staleness.Bounds = staleness.Bounds()
    max_bad_batches: int = 3
    allow_other_graphs: bool = False
    trust_saved_models: bool = False
    schema: data_schema.Wanted = data_schema.Wanted(None, False)
    canary: Any = None
    poll_secs: float = 1.0

    def __post_init__(self) -> None:
        """Checks everything but what depends on the strategy."""
        _check_peers(self.peers)
        # Frozen: set as dataclasses do it themselves.
        object.__setattr__(
            self, "weights", _checked_weights(self.weights, self.num_teachers)
        )
        if self.max_bad_batches < 1:
            raise ValueError(
                "`max_bad_batches` must be >= 1; received "
                f"{self.max_bad_batches}."
            )
        if not self.poll_secs > 0:
            raise ValueError(
                f"`poll_secs` must be > 0; received {self.poll_secs}."
            )

    @property
    def num_teachers(self) -> int:
        """Number of peers and fixed teachers."""
        return len(self.peers) + len(self.saved_models)

    @property
    def names_of_peers(self) -> dict[int, str]:
        """The name of each peer, by group."""
        return {group: f"group_{group}" for group in self.peers}

    def check_remote(self) -> None:
        """Checks what a parameter-server group cannot have.

        Raises:
            ValueError: There is such a thing.
        """
        if self.saved_models or self.allow_other_graphs:
            raise ValueError(
                "Teachers of a parameter-server group must be peers with the "
                "student's own graph; received saved_models="
                f"{self.saved_models} and allow_other_graphs="
                f"{self.allow_other_graphs}. Leave them out, or train without "
                "parameter servers."
            )


def check_exchange(peers: Sequence[int], exchange: Any) -> None:
    """Checks that there is an exchange where there are peers."""
    if peers and exchange is None:
        raise ValueError(
            f"`peers` {tuple(peers)} need an `exchange`; received None."
        )


def checked_paths(saved_models: Any) -> tuple[str, ...]:
    """Returns the directories of fixed teachers.

    Raises:
        ValueError: A path was given where a list of paths must be.
    """
    if isinstance(saved_models, str | bytes | os.PathLike):
        raise ValueError(
            "`saved_models` must be a list of directories; received "
            f"{saved_models!r}. Put it into brackets."
        )
    return tuple(os.fspath(path) for path in saved_models)


def _check_peers(peers: Sequence[int]) -> None:
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )


def _checked_weights(
    weights: Sequence[float] | None, count: int
) -> list[float]:
    """Returns a weight for each of `count` teachers; equal ones for None."""
    if weights is None:
        return [1.0] * count
    found = [float(weight) for weight in weights]
    if len(found) != count or not _are_weights(found):
        raise ValueError(
            f"`weights` must hold one finite number >= 0 for each of {count} "
            f"teachers, not all of them 0; received {list(weights)}."
        )
    return found


def _are_weights(found: Sequence[float]) -> bool:
    return all(0 <= w < math.inf for w in found) and (
        not found or sum(found) > 0
    )
