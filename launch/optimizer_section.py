"""The section of a configuration that describes the optimizer."""

import dataclasses
from collections.abc import Mapping
from typing import Any
from typing import ClassVar

from launch import config_fields as fields

OPTIMIZERS = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "ftrl",
    "lamb",
    "lars",
    "lion",
    "nadam",
    "rmsprop",
    "sgd",
)
LEARNING_RATES = ("constant", "linear", "cosine", "steps")
# What Keras gives AdamW where nothing is said.
_ADAMW_WEIGHT_DECAY = 0.004


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(fields.Section):
    """The optimizer, its learning rate and its weight decay.

    Attributes:
        name: One of `OPTIMIZERS`: those of Keras, and `tfdistill.LARS`.
        learning_rate: The highest one; > 0.
        schedule: `"constant"` (default); `"linear"` or `"cosine"`: a decay to
            zero over the whole run; or `"steps"`: drops at `boundaries`.
        boundaries: Numbers of updates after which `"steps"` lowers the rate.
        drop_factor: What it is multiplied by at each of them. Default 0.1.
        warmup_steps: First steps, in which the rate rises evenly to
            `learning_rate`. A decay begins after them.
        warmup_from: Where it rises from. Default 0.
        weight_decay: Of kernels, not of biases and normalization parameters.
            `"sgd"` and `"lars"` add weight_decay x kernel to the gradient;
            all others shrink kernels by learning rate x weight_decay, apart
            from the gradient (and from the trust ratio of `"lamb"`). Default
            None: none (Keras' 0.004 for `"adamw"`).
        weight_decay_factors: For each of `boundaries`, what `weight_decay` is
            multiplied by from there on. Default (): it is constant.
        clipnorm: Largest norm of each variable's gradient, or None (default).
        global_clipnorm: Largest norm of all gradients together, or None.
        clipvalue: Largest absolute value in a gradient, or None.
        arguments: Further arguments of the optimizer, such as `momentum`.
    """

    PREFIX: ClassVar[str] = "optimizer."
    name: str = "adam"
    learning_rate: float
    schedule: str = "constant"
    boundaries: tuple[int, ...] = ()
    drop_factor: float = 0.1
    warmup_steps: int = 0
    warmup_from: float = 0.0
    weight_decay: float | None = None
    weight_decay_factors: tuple[float, ...] = ()
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    clipvalue: float | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_choice("name", OPTIMIZERS)
        self.check_choice("schedule", LEARNING_RATES)
        for name in ("warmup_steps", "warmup_from", "weight_decay"):
            self.check_range(name, least=0)
        clips = ("clipnorm", "global_clipnorm", "clipvalue")
        for name in ("learning_rate", "drop_factor", *clips):
            self.check_range(name, above=0)
        self._check_boundaries()
        self._check_weight_decay()
        if self.warmup_from and not self.warmup_steps:
            raise ValueError(
                "`optimizer.warmup_from` needs optimizer.warmup_steps > 0; "
                f"received {self.warmup_from} and 0 steps. Set both."
            )
        given = [name for name in clips if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                "At most one way of clipping may be set; received "
                f"{', '.join(given)}. Set the others to null."
            )
        named = {"learning_rate", "weight_decay", *clips} & set(self.arguments)
        if named:
            raise ValueError(
                "`optimizer.arguments` must leave out what has a field of its "
                f"own; received {sorted(named)}."
            )

    def _check_boundaries(self) -> None:
        has_steps = self.schedule == "steps"
        if has_steps != bool(self.boundaries):
            raise ValueError(
                '`optimizer.boundaries` must be given with schedule "steps", '
                f"and only there; received {list(self.boundaries)} with "
                f"{self.schedule!r}. Override both."
            )
        if not has_steps and self.drop_factor != 0.1:
            raise ValueError(
                '`optimizer.drop_factor` needs schedule "steps"; received '
                f"{self.drop_factor} with {self.schedule!r}."
            )
        # The first drop is not before the end of the warm-up.
        marks = (max(self.warmup_steps - 1, 0), *self.boundaries)
        pairs = zip(marks, marks[1:], strict=False)
        if any(after <= before for before, after in pairs):
            raise ValueError(
                "`optimizer.boundaries` must increase, from >= 1 and from >= "
                f"optimizer.warmup_steps on; received {list(self.boundaries)} "
                f"with {self.warmup_steps} warm-up steps."
            )

    def _check_weight_decay(self) -> None:
        factors = self.weight_decay_factors
        if not factors:
            return
        if self.decay is None:
            raise ValueError(
                "`optimizer.weight_decay_factors` needs a weight decay to "
                f"multiply; received {list(factors)} and weight_decay=null. "
                "Set optimizer.weight_decay."
            )
        if len(factors) != len(self.boundaries) or min(factors) < 0:
            raise ValueError(
                "`optimizer.weight_decay_factors` must have one number >= 0 "
                f"for each of {len(self.boundaries)} boundaries "
                f"{list(self.boundaries)}; received {list(factors)}."
            )

    @property
    def decay(self) -> float | None:
        """The weight decay to begin with; None for none."""
        if self.weight_decay is None and self.name == "adamw":
            return _ADAMW_WEIGHT_DECAY
        return self.weight_decay


def constant_decay_notice(
    options: Optimizer,
) -> str | None:
    """Returns what to tell of codistillation with these options, or None."""
    if not options.decay or options.weight_decay_factors:
        return None
    steps = (
        "" if options.schedule == "steps" else 'optimizer.schedule="steps", '
    )
    return (
        f"Codistillation with the constant weight decay {options.decay}: each "
        "of them regularizes, and both together may do it too much. Sodhani "
        "et al. 2020 (arXiv:2010.02838) lost about 2% of ImageNet's accuracy "
        "this way; they got it back with a weight decay that falls with the "
        f"learning rate and with later drops. Consider {steps}"
        "codistillation.weight_decay_factors and codistillation.boundaries."
    )
