"""How a group's weights change when it mixes them with its peers' weights.

A rule is a pure function of arrays or tensors, element by element. It sees
the others only in the mean of all that take part, so that what it costs does
not grow with their number. It is for weights that are trained; of the rest,

* slots of the group's optimizer stay as they are: they are its own;
* floats that are not trained, such as batch statistics, take `statistics`:
  what a momentum would do to a variance has no meaning;
* integers, counters and states of random generators stay as they are.

The papers' full texts were not available, so only the numbers of well-known
equations and algorithms are cited. The formulas were compared with programs:
PAPA's, by its authors, and CNTK's BlockMomentumSGD.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

Values = Sequence[Any]


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _towards(own: Values, target: Values, share: float) -> list[Any]:
    """Moves each a share of the way; where both are equal, not at all."""
    return [o + share * (t - o) for o, t in zip(own, target, strict=True)]


class Rule:
    """A rule for mixing weights. Rules are frozen and hold no state."""

    @property
    def description(self) -> str:
        """What it is, equally in all processes: groups mix by one rule."""
        return _without_addresses(repr(self))

    @property
    def way(self) -> float | None:
        """The share of the way to the mean that all floats move.

        None if the rule does anything else.
        """
        return None

    def start(self, weights: Values) -> list[Any]:
        """Returns the rule's state before the first mix.

        Args:
            weights: The weights that all groups begin with.

        Returns:
            A flat list of arrays or tensors. Default: none.
        """
        return []

    def mixed(
        self, own: Values, mean: Values, state: Values, *, num: tf.Tensor | int
    ) -> tuple[list[Any], list[Any]]:
        """Returns the new weights and the new state.

        Args:
            own: This group's weights, arrays or tensors of floats.
            mean: The mean of these and of the peers' that take part, which
                may be weighted; of the same shapes and dtypes.
            state: What `start` returned, or the last `mixed`.
            num: How many groups take part, this one included.
        """
        if self.way is None:
            raise NotImplementedError(
                f"{type(self).__name__} must have `mixed`, which returns the "
                "new weights and the new state; or `way`, a share of the way "
                "to the mean."
            )
        return _towards(own, mean, self.way), []

    def statistics(self, own: Values, mean: Values) -> list[Any]:
        """Returns new values of floats that are not trained.

        Arguments as in `mixed`. Default: the mean, or the share of the way.
        """
        return list(mean) if self.way is None else _towards(own, mean, self.way)


@dataclasses.dataclass(frozen=True)
class ModelAveraging(Rule):
    """Moves the weights part of the way toward the mean.

        w <- (1 - alpha) w + alpha mean

    Model averaging as in ShadowSync (Zheng et al. 2020, arXiv:2003.03477). With
    0.01 every ten steps it is the pull of PAPA (Jolicoeur-Martineau et al.
    2023, arXiv:2304.03094), which keeps 0.99: groups stay different, and near
    enough to be averaged at the end. Statistics that are not trained move by
    the same share.

    Args:
        alpha: The share, > 0 and <= 1. Default 1: the mean itself.

    Example:
        >>> ModelAveraging(0.5).mixed([4.0], [2.0], [], num=2)
        ([3.0], [])
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        """Checks the share."""
        is_number = type(self.alpha) in (int, float)
        if not is_number or not 0 < self.alpha <= 1:
            raise ValueError(
                "`alpha` must be a number > 0 and <= 1; received "
                f"{self.alpha!r}."
            )

    @property
    def way(self) -> float:
        """The share."""
        return self.alpha


@dataclasses.dataclass(frozen=True)
class OuterOptimizer(Rule):
    """Treats the progress since the last mix as an optimizer's gradient.

        g = anchor - mean,   anchor <- optimizer(anchor, g),   w <- anchor

    The anchor is the result of the last mix, and initially the weights that all
    groups begin with. `SGD(1.0)` is FedAvg (McMahan et al. 2017,
    arXiv:1602.05629), up to rounding; `SGD(1.0, momentum=0.5)` is the block
    momentum of BMUF for two groups (Chen and Huo 2016, ICASSP; for n groups 1 -
    1 / n); `SGD(0.7, momentum=0.9, nesterov=True)` is DiLoCo (Douillard et al.
    2023, arXiv:2311.08105), whose groups train with AdamW. A schedule of the
    learning rate counts mixes. Statistics that are not trained take the mean.

    Args:
        optimizer: A `keras.optimizers.Optimizer`. The rule creates its own copy
            from the configuration, and never changes the given optimizer.

    Example:
        >>> rule = OuterOptimizer(keras.optimizers.SGD(0.5))
        >>> begin = [tf.constant([4.0])]
        >>> new, _ = rule.mixed(
        ...     begin, [tf.constant([2.0])], rule.start(begin), num=2
        ... )
        >>> float(new[0][0])
        3.0
    """

    optimizer: keras.optimizers.Optimizer
    # By shapes and dtypes of the weights: variables that lend the optimizer a
    # place to work in. TensorFlow's optimizers have no `stateless_apply`.
    _places: dict[Any, Any] = dataclasses.field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Checks that it is an optimizer."""
        if not isinstance(self.optimizer, keras.optimizers.Optimizer):
            raise ValueError(
                "`optimizer` must be a keras.optimizers.Optimizer; received "
                f"{self.optimizer!r}. DiLoCo's is keras.optimizers.SGD(0.7, "
                "momentum=0.9, nesterov=True)."
            )

    @property
    def description(self) -> str:
        """Its name, and a digest of the optimizer's configuration."""
        config = {**self.optimizer.get_config(), "name": None}
        text = json.dumps(config, sort_keys=True, default=repr)
        digest = hashlib.sha256(_without_addresses(text).encode())
        return f"{super().description} {digest.hexdigest()[:16]}"

    def start(self, weights: Values) -> list[Any]:
        """Returns the anchor, and the optimizer's variables at their start."""
        return [*weights, *self._place(weights)[2]]

    def mixed(
        self, own: Values, mean: Values, state: Values, *, num: tf.Tensor | int
    ) -> tuple[list[Any], list[Any]]:
        """Moves the anchor, and takes it; see `Rule.mixed`."""
        anchor = state[: len(own)]
        gradients = [a - m for a, m in zip(anchor, mean, strict=True)]
        new = self.moved(gradients, state)
        return new[: len(own)], new

    def moved(self, gradients: Values, state: Values) -> list[tf.Tensor]:
        """Returns the state after a step of the optimizer: anchor, then slots.

        `gradients` are the anchor's, of its shapes and dtypes.
        """
        optimizer, anchor, _ = self._place(gradients)
        variables = [*anchor, *optimizer.variables]
        for variable, value in zip(variables, state, strict=True):
            variable.assign(value)
        optimizer.apply(list(gradients), anchor)
        return [tf.convert_to_tensor(variable.value) for variable in variables]

    def _place(
        self, weights: Values
    ) -> tuple[Any, list[keras.Variable], list[tf.Tensor]]:
        """Returns an optimizer, its weights, and what its variables were."""
        key = tuple((tuple(w.shape), str(w.dtype)) for w in weights)
        if key not in self._places:
            with tf.init_scope():
                made = type(self.optimizer).from_config(
                    self.optimizer.get_config()
                )
                anchor = [
                    keras.Variable(tf.zeros(w.shape, w.dtype)) for w in weights
                ]
                made.build(anchor)
                slots = [tf.convert_to_tensor(v.value) for v in made.variables]
            self._places[key] = made, anchor, slots
        return self._places[key]
