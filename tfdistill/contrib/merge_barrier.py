"""MergeBarrier: average weights while that helps, and distill after.

The barrier between models is the loss of their mean minus the mean of their
losses (Frankle et al. 2020, arXiv:1912.05671, section 2).
"""

import logging
import math
import warnings
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdistill import mixing
from tfdistill import schedules
from tfdistill.cluster import replicas

_log = logging.getLogger(__name__)
# In a manifest's `extras`: whether a group no longer mixes.
OPEN_FIELD = "merge_barrier_open"


class MergeBarrier(mixing.WeightMixer):
    """A `WeightMixer` that stops mixing once averaging makes models worse.

    It is the distillation weight as well:

        barrier = MergeBarrier(
            tfdistill.mixing.ModelAveraging(), every_steps=50, held_out=(x, y)
        )
        model.compile(..., distillation_weight=barrier)
        model.fit(..., callbacks=[exporter, barrier, loader])

    While it is closed, the weight is 0 and the group mixes its weights with
    its peers' weights. At each mix the chief computes in the background, on
    the held-out batch, the loss of the mean of the versions and the mean of
    their losses. Once their difference exceeds the margin, all workers open
    the barrier at their next mix, which no longer takes place. From
    then on the weight follows the given schedule. The barrier stays open, and
    so do the barriers of the groups that mix with this one.

    Attributes:
        is_over: Whether the barrier is open, so that weights are no longer
            mixed.
        barrier: The difference that opened it, in the unit of the loss; None if
            it is unknown on this worker.
        num_compared: How many mixes were compared.
    """

    def __init__(
        self,
        rule: mixing.Rule,
        *,
        held_out: object,
        margin: float = 0.0,
        weight: float | Callable[[tf.Tensor], Any] = 1.0,
        **kwargs: Any,
    ) -> None:
        """Creates a closed barrier.

        Args:
            rule: As for `WeightMixer`.
            held_out: A batch that is not trained on: `(inputs, targets)`. Its
                loss is the compiled one, of a student with one output.
            margin: How much worse than the mean of the losses the mean may
                be, finite and >= 0. Default 0.
            weight: The distillation weight once the barrier is open: a number,
                or a callable of the step such as `schedules.BurnIn`. Default 1.
            **kwargs: As for `WeightMixer`.

        Raises:
            ValueError: An argument is not as above.
        """
        super().__init__(rule, **kwargs)
        if not 0 <= margin < math.inf:
            raise ValueError(
                f"`margin` must be a finite number >= 0; received {margin!r}."
            )
        if not isinstance(held_out, tuple) or len(held_out) < 2:
            raise ValueError(
                "`held_out` must be a batch (inputs, targets), on which the "
                "loss of each version is computed; received "
                f"{type(held_out).__name__}."
            )
        self._inputs, self._targets = keras.tree.map_structure(
            tf.convert_to_tensor, held_out[:2]
        )
        self._margin = float(margin)
        if not callable(weight):
            weight = schedules.BurnIn(steps=0, weight=weight)
        self._weight = weight
        self._taken: list[tuple[Any, Any]] = []

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the distillation weight at a step, float32 scalar tensor."""
        if not self.is_over:
            return tf.zeros([], tf.float32)
        return tf.cast(self._weight(step), tf.float32)

    # ---- what a mixer asks ----

    def forget(self) -> None:
        """Closes it for another training, whose steps are traced again."""
        was_open = self.is_over
        super().forget()
        self.barrier: float | None = None
        self.num_compared = 0
        if was_open:
            self.model.make_train_function(force=True)

    def manifest_extras(self) -> dict[str, Any]:
        """Returns the manifests' extras, and whether the barrier is open."""
        extras = super().manifest_extras()
        return {**extras, OPEN_FIELD: True} if self.is_over else extras

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Lets the student predict the batch, to trace it on this thread."""
        model = self.codistilled
        strategy = model.distribute_strategy
        if replicas.on_servers(strategy):
            raise ValueError(
                "A MergeBarrier doesn't work with parameter servers, where no "
                "task has a whole version; received "
                f"{type(strategy).__name__}. Use a WeightMixer."
            )
        loss = model.loss
        if not isinstance(loss, str | keras.losses.Loss):
            raise ValueError(
                "A MergeBarrier needs one compiled loss, a keras.losses.Loss "
                f"or its name; received {loss!r}."
            )
        if len(model.teachers) and model.teachers.weight is not self:
            warnings.warn(
                "A MergeBarrier must also be the `distillation_weight`, so "
                "that the group doesn't distill while it mixes; received "
                f"{model.teachers.weight!r}. Pass the MergeBarrier to "
                "`compile`, too.",
                stacklevel=2,
            )
        self._loss = keras.losses.get(loss)
        self._graph = model.graph
        self._values = replicas.WorkerValues(strategy)
        self._loss_of(self._snapshot())
        self._values.gathered(0)
        super().on_train_begin(logs)

    def goes_on(self, staged: Sequence[Any]) -> bool:
        """Whether the chief, and all whose versions these are, still mix."""
        is_wanted = self._values.chiefs(self.barrier is None)
        extras = [each.version.manifest.extras for each in staged]
        if not is_wanted or any(e.get(OPEN_FIELD) is True for e in extras):
            return False
        if staged and replicas.is_chief(self.model.distribute_strategy):
            # At most one comparison waits: a slow one skips mixes.
            others = [each.values for each in staged]
            self._taken = [(self._snapshot(), others)]
        return True

    def end(self) -> None:
        """Opens it: the weight was a constant of the traced steps."""
        super().end()
        self.model.make_train_function(force=True)
        if not replicas.is_chief(self.model.distribute_strategy):
            return
        reason = "as in another group"
        if self.barrier is not None:
            reason = (
                "because the averaged weights have a loss on the held-out "
                f"batch {self.barrier:.4f} above the versions' mean loss"
            )
        _log.warning(
            "Step %d: from now on weights are not mixed, %s.", self.step, reason
        )

    def in_background(self) -> None:
        """Compares what was taken last."""
        super().in_background()
        taken, self._taken = self._taken, []
        for own, others in taken:
            try:
                barrier = self._barrier_of([own, *others])
            except Exception as error:  # TensorFlow raises many kinds.
                _log.info("The versions couldn't be compared: %s", error)
                continue
            # NaN, which a mean may have, is a barrier, too.
            if not barrier <= self._margin:
                self.barrier = barrier
            self.num_compared += 1

    def _snapshot(self) -> list[tf.Tensor]:
        """Returns the student's values, which the next step leaves as they are.

        In the order of its graph.
        """
        return [tf.convert_to_tensor(v.value) for v in self._graph.variables]

    def _barrier_of(self, versions: Sequence[Sequence[Any]]) -> float:
        """Returns the loss of the mean less the mean of the losses.

        ValueError if a version itself has none.
        """
        of_versions = sum(map(self._loss_of, versions)) / len(versions)
        if not math.isfinite(of_versions):
            raise ValueError("the loss of a version is not finite.")
        return self._loss_of(_mean(versions)) - of_versions

    def _loss_of(self, values: Sequence[Any]) -> float:
        tensors = [tf.convert_to_tensor(value) for value in values]
        outputs = self._graph(tensors, self._inputs)
        (output,) = keras.tree.flatten(outputs)
        return float(self._loss(self._targets, output))

    # ---- for a backup ----

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training continues with."""
        return {**super().state(), "barrier": self.barrier}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self.barrier = state["barrier"]
        super().restore(state)


def _mean(versions: Sequence[Sequence[Any]]) -> list[Any]:
    """Returns the mean of floats, and the first of any other values."""
    found = []
    for values in zip(*versions, strict=True):
        first = tf.convert_to_tensor(values[0])
        if first.dtype.is_floating:
            # Equal ones stay what they are.
            apart = [tf.cast(value, first.dtype) - first for value in values]
            first += tf.add_n(apart) / len(apart)
        found.append(first)
    return found
