"""The sections of a configuration, the optimizer's among them."""

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import ClassVar

from launch.config import fields

# The data set that each model is for.
MODELS = {
    "cifar10": "cifar10",
    "cifar10_small": "cifar10",
    "criteo": "criteo",
    "digits": "digits",
    "imagenet": "imagenet",
    "language_model": "language_model",
}
DISTILLATION_LOSSES = (
    "BinarySoftTargetCrossEntropy",
    "ForwardKL",
    "LogitsMeanSquaredError",
    "ReverseKL",
    "SoftTargetCrossEntropy",
)
VARIABLES_DTYPES = ("bfloat16",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(fields.Section):
    """The student.

    Attributes:
        name: One of `MODELS`.
        arguments: Keyword arguments of its builder in `models`.
        group_arguments: Arguments in which the groups differ: nothing
            (default), or for each group those that replace or extend
            `arguments`.
    """

    PREFIX: ClassVar[str] = "model."
    name: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    group_arguments: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_choice("name", tuple(MODELS))

    def arguments_of(self, group: int) -> dict[str, Any]:
        """Returns the builder's arguments in one group."""
        own = self.group_arguments[group] if self.group_arguments else {}
        return {**self.arguments, **own}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(fields.Section):
    """The training and validation data.

    Attributes:
        name: A module of `models` with `make_datasets`.
        mode: `"disjoint"` (default): the groups share out the training data;
            `"shared"`: each has all of it.
        global_batch_size: Examples per step of a whole group.
        seed: Of the order of the examples; groups get different orders.
        path: Files of the data, for those that take a path: a file, a pattern
            or a directory. Default None: the data set's own default.
        arguments: Further keyword arguments of `make_datasets`.
    """

    PREFIX: ClassVar[str] = "data."
    name: str
    mode: str = "disjoint"
    global_batch_size: int
    seed: int = 0
    path: str | tuple[str, ...] | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_choice("name", tuple(sorted(set(MODELS.values()))))
        self.check_choice("mode", ("disjoint", "shared"))
        self.check_range("global_batch_size", least=1)
        self.check_range("seed", least=0)
        own = {"global_batch_size", "data", "seed", "path"}
        named = own & set(self.arguments)
        if named:
            raise ValueError(
                "`data.arguments` must leave out what has a field of its own; "
                f"received {sorted(named)}. Set data.global_batch_size, "
                "data.mode, data.seed or data.path."
            )

    def check_num_workers(self, num_workers: int) -> None:
        """Checks that each of the workers that share a batch gets examples.

        Raises:
            ValueError: If there are more workers than examples.
        """
        if self.global_batch_size < num_workers:
            raise ValueError(
                "`data.global_batch_size` must be at least the number of "
                f"workers of a group, {num_workers}; received "
                f"{self.global_batch_size}. Batches are global: raise it, or "
                "use fewer workers."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codistillation(fields.Section):
    """How the student learns from the other groups.

    Attributes:
        enabled: False trains the groups apart. They still export.
        loss: One of `DISTILLATION_LOSSES`.
        temperature: Divides the logits, > 0. Default 1.
        aggregation: `"probabilities"` (default) or `"logits"`: of what the
            mean over several teachers is taken.
        weight: Of the distillation loss after burn-in, >= 0.
        burn_in_steps: First steps, at weight 0.
        ramp_steps: Steps after burn-in in which the weight grows. Default 0:
            it jumps.
        ramp: `"linear"` (default) or `"cosine"`.
        saved_models: Directories of fixed teachers besides the other groups:
            ordinary distillation.
        trust_saved_models: Whether to load those that hold operations which
            reach beyond the model. Default False.
        canary_examples: Of this group's validation data, how many of the
            first a teacher must predict before it is obeyed: finite, and not
            worse than knowing nothing. Default 32; 0 for none.
        canary_margin: By how much, in nats, its loss on them may exceed that
            of the uniform distribution. Default 0.5.
        max_bad_batches: Batches in a row with NaN or infinite outputs after
            which a version is dropped. Default 3.
        boundaries: In place of `optimizer.boundaries` where a group learns
            from others; runs apart keep the optimizer's. Default None: the
            optimizer's.
        weight_decay_factors: Likewise, in place of those of the optimizer.
    """

    PREFIX: ClassVar[str] = "codistillation."
    enabled: bool = True
    loss: str = "SoftTargetCrossEntropy"
    temperature: float = 1.0
    aggregation: str = "probabilities"
    weight: float = 1.0
    burn_in_steps: int = 0
    ramp_steps: int = 0
    ramp: str = "linear"
    saved_models: tuple[str, ...] = ()
    trust_saved_models: bool = False
    canary_examples: int = 32
    canary_margin: float = 0.5
    max_bad_batches: int = 3
    boundaries: tuple[int, ...] | None = None
    weight_decay_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_choice("loss", DISTILLATION_LOSSES)
        self.check_choice("aggregation", ("probabilities", "logits"))
        self.check_choice("ramp", ("linear", "cosine"))
        self.check_range("temperature", above=0)
        for name in (
            "weight",
            "burn_in_steps",
            "ramp_steps",
            "canary_examples",
            "canary_margin",
        ):
            self.check_range(name, least=0)
        self.check_range("max_bad_batches", least=1)
        fixed = (self.temperature, self.aggregation) == (1.0, "logits")
        if self.loss == "LogitsMeanSquaredError" and not fixed:
            raise ValueError(
                "LogitsMeanSquaredError compares the mean of plain logits; "
                f"received temperature {self.temperature} and aggregation "
                f'{self.aggregation!r}. Set codistillation.aggregation="logits"'
                " and leave the temperature at 1."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smoothing(fields.Section):
    """A fixed distribution that labels are drawn towards.

    Attributes:
        kind: `"none"` (default), `"uniform"`, or `"unigram"`: as often as each
            label comes in the training data.
        weight: Share of that distribution in the target, in (0, 1). Default
            0.1.
    """

    PREFIX: ClassVar[str] = "smoothing."
    kind: str = "none"
    weight: float = 0.1

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_choice("kind", ("none", "uniform", "unigram"))
        self.check_range("weight", above=0)
        if self.weight >= 1:
            raise ValueError(
                f"`smoothing.weight` must be < 1; received {self.weight}. Of "
                "the labels something must be left."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(fields.Section):
    """How groups see each other.

    Attributes:
        every_steps: Steps between two exports of the student.
        refresh_every_steps: Steps between two looks for newer teachers.
        poll_secs: Seconds between two looks at the shared directory, in the
            background. Default 1.
        max_to_keep: Newest versions that always stay, >= 2. Default 3.
        variables_dtype: `"bfloat16"` halves what travels. Default None: the
            variables' own.
        topology: From whom a group learns: `"all"` others (default), its
            predecessor in a `"ring"`, or a list of groups for each group.
        max_staleness_steps: Older teachers are not obeyed. Default None: any
            age is fine.
        max_staleness_secs: Likewise, seconds since this group first saw them.
        staleness_ramp_steps: Steps after `max_staleness_steps` in which a
            teacher's weight falls to 0. Default 0: at once.
        staleness_ramp_secs: Likewise, after `max_staleness_secs`.
        allow_other_graphs: Whether to run graphs of peers that differ from
            this group's own. Default False.
        allow_other_schemas: Whether to obey, with a warning, peers whose
            labels, vocabulary or columns are others. Default False.
    """

    PREFIX: ClassVar[str] = "exchange."
    every_steps: int
    refresh_every_steps: int
    poll_secs: float = 1.0
    max_to_keep: int = 3
    variables_dtype: str | None = None
    topology: str | tuple[tuple[int, ...], ...] = "all"
    max_staleness_steps: int | None = None
    max_staleness_secs: float | None = None
    staleness_ramp_steps: int = 0
    staleness_ramp_secs: float = 0.0
    allow_other_graphs: bool = False
    allow_other_schemas: bool = False

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self.check_range("every_steps", least=1)
        self.check_range("refresh_every_steps", least=1)
        self.check_range("poll_secs", above=0)
        self.check_range("max_to_keep", least=2)
        for unit in ("steps", "secs"):
            self.check_range(f"max_staleness_{unit}", least=0)
            self.check_range(f"staleness_ramp_{unit}", least=0)
            ramp = getattr(self, f"staleness_ramp_{unit}")
            if ramp and getattr(self, f"max_staleness_{unit}") is None:
                raise ValueError(
                    f"`exchange.staleness_ramp_{unit}` must come with an "
                    f"`exchange.max_staleness_{unit}` at which the ramp "
                    f"begins; received {ramp} without one."
                )
        if self.variables_dtype is not None:
            self.check_choice("variables_dtype", VARIABLES_DTYPES)
        if isinstance(self.topology, str):
            self.check_choice("topology", ("all", "ring"))
        else:
            _check_topology(self.topology)


def _check_topology(topology: Sequence[Sequence[int]]) -> None:
    for group, peers in enumerate(topology):
        in_range = all(
            0 <= peer < len(topology) and peer != group for peer in peers
        )
        if not in_range or len(set(peers)) != len(peers):
            raise ValueError(
                "`exchange.topology` must list for each group the others that "
                f"it learns from, each once; received {list(peers)} for group "
                f"{group} of {len(topology)}."
            )


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
