"""AutoBurnIn: the distillation weight 1 once the loss falls less steeply."""

import copy
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdistill.cluster import replicas
from tfdistill.follow import screen
from tfdistill.training import steps

Logs = steps.Logs

AUTO = "auto"
# Steps between two looks at the loss, and how many are needed. After many in
# which nothing fell, there is nothing to wait for.
_EVERY_STEPS, _LEAST_LOOKS, _MOST_LOOKS = 5, 8, 40
# The fall is over once the later half of the steps has at most this share of
# it. An exponential fall is then at a ninth of its height. It is clear if it is
# so many standard errors.
_LATE_SHARE, _NUM_ERRORS = 0.25, 4.0
# If the training's length is known, the burn-in takes at most this share.
_LONGEST = 0.3
_NEVER = np.iinfo(np.int64).max
_STATE = ("end", "_losses", "_looked", "_before")


class AutoBurnIn(steps.BurnIn):
    """0 until the first steep fall of the task loss is over, then 1.

    What `CodistillModel.compile(distillation_weight="auto")` makes. It is a
    callback, too, which `fit` adds by itself.

    While losses fall steeply, a version of another group that is some steps old
    is much worse than the student, and pulls it back. So every five steps the
    chief notes the mean task loss since the previous look. The fall is over
    once the later half of the steps so far has at most a quarter of it. If no
    fall is clear, as in a continued training, it ends after 40 looks. At the
    latest, it ends after three tenths of the training, if its length is known.
    The weight applies from the next step, on all workers alike.

    Teachers that don't train, such as fixed ones, are worth hearing from the
    first step on: with these alone the weight is 1 throughout.

    Attributes:
        end: The first step at which the weight is 1; the largest int64 until
            that is known.
    """

    def __init__(self) -> None:
        super().__init__()
        self._owner: Any = None
        self._variable: Any = None
        self._forget()

    def _forget(self) -> None:
        self.end = _NEVER
        # The loss at each look; the step of the last look; the batches of this
        # epoch until then, and the sum of their losses.
        self._losses: list[float] = []
        self._looked = 0
        # Where this epoch began, and the length of the one before.
        self._epoch_began, self._epoch_steps = 0, 0
        self._before = [0, 0.0]

    def __call__(self, step: tf.Tensor | int) -> tf.Tensor:
        """Returns the weight at the step, float32 scalar tensor."""
        end = self.end if self._variable is None else self._variable
        over = tf.cast(step, tf.int64) >= tf.convert_to_tensor(end, tf.int64)
        return tf.cast(over, tf.float32)

    # ---- Keras' hooks ----

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins at once if no teacher is trained."""
        super().on_train_begin(logs)
        strategy = self.codistilled.distribute_strategy
        if self._owner is not self.model:
            self._owner = self.model
            self._variable = replicas.told(
                strategy, tf.constant(self.end, tf.int64), name="burn_in_end"
            )
        self._values = replicas.WorkerValues(strategy)
        if self.step == 0:
            self._forget()
        if not self.codistilled.teachers.are_trained:
            self.end = 0
        self._variable.assign(self.end)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Learns how long an epoch is where Keras doesn't know it."""
        super().on_epoch_begin(epoch, logs)
        self._epoch_steps = self.step - self._epoch_began
        self._epoch_began = self.step

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Looks at the loss when it is time, until the burn-in is over."""
        super().on_train_batch_end(batch, logs)
        # A training of a few steps is looked at as often as it needs.
        every = min(_EVERY_STEPS, math.ceil(self._longest) or _EVERY_STEPS)
        if self.end < _NEVER or self.step - self._looked < every:
            return
        self._looked = self.step
        found = 0
        if replicas.is_chief(self.model.distribute_strategy):
            self._look(batch + 1, float((logs or {})["task_loss"]))
            is_last = 0 < self._longest <= self.step
            found = int(has_fallen(self._losses) or is_last)
        if self._values.chiefs(found):
            self.end = self.step
            self._variable.assign(self.end)

    def manifest_extras(self) -> dict[str, Any]:
        """Marks a version as not to learn from, during the burn-in."""
        return {screen.BURN_IN_FIELD: True} if self.end == _NEVER else {}

    def _look(self, count: int, mean: float) -> None:
        """Notes the mean since the last look, from the epoch's mean so far."""
        before, total = self._before
        if count <= before:  # Another epoch.
            before, total = 0, 0.0
        self._before = [count, mean * count]
        self._losses.append((mean * count - total) / (count - before))

    @property
    def _longest(self) -> float:
        """Steps of the longest burn-in; 0 if the training's aren't known."""
        known = self.planned_steps or self._epoch_steps * self.params["epochs"]
        return _LONGEST * known

    # ---- for a backup ----

    def state(self) -> dict[str, Any]:
        """Returns what a resumed training continues with."""
        # Copies: a backup is written while the next steps are made.
        return {name: copy.copy(vars(self)[name]) for name in _STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` returned."""
        self.__dict__.update({name: state[name] for name in _STATE})
        self._variable.assign(self.end)


def has_fallen(losses: Sequence[float]) -> bool:
    """Returns whether the first steep fall of some losses is over.

    Example:
        >>> falling = [2.0 ** (-step / 10) for step in range(100)]
        >>> has_fallen(falling[:20]), has_fallen(falling[:40])
        (False, True)
        >>> has_fallen([0.7] * 20), has_fallen([0.7] * 40)
        (False, True)
    """
    size = len(losses)
    if size < _LEAST_LOOKS:
        return False
    found = np.asarray(losses)
    quarter = size // 4
    middle = (size - quarter) // 2
    now = found[-quarter:].mean()
    then = found[middle : middle + quarter].mean()
    fall = found[: max(1, size // 8)].mean() - now
    # The error of a mean over a quarter of the looks, from how much neighbors
    # differ.
    error = np.diff(found).std() / math.sqrt(2 * quarter)
    if not fall > _NUM_ERRORS * error:
        return size >= _MOST_LOOKS
    return bool(then - now <= _LATE_SHARE * fall)
