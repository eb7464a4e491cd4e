"""The options of a `TeacherSet`, checked."""

import math
from collections.abc import Sequence
from typing import Any


def checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
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


def check(
    peers: Sequence[int],
    max_staleness_steps: int | None,
    max_bad_batches: int,
    poll_secs: float,
) -> None:
    """Checks the other options; see `TeacherSet`."""
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )
    if max_staleness_steps is not None and max_staleness_steps < 0:
        raise ValueError(
            "`max_staleness_steps` must be >= 0 or None; received "
            f"{max_staleness_steps}."
        )
    if max_bad_batches < 1:
        raise ValueError(
            f"`max_bad_batches` must be >= 1; received {max_bad_batches}."
        )
    if not poll_secs > 0:
        raise ValueError(f"`poll_secs` must be > 0; received {poll_secs}.")


def check_exchange(peers: Sequence[int], exchange: Any) -> None:
    """Checks that there is an exchange where there are peers."""
    if peers and exchange is None:
        raise ValueError(
            f"`peers` {tuple(peers)} need an `exchange`; received None."
        )


def check_remote(
    saved_models: Sequence[str], allow_other_graphs: bool, canary: Any
) -> None:
    """Checks what a parameter-server group cannot have."""
    if saved_models or allow_other_graphs or canary is not None:
        raise ValueError(
            "Teachers of a parameter-server group must be peers with the "
            "student's own graph, and are asked no canary batch; received "
            f"saved_models={tuple(saved_models)}, allow_other_graphs="
            f"{allow_other_graphs} and canary={canary}. Leave them out, or "
            "train without parameter servers."
        )
