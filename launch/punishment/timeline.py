"""How the groups' steps went on in time: paces, gaps, faults and recoveries.

Times are seconds of any one clock, passed in.
"""

import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass
class Span:
    """A time during which a group was under a fault; open while `end` is None.

    Attributes:
        start: When the fault was injected.
        end: When the group was past it.
    """

    start: float
    end: float | None = None


class Timeline:
    """The steps of one group, as they were seen, and its faults."""

    def __init__(self, spans: list[Span] | None = None) -> None:
        """Has seen nothing.

        Args:
            spans: The group's faults, where another timeline has them too.
        """
        self._samples: list[tuple[float, int]] = []
        self.spans: list[Span] = [] if spans is None else spans

    @property
    def step(self) -> int:
        """The last step seen, or -1."""
        return self._samples[-1][1] if self._samples else -1

    def see(self, step: int, *, now: float) -> None:
        """Notes the group's step; only a change of it counts."""
        if step != self.step:
            self._samples.append((now, step))

    def begin_fault(self, *, now: float) -> Span:
        """Notes that a fault hits the group."""
        span = Span(now)
        self.spans.append(span)
        return span

    def num_steps(self, start: float, end: float) -> int:
        """Returns the steps done in a time; steps done again count again.

        A step is done between two sights of it. Where only a part of that
        lies in the time, or the group had a fault meanwhile, it does not
        count.
        """
        return sum(
            step - before
            for (then, before), (now, step) in self._pairs(start, end)
            if step > before
        )

    def clear_secs(self, start: float, end: float) -> float:
        """Returns the seconds of a time in which the group had no fault."""
        return sum(last - first for first, last in self._clear(start, end))

    def longest_gap(self, start: float, end: float) -> float:
        """Returns the longest time between two steps without a fault.

        The time from the last step to `end` counts too.
        """
        longest = 0.0
        for first, last in self._clear(start, end):
            times = [t for t, _ in self._samples if first <= t <= last]
            marks = [first, *times, last]
            gaps = [b - a for a, b in zip(marks, marks[1:], strict=False)]
            longest = max([longest, *gaps])
        return longest

    def _pairs(
        self, start: float, end: float
    ) -> Iterator[tuple[tuple[float, int], tuple[float, int]]]:
        pairs = zip(self._samples, self._samples[1:], strict=False)
        spans = list(self._clear(start, end))
        for before, after in pairs:
            if any(a <= before[0] and after[0] <= b for a, b in spans):
                yield before, after

    def _clear(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """Yields the parts of a time that no fault covers."""
        for span in sorted(self.spans, key=lambda span: span.start):
            last = end if span.end is None else span.end
            if last <= start or span.start >= end:
                continue
            if span.start > start:
                yield start, span.start
            start = max(start, last)
        if start < end:
            yield start, end
