"""Judges from the outside whether a task that reports progress is stuck."""

import collections

from tfdistill import progress

# A step may take so many times what the longest of the recent ones took. On a
# machine that suddenly has five times as much to do, no task is stuck yet.
_FACTOR = 10.0
# Where no limit is known, as in callbacks, which may save and evaluate. The
# task's own watchdog (`TFDISTILL_STALL_TIMEOUT_SECS`) is there as well.
_UNKNOWN_SECS = 600.0
_NUM_RECENT = 500
# A retrace in the middle of training takes about what the first trace took.
_TRACE_FACTOR = 2.0
_FIRST_STEPS = {
    progress.STEP: progress.FIRST_STEP,
    progress.EVALUATION_STEP: progress.FIRST_EVALUATION_STEP,
    progress.PREDICTION_STEP: progress.FIRST_PREDICTION_STEP,
}
_OF_THE_USER = frozenset({progress.CALLBACKS, progress.EPOCH_END})


class ProgressWatch:
    """Judges one task by when its reports change.

    The limit for a phase is `stuck_secs`, or ten times the longest of the
    recent silences in that phase if that is more, so that slow steps and a
    busy machine are not taken for a hang; steps may take twice as long as the
    first of an epoch, too, as TensorFlow may trace again. A phase not seen
    before, and all that callbacks do, may take ten minutes, or ten times what
    it took before. A task that does not report, or is in no phase of the
    library's, is not judged.

    Times are seconds of any one clock, passed in.
    """

    def __init__(self, *, stuck_secs: float) -> None:
        """Knows nothing of the task yet.

        Args:
            stuck_secs: Least silence that counts as stuck; 0 for never.
        """
        self._stuck_secs = stuck_secs
        self._line: progress.Line | None = None
        self._changed = 0.0
        self._recent: dict[str, collections.deque[float]] = {}

    @property
    def phase(self) -> str:
        """What the task said last that it is at; `IDLE` at first."""
        return self._line.phase if self._line else progress.IDLE

    def note(self, line: progress.Line | None, *, now: float) -> None:
        """Takes in what the task says at present.

        Args:
            line: Its report; None if there is none.
            now: The present time.
        """
        if line is None or line == self._line:
            return
        if self._line is not None:
            gaps = self._recent.setdefault(
                self._line.phase, collections.deque(maxlen=_NUM_RECENT)
            )
            gaps.append(now - self._changed)
        self._line, self._changed = line, now

    def excuse(self, *, now: float) -> None:
        """Forgives the silence so far, which others have caused."""
        self._changed = now

    def silent_secs(self, *, now: float) -> float:
        """Returns the time since the last change."""
        return now - self._changed

    def limit_secs(self) -> float:
        """Returns the silence that the present phase allows."""
        phase = self.phase
        if phase == progress.IDLE or not self._stuck_secs:
            return float("inf")
        longest = self._longest(phase)
        limit = max(self._stuck_secs, _FACTOR * longest)
        if phase in _OF_THE_USER or not longest:
            return max(limit, _UNKNOWN_SECS)
        first = _FIRST_STEPS.get(phase)
        if first is not None:
            limit = max(limit, _TRACE_FACTOR * self._longest(first))
        return limit

    def is_stuck(self, *, now: float) -> bool:
        """Whether the task has been silent for longer than that."""
        return self.silent_secs(now=now) > self.limit_secs()

    def _longest(self, phase: str) -> float:
        return max(self._recent.get(phase, ()), default=0.0)
