"""How fast groups are, and the batch sizes with which all update alike."""

from collections.abc import Sequence

# A size stays as it is unless it is off by this share, and by this part of the
# unit it is rounded to: noise must not move it to and fro.
_TOLERANCE = 0.05
_TOLERANCE_UNITS = 0.75
# The largest factor of one change, and its inverse.
_MOST_CHANGE = 1.5
# A peer's speed is a running mean, of which each version makes up a quarter.
_WEIGHT_OF_LAST = 0.25
# A peer that published nothing for so many of its intervals, and so many
# seconds on top, sets no pace.
_SILENT_INTERVALS = 4.0
_GRACE_SECS = 10.0


class Pace:
    """How many examples a second a group trains on, while it does not wait."""

    def __init__(self) -> None:
        """Knows of nothing yet."""
        self._last: tuple[float, float, float] | None = None
        self._interval = 0.0
        self._speed: float | None = None

    def note(self, *, examples: float, secs: float, now: float) -> None:
        """Takes the examples that a group had after so many seconds of work.

        `now` is this task's clock, by which `speed` sees that news stay away.
        """
        before, self._last = self._last, (examples, secs, now)
        if before is None:
            return
        had, worked = examples - before[0], secs - before[1]
        if had <= 0 or worked <= 0:
            return  # The group was resumed from an earlier step.
        speed = had / worked
        if self._speed is not None:
            speed = self._speed + _WEIGHT_OF_LAST * (speed - self._speed)
        self._speed, self._interval = speed, now - before[2]

    def speed(self, now: float) -> float | None:
        """Examples a second; None if unknown, or if the group fell silent."""
        if self._speed is None or self._last is None:
            return None
        silence = now - self._last[2]
        is_silent = silence > _SILENT_INTERVALS * self._interval + _GRACE_SECS
        return None if is_silent else self._speed


def next_size(
    size: int,
    speeds: Sequence[float],
    *,
    start: int,
    least: int,
    most: int,
    multiple_of: int = 1,
) -> int:
    """Returns the batch size at which a group updates as often as its peers.

    Of the `start` x (number of groups) examples that all groups together take
    in a step, the group takes the part that is its speed's part of all speeds.
    Where a step has costs of its own, speeds change with the sizes, and the
    sizes meet after a few changes.

    Args:
        size: That of now.
        speeds: Examples a second of this group, then of each peer.
        start: The size that all groups began with.
        least: The smallest size.
        most: The largest size.
        multiple_of: What a size must be a multiple of.

    Example:
        >>> next_size(64, [100.0, 200.0], start=64, least=8, most=512)
        43
        >>> next_size(64, [200.0, 100.0], start=64, least=8, most=512)
        85
        >>> next_size(43, [100.0, 205.0], start=64, least=8, most=512)
        43
    """
    target = start * len(speeds) * speeds[0] / sum(speeds)
    target = min(max(target, size / _MOST_CHANGE), size * _MOST_CHANGE)
    target = min(max(target, least), most)
    off = abs(target - size)
    if off <= _TOLERANCE * size or off <= _TOLERANCE_UNITS * multiple_of:
        return size
    rounded = round(target / multiple_of) * multiple_of
    return int(min(max(rounded, least), most))
