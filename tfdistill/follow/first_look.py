"""What a new training should know of its exchange, logged once."""

import contextlib
import logging
from collections.abc import Sequence

from tfdistill.exchange import publisher

# In a manifest's `extras`: an early step and the loss of the steps until then.
BEGAN_FIELD = "began"
_log = logging.getLogger(__name__)


class FirstLook:
    """What a training from step 0 is warned of, when it first publishes."""

    def __init__(
        self, exchange: publisher.Exchange, group: int, peers: Sequence[int]
    ) -> None:
        """Reads nothing yet: that is for the thread that publishes."""
        self._exchange, self._group, self._peers = exchange, group, peers
        self._knows_earlier = self._knows_twins = False

    def before(self) -> None:
        """Looks once for versions that this group published before."""
        if self._knows_earlier:
            return
        self._knows_earlier = True
        try:
            earlier = self._exchange.steps(self._group)
        except OSError:
            return  # The export that follows reports it.
        if earlier:
            _log.warning(
                "This training started at step 0, but the exchange has "
                "versions of an earlier training, up to step %d: %s. They "
                "teach the other groups until this training passes that step. "
                "Use a new directory for a new run. To resume a run, add a "
                "tfdistill.callbacks.Backup.",
                earlier[-1],
                self._exchange.group_path(self._group),
            )

    def after(self, began: Sequence[float] | None) -> None:
        """Looks once for groups that began alike, if it is known how this did.

        The later of two finds what the other has just published.
        """
        if self._knows_twins or not began:
            return
        self._knows_twins = True
        for group in self._peers:
            with contextlib.suppress(OSError):
                found = self._exchange.latest(group)
                if found and found.manifest.extras.get(BEGAN_FIELD) == began:
                    _log.warning(
                        "Group %d had this group's loss after step %d, %s: "
                        "both started with the same weights and data, so they "
                        "have nothing to teach each other. Give each group its "
                        "own seed, such as "
                        "keras.utils.set_random_seed(cluster.group), or its "
                        "own part of the data (tfdistill.data.group_shard).",
                        group,
                        *began,
                    )
