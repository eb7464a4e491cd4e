"""Whether a version of a peer is clearly worse than the student: the one rule.

Both answer the same labelled canary batch. The skill of a model is the share
of the loss of base rates that it saves: 0 for whoever knows only how often
each class occurs, 1 without any loss. Skills compare across data sets; losses
in nats do not.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

from tfdistill.exports import saved_model
from tfdistill.teachers import canary as canary_lib
from tfdistill.teachers import teacher

_log = logging.getLogger(__name__)
# A version is worse if it has less than this share of the student's skill. On
# digits an honest peer has 0.98 of it, and one that learns from labels of which
# half are wrong 0.58 to 0.77.
_LEAST_SHARE = 0.8
# A student with less skill than this is no yardstick; a version whose loss is
# so many times that of a guess needs none.
_LEAST_SKILL, _WORSE_THAN_CHANCE = 0.05, 1.25


class Merit:
    """Compares the versions of peers with the student, on the chief.

    The training thread takes the student's values; the thread that reads
    versions finds all losses, the student's once for all peers.
    """

    def __init__(
        self,
        canary: canary_lib.Canary,
        student: teacher.Student,
        run: Callable[[Any, Any], list[Any]],
    ) -> None:
        """Takes the student's values.

        `run`, from values and inputs, is traced already: the other thread must
        not run the student's code.
        """
        self._canary, self._student, self._run = canary, student, run
        self._writer = saved_model.SavedModelWriter(student.graph)
        # By peer, the loss of the version before, and the last one found worse.
        self._before: dict[str, float] = {}
        self._worse: dict[str, int] = {}
        # The first version may be read before the first refresh.
        self.take()

    def take(self) -> None:
        """Takes the student's values, between two steps, at no cost."""
        run = functools.partial(self._run, self._writer.snapshot())
        # Found once somebody asks, and kept.
        self._own_loss: Any = functools.cache(
            lambda: self._canary.check(run, self._student)
        )

    def compare(self, peer: str, version: int, loss: float | None) -> None:
        """Notes whether a version of this loss is worse than the student."""
        if loss is None:
            return
        try:
            own = self._own_loss()
        except ValueError as error:
            _log.info("The student's canary batch failed: %s", error)
            return
        before = self._before.get(peer)
        if is_worse(self._canary, loss, own, before):
            self._worse[peer] = version
        self._before[peer] = loss

    def worse(self, peer: str) -> int:
        """Returns the peer's last version that was found worse, or -1."""
        return self._worse.get(peer, -1)


def is_worse(
    canary: canary_lib.Canary, loss: float, own: float, before: float | None
) -> bool:
    """Whether losses are clearly worse than the student's own.

    Models with batch normalization may be much worse for the time of one
    version: `before`, the loss of the version before, is averaged in.
    """
    base = canary.base_rate_loss()
    if not base > 0:
        return False
    mean = loss if before is None else (loss + before) / 2
    least, own_skill = min(loss, mean), 1 - own / base
    if own_skill < _LEAST_SKILL:
        return least > _WORSE_THAN_CHANCE * canary.chance_loss()
    return 1 - least / base < _LEAST_SHARE * own_skill
