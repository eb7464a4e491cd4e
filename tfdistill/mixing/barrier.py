"""Whether versions still lie in one valley, found in the background.

The barrier between models is the loss of their mean less the mean of their
losses (Frankle et al. 2020, arXiv:1912.05671, section 2).
"""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import schedules
from tfdistill.cluster import replicas
from tfdistill.exports import saved_model
from tfdistill.exports import student_graph
from tfdistill.mixing import weights
from tfdistill.teachers import canary as canary_lib

_log = logging.getLogger(__name__)
# Of a manifest's `extras`: whether a group mixes no more.
OPEN_FIELD = "merge_barrier_open"
_NO_CANARY = (
    "The `canary` of a MergeBarrier must have labels, by which versions have a "
    "loss; received {}. Pass tfdistill.Canary(inputs, labels=labels)."
)


class BarrierWatch:
    """Compares versions with their mean; the chief's reading thread asks it."""

    def __init__(
        self,
        barrier: schedules.MergeBarrier,
        graph: student_graph.StudentGraph,
        canary: canary_lib.Canary,
    ) -> None:
        """Has the student predict the canary batch, as its trace must be here.

        ValueError if the canary batch has no loss.
        """
        self._margin, self._graph, self._canary = barrier.margin, graph, canary
        self._taken: list[tuple[Any, Any]] = []
        self._writer = saved_model.SavedModelWriter(graph)
        self.num_compared = 0
        # Of the comparison that opens the barrier.
        self.losses: tuple[float, float, float] | None = None
        self._ask(self._writer.snapshot())

    @classmethod
    def of(cls, barrier: schedules.MergeBarrier, model: Any) -> "BarrierWatch":
        """Makes one for a `CodistillModel` that `fit` has prepared."""
        if replicas.on_servers(model.distribute_strategy):
            raise ValueError(
                "A MergeBarrier does not work with parameter servers, where "
                "no task has a whole version; received one as `until`. Leave "
                "it out, or train without parameter servers."
            )
        canary = canary_lib.as_canary(barrier.canary)
        if canary is None:
            raise ValueError(_NO_CANARY.format("None"))
        loss = model.codistillation.first_loss
        canary.settle(loss.from_logits if loss else None)
        return cls(barrier, model.graph, canary)

    def take(self, others: Sequence[Sequence[Any]]) -> None:
        """Takes the group's present values, and those of its peers, at a mix.

        At most one comparison waits: a slow one skips mixes.
        """
        self._taken = [(self._writer.snapshot(), others)]

    def examine(self) -> None:
        """Compares what was taken last, in the background."""
        taken, self._taken = self._taken, []
        for own, others in taken:
            try:
                losses = self._compared(own, others)
            except Exception as error:  # TensorFlow raises many kinds.
                _log.info("The versions were not compared: %s", error)
                continue
            mean, mine, theirs = losses
            num = len(others) + 1
            self.num_compared += 1
            of_losses = (mine + (num - 1) * theirs) / num
            if not mean <= of_losses + self._margin:
                self.losses = losses

    def _compared(
        self, own: Sequence[Any], others: Sequence[Sequence[Any]]
    ) -> tuple[float, float, float]:
        """Returns the losses of the mean, of one's own, and theirs on average.

        ValueError if a version itself has none.
        """
        mine = self._ask(own)
        theirs = [self._ask(values) for values in others]
        try:
            mean = self._ask(_mean([own, *others]))
        except ValueError as error:
            _log.info("The mean of the versions has no loss: %s", error)
            mean = math.inf
        return mean, mine, sum(theirs) / len(theirs)

    def _ask(self, values: Sequence[Any]) -> float:
        loss = self._canary.check(
            functools.partial(self._predict, values), self._graph.output_spec
        )
        if loss is None:
            raise ValueError(_NO_CANARY.format("one without"))
        return loss

    def _predict(self, values: Sequence[Any], inputs: Any) -> list[Any]:
        tensors = [tf.convert_to_tensor(value) for value in values]
        return keras.tree.flatten(self._graph(tensors, inputs))


def _mean(versions: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the mean of floats; what is no float is that of the first."""
    found = []
    for first, *others in zip(*versions, strict=True):
        mean = tf.convert_to_tensor(first)
        if mean.dtype.is_floating:
            values = [mean, *(tf.cast(other, mean.dtype) for other in others)]
            mean = weights.weighted_mean(values, [1.0] * len(values))
        found.append(mean)
    return found
