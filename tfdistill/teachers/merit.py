"""Whether a version of a peer is clearly worse than the student: the one rule.

Both answer the same labelled canary batch. The skill of a model is the share
of the loss of base rates that it saves: 0 for whoever knows only how often
each class occurs, 1 without any loss. Skills compare across data sets; losses
in nats do not.
"""

import logging
from collections.abc import Callable
from typing import Any

from tfdistill.teachers import canary as canary_lib

_log = logging.getLogger(__name__)
# A version is worse if it has less than this share of the student's skill. On
# digits an honest peer has 0.98 of it, and one that learns from labels of which
# half are wrong 0.58.
_LEAST_SHARE = 0.75
# A student with less skill than this is no yardstick; a version whose loss is
# so many times that of a guess needs none.
_LEAST_SKILL, _WORSE_THAN_CHANCE = 0.05, 1.25


class Merit:
    """Compares the versions of one peer with the student, on the chief.

    The training thread takes the student's values; the thread that reads a
    version finds both losses.
    """

    def __init__(
        self,
        canary: canary_lib.Canary,
        *,
        snapshot: Callable[[], Any],
        loss_of: Callable[[Any], float | None],
    ) -> None:
        """Knows of no values yet.

        `snapshot` takes the values that an export would hold, at no cost;
        `loss_of` finds their loss on the canary batch.
        """
        self._canary = canary
        self._snapshot = snapshot
        self._loss_of = loss_of
        self._values: Any = None
        # Of the version that was compared last.
        self._before: float | None = None
        # By step of a version, whether it is worse.
        self.worse: dict[int, bool] = {}

    def take(self) -> None:
        """Takes the student's values, between two steps."""
        self._values = self._snapshot()

    def compare(self, version: int, loss: float | None) -> None:
        """Notes whether a version of this loss is worse than the student."""
        if loss is None or self._values is None:
            return
        try:
            own = self._loss_of(self._values)
        except ValueError as error:
            _log.info("The student's canary batch failed: %s", error)
            return
        if own is not None:
            self.worse = {version: self.is_worse(loss, own, self._before)}
        self._before = loss

    def is_worse(self, loss: float, own: float, before: float | None) -> bool:
        """Whether losses are clearly worse than the student's own.

        Models with batch normalization may be much worse for the time of one
        version: `before`, the loss of the version before, is averaged in.
        """
        base = self._canary.base_rate_loss()
        if not base > 0:
            return False
        mean = loss if before is None else (loss + before) / 2
        least, own_skill = min(loss, mean), 1 - own / base
        if own_skill < _LEAST_SKILL:
            return least > _WORSE_THAN_CHANCE * self._canary.chance_loss()
        return 1 - least / base < _LEAST_SHARE * own_skill
