"""The sections of a configuration, the optimizer's among them.

A field whose name is an argument in the library has its meaning and its
default; a test holds them equal.
"""

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
    "criteo_dlrm": "criteo",
    "digits": "digits",
    "imagenet": "imagenet",
    "language_model": "language_model",
    "shakespeare": "shakespeare",
}
DISTILLATION_LOSSES = (
    "BinarySoftTargetCrossEntropy",
    "ForwardKL",
    "LogitsMeanSquaredError",
    "ReverseKL",
    "SampledSoftTargetCrossEntropy",
    "SoftTargetCrossEntropy",
    "TopKSoftTargetCrossEntropy",
)
# Fields of `codistillation` that only one loss takes.
_OF_ONE_LOSS = {
    "SampledSoftTargetCrossEntropy": ("num_samples", "power", "proposal"),
    "TopKSoftTargetCrossEntropy": ("k", "tail"),
}
# Data that TensorFlow Datasets may be read for, by name.
_FROM_TFDS = ("criteo", "language_model")
# As in `tfdistill.StudentExporter`.
_EMA_DECAY = 0.95
CLIPS = ("clipnorm", "global_clipnorm", "clipvalue")


def _check_left_out(
    field: str, arguments: Mapping[str, Any], own: Mapping[str, str]
) -> None:
    """Checks that free arguments leave out what has a field of its own."""
    named = sorted(own.keys() & arguments.keys())
    if named:
        raise ValueError(
            f"`{field}` must leave out what has a field of its own; received "
            f"{named}. Set {', '.join(own[name] for name in named)}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model(fields.Section):
    """The student."""

    PREFIX: ClassVar[str] = "model."
    name: str = fields.option(choices=tuple(MODELS))
    # Keyword arguments of its builder in `models`.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Where groups differ: for each, what replaces or extends `arguments`.
    group_arguments: tuple[Mapping[str, Any], ...] = ()

    def arguments_of(self, group: int) -> dict[str, Any]:
        """Returns the builder's arguments in one group."""
        own = self.group_arguments[group] if self.group_arguments else {}
        return {**self.arguments, **own}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data(fields.Section):
    """The training and validation data: what `make_datasets` is called with."""

    PREFIX: ClassVar[str] = "data."
    # A module of `models`.
    name: str = fields.option(choices=tuple(sorted(set(MODELS.values()))))
    # "disjoint": the groups share out the training data; "shared": each has
    # all of it, in an order of its own; "coordinated": in one order for all.
    mode: str = fields.option(
        "disjoint", choices=("disjoint", "shared", "coordinated")
    )
    # Examples per step of a whole group.
    global_batch_size: int = fields.option(least=1)
    # Of the order of the examples; groups get different orders.
    seed: int = fields.option(0, least=0)
    # A file, a pattern, a directory or several, for data that take a path.
    path: str | tuple[str, ...] | None = None
    # Instead of a path: a prepared data set of TensorFlow Datasets, NAME or
    # NAME[SPLIT].
    tfds: str | None = None
    # Further keyword arguments.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        own = {"data": "data.mode"}
        for name in ("global_batch_size", "seed", "path", "tfds"):
            own[name] = f"data.{name}"
        _check_left_out("data.arguments", self.arguments, own)
        if self.tfds is None:
            return
        if self.name not in _FROM_TFDS:
            raise ValueError(
                f"`data.tfds` must be null, except for the data "
                f"{' and '.join(_FROM_TFDS)}; received {self.tfds!r} for "
                f"{self.name!r}. Leave it out."
            )
        if self.path is not None:
            raise ValueError(
                "At most one of `data.path` and `data.tfds` may be set; "
                f"received {self.path!r} and {self.tfds!r}. Set the other to "
                "null."
            )
        if not self.tfds or self.tfds.startswith("tfds:"):
            raise ValueError(
                "`data.tfds` must be NAME or NAME[SPLIT], such as "
                f"criteo_display_ads; received {self.tfds!r}."
            )

    @property
    def source(self) -> dict[str, Any]:
        """The `path` argument and the free arguments of `make_datasets`."""
        path = self.path if self.tfds is None else f"tfds:{self.tfds}"
        return {**self.arguments, **({"path": path} if path else {})}

    def check_num_workers(self, num_workers: int) -> None:
        """Checks that each of the workers that share a batch gets examples."""
        if self.global_batch_size < num_workers:
            raise ValueError(
                "`data.global_batch_size` must be at least the number of "
                f"workers of a group, {num_workers}; received "
                f"{self.global_batch_size}. Batches are global: raise it, or "
                "use fewer workers."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Codistillation(fields.Section):
    """How the student learns from the other groups."""

    PREFIX: ClassVar[str] = "codistillation."
    # False trains the groups apart. They still export.
    enabled: bool = True
    # Of `tfdistill.losses`, and its arguments.
    loss: str = fields.option(
        "SoftTargetCrossEntropy", choices=DISTILLATION_LOSSES
    )
    temperature: float = fields.option(1.0, above=0)
    aggregation: str = fields.option(
        "probabilities", choices=("probabilities", "logits")
    )
    # Of `SampledSoftTargetCrossEntropy`: classes drawn for each position, the
    # exponent of the proposal, and what the proposal is.
    num_samples: int = fields.option(32, least=1)
    power: float = fields.option(1.0, least=0)
    proposal: str = fields.option("teacher", choices=("teacher", "difference"))
    # Of `TopKSoftTargetCrossEntropy`: the classes that are kept, and whether
    # all others count as one.
    k: int = fields.option(32, least=1)
    tail: bool = True
    # Of the distillation loss: 0 in the first steps, then a ramp of this form
    # and length (0: a jump) up to `weight`; see `tfdistill.schedules`.
    weight: float = fields.option(1.0, least=0)
    burn_in_steps: int = fields.option(0, least=0)
    ramp_steps: int = fields.option(0, least=0)
    ramp: str = fields.option("linear", choices=("linear", "cosine"))
    # How groups teach: as in `tfdistill.TeacherSet`, or "served": a server of
    # each group labels the batches of the others.
    by: str = fields.option(
        "versions", choices=("versions", "predictions", "served")
    )
    # Of "served": `host:port` of the server of each group, in order. Empty:
    # those that launch.local and launch.compare start.
    addresses: tuple[str, ...] = ()
    # As in `tfdistill.TeacherSet`: how long a step waits for "predictions",
    # which need coordinated data.
    wait_secs: float = fields.option(0.05, least=0)
    # As in `tfdistill.TeacherSet`: ordinary distillation, besides the groups.
    saved_models: tuple[str, ...] = ()
    trust_saved_models: bool = False
    # As in `tfdistill.TeacherSet`: the student's own last version, or a
    # running mean of its versions, is a teacher.
    include_past: bool | float = fields.option(False, least=0, below=1)
    # Students that the only group trains in one process, on the same batches:
    # each learns from what the others predict in the same step (deep mutual
    # learning). 1: no such thing.
    num_students: int = fields.option(1, least=1)
    # A directory that `launch.label` wrote for this recipe and these groups;
    # `{group}` in it stands for the group's number. Null: none.
    labels_from: str | None = None
    # Of this group's validation data, how many of the first are the
    # `tfdistill.Canary`; 0 for none.
    canary_examples: int = fields.option(256, least=0, first_default=32)
    canary_margin: float = fields.option(0.5, least=0)
    canary_student_margin: float = fields.option(0.2, least=0)
    # As in `tfdistill.TeacherSet`.
    max_bad_batches: int = fields.option(3, least=1)
    # Replace the optimizer's if a group learns from others. Null: the
    # optimizer's.
    weight_decay: float | None = fields.option(None, least=0)
    boundaries: tuple[int, ...] | None = None
    weight_decay_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        fixed = (self.temperature, self.aggregation) == (1.0, "logits")
        if self.loss == "LogitsMeanSquaredError" and not fixed:
            raise ValueError(
                "LogitsMeanSquaredError compares the mean of plain logits; "
                f"received temperature {self.temperature} and aggregation "
                f'{self.aggregation!r}. Set codistillation.aggregation="logits"'
                " and leave the temperature at 1."
            )
        if self.addresses and self.by != "served":
            raise ValueError(
                "`codistillation.addresses` are of servers that label the "
                f"data; received {list(self.addresses)} with "
                f'codistillation.by="{self.by}". Override '
                "codistillation.by=served, or leave them out."
            )
        defaults = {
            field.name: field.default for field in dataclasses.fields(self)
        }
        for loss, names in _OF_ONE_LOSS.items():
            idle = [n for n in names if getattr(self, n) != defaults[n]]
            if idle and self.loss != loss:
                raise ValueError(
                    f"`codistillation.{idle[0]}` is an argument of {loss}; "
                    f"received {getattr(self, idle[0])!r} with "
                    f"{self.loss}. Set codistillation.loss={loss}."
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Smoothing(fields.Section):
    """A fixed distribution that labels are mixed with, or something like it."""

    PREFIX: ClassVar[str] = "smoothing."
    # "unigram": as often as each label comes in the training data.
    # "confidence_penalty": no distribution; the loss is less the entropy of
    # what the student predicts.
    kind: str = fields.option(
        "none", choices=("none", "uniform", "unigram", "confidence_penalty")
    )
    # Share of that distribution in the target, or what the entropy counts.
    weight: float = fields.option(0.1, above=0, below=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange(fields.Section):
    """How groups see each other."""

    PREFIX: ClassVar[str] = "exchange."
    # Steps between two exports, and between two looks for newer teachers; as
    # in `tfdistill.StudentExporter` and `tfdistill.TeacherLoader`.
    every_steps: int = fields.option(least=1)
    refresh_every_steps: int = fields.option(least=1)
    # As in `tfdistill.TeacherSet`.
    poll_secs: float = fields.option(0.1, above=0, first_default=1.0)
    # As in `tfdistill.Exchange`.
    max_to_keep: int = fields.option(3, least=2)
    # As in `tfdistill.StudentExporter`.
    variables_dtype: str | None = fields.option(None, choices=("bfloat16",))
    # As in `tfdistill.StudentExporter`: null has the groups take turns.
    offset_steps: int | None = fields.option(None, least=0)
    # As in `tfdistill.StudentExporter`: what versions hold.
    weights: str = fields.option("model", choices=("model", "ema"))
    ema_decay: float = fields.option(_EMA_DECAY, least=0, below=1)
    # From whom a group learns: all others, its predecessor in a ring, or a
    # list of groups for each group.
    topology: str | tuple[tuple[int, ...], ...] = fields.option(
        "all", choices=("all", "ring")
    )
    # As in `tfdistill.TeacherSet`.
    max_staleness_steps: int | str | None = fields.option(
        "auto", least=0, choices=("auto",), first_default=None
    )
    max_staleness_secs: float | None = fields.option(None, least=0)
    max_staleness_examples: float | None = fields.option(None, least=0)
    staleness_ramp_steps: int = fields.option(0, least=0)
    staleness_ramp_secs: float = fields.option(0.0, least=0)
    staleness_ramp_examples: float = fields.option(0.0, least=0)
    allow_other_graphs: bool = False
    allow_other_schemas: bool = False

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        for unit in ("steps", "secs", "examples"):
            ramp = getattr(self, f"staleness_ramp_{unit}")
            most = getattr(self, f"max_staleness_{unit}")
            if ramp and most in (None, "auto"):
                raise ValueError(
                    f"`exchange.staleness_ramp_{unit}` must come with an "
                    f"`exchange.max_staleness_{unit}` at which the ramp "
                    f"begins; received {ramp} without one."
                )
        if (self.offset_steps or 0) >= self.every_steps:
            raise ValueError(
                "`exchange.offset_steps` must be < `exchange.every_steps`; "
                f"received {self.offset_steps} and {self.every_steps}. "
                "Override both."
            )
        if self.weights == "model" and self.ema_decay != _EMA_DECAY:
            raise ValueError(
                '`exchange.ema_decay` is of exchange.weights="ema"; received '
                f'{self.ema_decay} with "model". Override exchange.weights=ema.'
            )
        if not isinstance(self.topology, str):
            _check_topology(self.topology, "exchange.topology", "learns from")


def _check_topology(
    topology: Sequence[Sequence[int]], name: str, does: str
) -> None:
    for group, peers in enumerate(topology):
        in_range = all(
            0 <= peer < len(topology) and peer != group for peer in peers
        )
        if not in_range or len(set(peers)) != len(peers):
            raise ValueError(
                f"`{name}` must list for each group the others that it "
                f"{does}, each once; received {list(peers)} for group {group} "
                f"of {len(topology)}."
            )


# Of `tfdistill.mixing`, by their names in lower case.
MIXING_RULES = (
    "none",
    "elastic_averaging",
    "model_averaging",
    "outer_optimizer",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixing(fields.Section):
    """How groups mix their weights, whether or not they teach each other."""

    PREFIX: ClassVar[str] = "mixing."
    # "none": not at all.
    rule: str = fields.option("none", choices=MIXING_RULES)
    # Of the rule, such as `alpha`; of "outer_optimizer", of its SGD.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # As in `tfdistill.WeightMixer`.
    every_steps: int = fields.option(50, least=1)
    # With whom: all other groups, those before and after it in a ring, pairs
    # that are drawn for each mix, or a list of groups for each group.
    topology: str | tuple[tuple[int, ...], ...] = fields.option(
        "all", choices=("all", "ring", "gossip")
    )
    # As in `tfdistill.WeightMixer`.
    quorum: int | str = fields.option(1, least=1, choices=("all",))
    grace_secs: float = fields.option(0.0, least=0)
    weigh_by: str = fields.option("groups", choices=("groups", "examples"))
    # Groups mix only as long as the mean of their versions is no worse than
    # they are, by this margin (nats), and teach each other after that: as in
    # `tfdistill.schedules.MergeBarrier`. Null: they mix to the end.
    barrier_margin: float | None = fields.option(None, least=0)

    @property
    def enabled(self) -> bool:
        """Whether groups mix their weights."""
        return self.rule != "none"

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        if self.arguments and not self.enabled:
            raise ValueError(
                "`mixing.arguments` are of a rule; received "
                f"{dict(self.arguments)} with mixing.rule=none. Override "
                "mixing.rule, or leave them out."
            )
        if self.barrier_margin is not None and not self.enabled:
            raise ValueError(
                "`mixing.barrier_margin` ends the mixing; received "
                f"{self.barrier_margin} with mixing.rule=none. Override "
                "mixing.rule, or leave it out."
            )
        if not isinstance(self.topology, str):
            _check_topology(self.topology, "mixing.topology", "mixes with")
            for group, peers in enumerate(self.topology):
                alone = [p for p in peers if group not in self.topology[p]]
                if alone:
                    raise ValueError(
                        "`mixing.topology` must have each group mix with "
                        "those that mix with it; received "
                        f"{list(peers)} for group {group} and "
                        f"{list(self.topology[alone[0]])} for group {alone[0]}."
                    )


# Those of Keras, `tfdistill.LARS`, and SGD with
# `tfdistill.optimizers.QuasiGlobalMomentum`.
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
    "quasi_global_momentum",
    "rmsprop",
    "sgd",
)
LEARNING_RATES = ("constant", "linear", "cosine", "steps")
# Keras' default for AdamW.
_ADAMW_WEIGHT_DECAY = 0.004


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer(fields.Section):
    """The optimizer, its learning rate and its weight decay."""

    PREFIX: ClassVar[str] = "optimizer."
    name: str = fields.option("adam", choices=OPTIMIZERS)
    # The highest one.
    learning_rate: float = fields.option(above=0)
    # "linear" and "cosine" fall to zero over the whole run; "steps" multiplies
    # the rate by `drop_factor` after each of these numbers of updates.
    schedule: str = fields.option("constant", choices=LEARNING_RATES)
    boundaries: tuple[int, ...] = ()
    drop_factor: float = fields.option(0.1, above=0)
    # First steps, in which the rate rises evenly from `warmup_from` to
    # `learning_rate`. A decay begins after them.
    warmup_steps: int = fields.option(0, least=0)
    warmup_from: float = fields.option(0.0, least=0)
    # Of kernels, not of biases and normalization parameters. "sgd", "lars" and
    # "quasi_global_momentum" add weight_decay x kernel to the gradient; all
    # others shrink kernels by learning rate x weight_decay, apart from the
    # gradient (and from the trust ratio of "lamb"). Null: none (Keras' 0.004
    # for "adamw").
    weight_decay: float | None = fields.option(None, least=0)
    # For each of `boundaries`, what `weight_decay` is multiplied by from there
    # on. Empty: it is constant.
    weight_decay_factors: tuple[float, ...] = ()
    # As in `keras.optimizers.Optimizer`; at most one of them.
    clipnorm: float | None = fields.option(None, above=0)
    global_clipnorm: float | None = fields.option(None, above=0)
    clipvalue: float | None = fields.option(None, above=0)
    # Further arguments of the optimizer, such as `momentum`.
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Validates the fields."""
        super().__post_init__()
        self._check_boundaries()
        self._check_weight_decay()
        if self.warmup_from and not self.warmup_steps:
            raise ValueError(
                "`optimizer.warmup_from` needs optimizer.warmup_steps > 0; "
                f"received {self.warmup_from} and 0 steps. Set both."
            )
        given = [name for name in CLIPS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(
                "At most one way of clipping may be set; received "
                f"{', '.join(given)}. Set the others to null."
            )
        own = ("learning_rate", "weight_decay", *CLIPS)
        _check_left_out(
            "optimizer.arguments",
            self.arguments,
            {name: f"optimizer.{name}" for name in own},
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
    options: Optimizer, learn: Codistillation
) -> str | None:
    """Returns a warning about codistillation with these options, or None."""
    chosen = options.weight_decay_factors or learn.weight_decay is not None
    if not options.decay or chosen:
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
        "codistillation.weight_decay_factors and codistillation.boundaries, or "
        "a smaller codistillation.weight_decay."
    )
