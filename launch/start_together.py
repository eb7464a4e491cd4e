"""Lets the groups of one experiment begin at the same time."""

import logging
import time
from typing import Any

import keras

from launch import run_outputs
from tfdistill import cluster as cluster_lib

_log = logging.getLogger(__name__)
_MARKER = "started"
_POLL_SECS = 0.01


class StartTogether(keras.callbacks.Callback):
    """Waits after the first step until every group has taken it.

    Groups never wait for each other in a long training: who starts first has
    no teacher for a moment. In an experiment of a minute, that moment and the
    tracing of the first step would be a good part of it.
    """

    chief_only = True

    def __init__(
        self, cluster: cluster_lib.Cluster, *, limit_secs: float
    ) -> None:
        """Waits for nothing yet.

        Args:
            cluster: This task, with a workdir that all groups share.
            limit_secs: Longest wait; training then goes on alone.
        """
        super().__init__()
        self._cluster = cluster
        self._limit_secs = limit_secs
        self._started = False
        self.waited_secs = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tells of this group's first step, and waits for the others'."""
        if self._started:
            return
        self._started = True
        if logs:
            float(logs["loss"])  # Steps may be running still.
        start = time.monotonic()
        markers = [
            run_outputs.group_dir(str(self._cluster.workdir), group) / _MARKER
            for group in range(self._cluster.num_groups)
        ]
        own = markers[self._cluster.group]
        own.parent.mkdir(parents=True, exist_ok=True)
        own.touch()
        while missing := [path for path in markers if not path.exists()]:
            self.waited_secs = time.monotonic() - start
            if self.waited_secs > self._limit_secs:
                _log.warning(
                    "Waited %.0f s for the first step of %s; training goes on.",
                    self.waited_secs,
                    ", ".join(path.parent.name for path in missing),
                )
                return
            time.sleep(_POLL_SECS)
        self.waited_secs = time.monotonic() - start
