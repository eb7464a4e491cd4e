"""The methods that are compared, each as the runs that one trial of it takes.

A method changes the recipe as little as it can: its own fields, the shape of
the cluster, the seed, and the steps if the budget asks for it.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import difflib
import fractions
import math
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch import recipes
from launch.comparison import runs
from launch.config import config as config_lib
from launch.config import sections

BUDGETS = ("per_group", "total")
# Fewer trials than this show nothing: intervals are given, no conclusions. The
# interval of a churn ratio leaves out "no difference" in 3 of 10 comparisons of
# a method with itself at three trials, in 1 of 20 at four.
LEAST_TRIALS = 4
# Fields that count steps of the whole run; they shrink with it.
_STEP_FIELDS = {
    "codistillation": ("burn_in_steps", "ramp_steps", "boundaries"),
    "optimizer": ("warmup_steps", "boundaries"),
}


def scaled(
    config: config_lib.Config, share: fractions.Fraction
) -> config_lib.Config:
    """Returns the same run in fewer steps, with all of its schedule.

    Evaluations keep their number, and come at the same shares of the run.

    `share * num_steps` steps, or a few less: a whole number of executions
    between evaluations.
    """
    if share == 1:
        return config
    num_evaluations = config.num_steps // config.evaluate_every_steps
    unit = config.steps_per_execution
    wanted = config.num_steps * share / num_evaluations / unit
    every = math.floor(wanted) * unit  # Never more than its share.
    if not every:
        raise ValueError(
            f"{share} of {config.num_steps} steps leave less than one step "
            f"for each of {num_evaluations} evaluations. Raise num_steps or "
            "evaluate_every_steps, or use --budget=per_group."
        )
    share = fractions.Fraction(every * num_evaluations, config.num_steps)
    changes: dict[str, Any] = {
        "num_steps": every * num_evaluations,
        "evaluate_every_steps": every,
    }
    for name, fields in _STEP_FIELDS.items():
        section = getattr(config, name)
        known = {field.name for field in dataclasses.fields(section)}
        changes[name] = dataclasses.replace(
            section,
            **{
                field: _shrunk(getattr(section, field), share)
                for field in fields
                if field in known
            },
        )
    return dataclasses.replace(config, **changes)


def _shrunk(steps: Any, share: fractions.Fraction) -> Any:
    if steps is None:
        return None
    if isinstance(steps, tuple):
        return tuple(max(1, round(step * share)) for step in steps)
    return round(steps * share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What all methods share; `launch.compare --help` describes the fields."""

    config: config_lib.Config
    num_groups: int = 2
    workers_per_group: int = 1
    ps_per_group: int = 0
    budget: str = "per_group"
    ensemble_size: int = 2
    learning_rate_scale: float = 1.0
    smoothing_weight: float = 0.1
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        """Validates what no configuration is made of."""
        for name, least in (
            ("num_groups", 1),
            ("workers_per_group", 1),
            ("ps_per_group", 0),
            ("ensemble_size", 2),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(
                    f"--{name} must be >= {least}; received {value}."
                )
        for name in ("learning_rate_scale", "weight_decay"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"--{name} must be > 0; received {value}.")
        if not 0 < self.smoothing_weight < 1:
            raise ValueError(
                "--smoothing_weight must be in (0, 1); received "
                f"{self.smoothing_weight}."
            )

    def share(self, parts: int) -> fractions.Fraction:
        """Returns the share of the steps for each of several parts."""
        return fractions.Fraction(1, parts if self.budget == "total" else 1)

    def seeded(
        self, seed: int, *, parts: int = 1, **changes: Any
    ) -> config_lib.Config:
        """Returns the recipe of one run.

        The seed is added to the recipe's own, of weights and of the data's
        order; the split of the data stays. The budget of a trial is shared out
        over `parts`.
        """
        whole = scaled(self.config, self.share(parts))
        data = changes.pop("data", whole.data)
        changes["data"] = dataclasses.replace(data, seed=whole.data.seed + seed)
        learn = dataclasses.replace(whole.codistillation, num_students=1)
        changes.setdefault("codistillation", learn)
        # Only the methods that are about it mix weights.
        changes.setdefault("mixing", sections.Mixing())
        changes.setdefault("seed_groups_alike", False)
        return dataclasses.replace(whole, seed=whole.seed + seed, **changes)

    def group(
        self, config: config_lib.Config, *, name: str, workers: int = 1
    ) -> runs.Run:
        """Returns the run of one group that learns from nobody.

        `name` is the part it plays in its trial, `workers` a multiple of the
        tasks of a group.
        """
        model = config.model
        alone = dataclasses.replace(
            config,
            # Of groups that differ it is the first.
            model=dataclasses.replace(
                model, arguments=model.arguments_of(0), group_arguments=()
            ),
            codistillation=_alone(config.codistillation),
            # Nobody reads its exports; the last one is always written.
            exchange=dataclasses.replace(
                config.exchange,
                every_steps=config.num_steps,
                offset_steps=None,
                topology="all",
            ),
        )
        return self.run(alone, name=name, num_groups=1, workers=workers)

    def run(
        self,
        config: config_lib.Config,
        *,
        name: str,
        num_groups: int,
        workers: int = 1,
        teachers: tuple[runs.Run, ...] = (),
    ) -> runs.Run:
        """Returns a run with groups of the common shape."""
        config.check_num_groups(num_groups)
        return runs.Run(
            part=name,
            config=config,
            num_groups=num_groups,
            workers_per_group=workers * self.workers_per_group,
            ps_per_group=workers * self.ps_per_group,
            teachers=teachers,
        )


def _alone(learn: Any) -> Any:
    """Returns the section of a group that learns from nobody."""
    return dataclasses.replace(
        learn,
        enabled=False,
        saved_models=(),
        include_past=False,
        labels_from=None,
    )


# Seeds of further members: far from those of other trials.
_SEEDS_PER_MEMBER = 1000
# For the first step of the other groups.
_WAIT_SECS = 300.0


def _independent(setup: Setup, seed: int) -> runs.Trial:
    run = setup.group(setup.seeded(seed), name="group")
    return runs.Trial(runs=(run,), students=(run,))


def _large_group(setup: Setup, seed: int) -> runs.Trial:
    parts, config = setup.num_groups, setup.config
    scale = setup.learning_rate_scale
    changed = setup.seeded(
        seed,
        parts=parts,
        data=dataclasses.replace(
            config.data,
            global_batch_size=parts * config.data.global_batch_size,
        ),
    )
    rate = changed.optimizer.learning_rate * scale
    changed = dataclasses.replace(
        changed,
        optimizer=dataclasses.replace(changed.optimizer, learning_rate=rate),
    )
    run = setup.group(changed, name=runs.LARGE_GROUP, workers=parts)
    return runs.Trial(runs=(run,), students=(run,))


def _smoothed(kind: str) -> Callable[[Setup, int], runs.Trial]:
    def make(setup: Setup, seed: int) -> runs.Trial:
        smoothing = dataclasses.replace(
            setup.config.smoothing, kind=kind, weight=setup.smoothing_weight
        )
        run = setup.group(setup.seeded(seed, smoothing=smoothing), name="group")
        return runs.Trial(runs=(run,), students=(run,))

    return make


def _weight_decay(setup: Setup, seed: int) -> runs.Trial:
    config = setup.seeded(seed)
    optimizer = dataclasses.replace(
        config.optimizer, weight_decay=setup.weight_decay
    )
    config = dataclasses.replace(config, optimizer=optimizer)
    run = setup.group(config, name="group")
    return runs.Trial(runs=(run,), students=(run,))


def _ensemble(setup: Setup, seed: int) -> runs.Trial:
    size = setup.ensemble_size
    members = tuple(
        setup.group(
            setup.seeded(seed + _SEEDS_PER_MEMBER * index, parts=size),
            name=f"member_{index}",
        )
        for index in range(size)
    )
    return runs.Trial(runs=members, students=members, averaged=True)


def _offline_distillation(setup: Setup, seed: int) -> runs.Trial:
    teacher = setup.group(
        setup.seeded(seed + _SEEDS_PER_MEMBER, parts=2), name="teacher"
    )
    config = setup.seeded(seed, parts=2)
    # A finished teacher is worth hearing from the first step on.
    learn = dataclasses.replace(
        config.codistillation, enabled=True, burn_in_steps=0, ramp_steps=0
    )
    alone = dataclasses.replace(
        config.exchange,
        every_steps=config.num_steps,
        offset_steps=None,
        topology="all",
    )
    config = dataclasses.replace(config, codistillation=learn, exchange=alone)
    student = setup.run(
        config, name="student", num_groups=1, teachers=(teacher,)
    )
    return runs.Trial(runs=(teacher, student), students=(student,))


# Of the mean, at each version: about the last ten of them.
_OWN_PAST = 0.9


def _ema_teacher(setup: Setup, seed: int) -> runs.Trial:
    config = setup.seeded(seed)
    config = dataclasses.replace(
        config,
        codistillation=dataclasses.replace(
            config.codistillation,
            enabled=True,
            # A sweep may have set it.
            include_past=config.codistillation.include_past or _OWN_PAST,
        ),
        exchange=dataclasses.replace(
            config.exchange,
            # The mean moves at each version, as finely as others would look.
            every_steps=config.exchange.refresh_every_steps,
            offset_steps=None,
            topology="all",
        ),
    )
    run = setup.run(config, name="group", num_groups=1)
    return runs.Trial(runs=(run,), students=(run,))


def _own_past(setup: Setup, seed: int) -> runs.Trial:
    config = setup.seeded(seed)
    learn = dataclasses.replace(
        config.codistillation, enabled=True, include_past=True
    )
    alone = dataclasses.replace(config.exchange, topology="all")
    config = dataclasses.replace(config, codistillation=learn, exchange=alone)
    run = setup.run(config, name="group", num_groups=1)
    return runs.Trial(runs=(run,), students=(run,))


def _codistilled(
    mode: str, by: str = "versions"
) -> Callable[[Setup, int], runs.Trial]:
    def make(setup: Setup, seed: int) -> runs.Trial:
        _check_several(setup)
        config = setup.config
        config = setup.seeded(
            seed,
            parts=setup.num_groups,
            data=dataclasses.replace(config.data, mode=mode),
        )
        config = dataclasses.replace(
            config,
            codistillation=dataclasses.replace(
                config.codistillation,
                enabled=True,
                by=by,
                addresses=config.codistillation.addresses
                if by == "served"
                else (),
            ),
        )
        config = dataclasses.replace(config, start_together_secs=_WAIT_SECS)
        if by == "predictions":
            config = _exported_once(config)
        run = setup.run(config, name="groups", num_groups=setup.num_groups)
        return runs.Trial(runs=(run,), students=(run,))

    return make


# The outer optimizer of Douillard et al. 2023 (arXiv:2311.08105), but for its
# momentum of .9, which needs hundreds of mixes: recipes have 10 to 50. Final
# losses with .9, .6 and .3 were .448, .095 and .075 on digits (20 mixes), and
# 4.104 and 4.167 with .6 and .3 on language_model_small (30 mixes).
_OUTER = {"learning_rate": 0.7, "momentum": 0.6, "nesterov": True}


def _mixed(
    rule: str,
    *,
    arguments: Mapping[str, Any] | None = None,
    topology: str | None = None,
    optimizer: Callable[[Any, int], Any] | None = None,
    then_teach: bool = False,
) -> Callable[[Setup, int], runs.Trial]:
    """Returns a method whose groups mix their weights, and wait for it.

    `optimizer` makes the optimizer's section out of the recipe's and of the
    steps between mixes. Groups may teach each other once their mean is worse
    than they are.
    """

    def make(setup: Setup, seed: int) -> runs.Trial:
        _check_several(setup)
        mixing = setup.config.mixing
        if mixing.rule != rule:  # Otherwise the recipe has its numbers.
            mixing = dataclasses.replace(
                mixing,
                rule=rule,
                arguments=arguments or {},
                quorum="all",
                grace_secs=_WAIT_SECS,
            )
        mixing = dataclasses.replace(
            mixing,
            topology=topology or mixing.topology,
            barrier_margin=(mixing.barrier_margin or 0.0)
            if then_teach
            else None,
        )
        config = setup.seeded(seed, parts=setup.num_groups)
        learn = dataclasses.replace(
            config.codistillation, enabled=True, by="versions"
        )
        if optimizer is not None:
            changed = optimizer(config.optimizer, mixing.every_steps)
            config = dataclasses.replace(config, optimizer=changed)
        config = dataclasses.replace(
            config,
            mixing=mixing,
            seed_groups_alike=True,
            codistillation=learn if then_teach else _alone(learn),
            exchange=dataclasses.replace(
                config.exchange,
                every_steps=mixing.every_steps,
                # Of one step in all groups, and no averages.
                offset_steps=None,
                weights="model",
                ema_decay=sections.Exchange.ema_decay,
                refresh_every_steps=min(
                    mixing.every_steps, config.exchange.refresh_every_steps
                ),
                topology="all",
            ),
            start_together_secs=_WAIT_SECS,
        )
        run = setup.run(config, name="groups", num_groups=setup.num_groups)
        return runs.Trial(runs=(run,), students=(run,))

    return make


def _decoupled(options: Any, every_steps: int) -> Any:
    """DiLoCo's inner optimizer is AdamW."""
    if options.name != "adam":
        return options
    return dataclasses.replace(options, name="adamw")


def _quasi_global(options: Any, every_steps: int) -> Any:
    if options.name != "sgd":
        raise ValueError(
            "quasi_global replaces the momentum of SGD; received the optimizer "
            f"{options.name}. Override optimizer.name=sgd and "
            "optimizer.learning_rate, or leave the method out."
        )
    arguments = {**options.arguments, "every_steps": every_steps}
    return dataclasses.replace(
        options, name="quasi_global_momentum", arguments=arguments
    )


def _mutual_learning(setup: Setup, seed: int) -> runs.Trial:
    _check_several(setup)
    whole = setup.config
    config = setup.seeded(
        seed,
        parts=setup.num_groups,
        # As many passes over the same batches as the groups of predictions.
        data=dataclasses.replace(whole.data, mode="coordinated"),
        checkpoints="none",
    )
    config = dataclasses.replace(
        config,
        codistillation=dataclasses.replace(
            config.codistillation,
            enabled=True,
            by="versions",
            addresses=(),
            num_students=setup.num_groups,
            saved_models=(),
            include_past=False,
            labels_from=None,
        ),
        exchange=dataclasses.replace(config.exchange, topology="all"),
    )
    config = _exported_once(config)
    run = setup.run(config, name="students", num_groups=1)
    return runs.Trial(runs=(run,), students=(run,))


def _exported_once(config: config_lib.Config) -> config_lib.Config:
    """For students whose exports nobody reads: only the last is written."""
    exchange = dataclasses.replace(
        config.exchange, every_steps=config.num_steps, offset_steps=0
    )
    return dataclasses.replace(config, exchange=exchange)


def _check_several(setup: Setup) -> None:
    if setup.num_groups < 2:
        raise ValueError(
            "--num_groups must be >= 2 for groups that teach each other; "
            f"received {setup.num_groups}. For one group, use the method "
            "independent."
        )


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train: the trial of a seed, and a description."""

    make: Callable[[Setup, int], runs.Trial]
    describe: str


METHODS: Mapping[str, Method] = {
    "independent": Method(
        _independent, "one group with all of the data, no teachers"
    ),
    "large_group": Method(
        _large_group,
        "one group with the workers, and the summed batch, of all groups",
    ),
    "label_smoothing": Method(
        _smoothed("uniform"), "independent, labels smoothed uniformly"
    ),
    "unigram_smoothing": Method(
        _smoothed("unigram"), "independent, smoothed by the labels' frequencies"
    ),
    "confidence_penalty": Method(
        _smoothed("confidence_penalty"),
        "independent, less sure of itself by a penalty on low entropy",
    ),
    "weight_decay": Method(
        _weight_decay, "independent, with a weight decay of its own"
    ),
    "ensemble": Method(
        _ensemble, "the mean predictions of several independent groups"
    ),
    "offline_distillation": Method(
        _offline_distillation,
        "independent, taught by an independent group that was trained before",
    ),
    "ema_teacher": Method(
        _ema_teacher,
        "independent, taught by a running mean of its own weights",
    ),
    "own_past": Method(
        _own_past,
        "independent, taught by its own last version",
    ),
    "codistill": Method(
        _codistilled("disjoint"),
        "groups that teach each other, each on its own part of the data",
    ),
    "codistill_shared": Method(
        _codistilled("shared"),
        "groups that teach each other, each on all of the data",
    ),
    "codistill_coordinated": Method(
        _codistilled("coordinated"),
        "groups that teach each other, and all see the same batches",
    ),
    "predictions": Method(
        _codistilled("coordinated", by="predictions"),
        "groups that send each other what they predict of the same batches",
    ),
    "averaging": Method(
        _mixed("model_averaging"),
        "groups that average their weights, each on its own part of the data",
    ),
    "diloco": Method(
        _mixed("outer_optimizer", arguments=_OUTER, optimizer=_decoupled),
        "groups whose progress moves common weights by Nesterov momentum",
    ),
    "averaging_then_codistill": Method(
        _mixed("model_averaging", then_teach=True),
        "groups that average their weights while that helps, and then teach "
        "each other",
    ),
    "quasi_global": Method(
        _mixed("model_averaging", topology="ring", optimizer=_quasi_global),
        "groups in a ring that average their weights, with momentum of that",
    ),
    "mutual_learning": Method(
        _mutual_learning,
        "as many students as groups in one process, which learn at each step "
        "from what the others predict",
    ),
    "served": Method(
        _codistilled("shared", by="served"),
        "groups on all of the data, which ask a server of each other group",
    ),
}


# Short names of what is swept most.
ALIASES: Mapping[str, str] = {
    "burn_in": "codistillation.burn_in_steps",
    "exchange_interval": "exchange.every_steps",
    "temperature": "codistillation.temperature",
    "topology": "exchange.topology",
    "weight": "codistillation.weight",
}
NUM_GROUPS = "num_groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A method, and perhaps a field and its value as they were written."""

    method: str
    field: str | None = None
    value: str | None = None

    @property
    def name(self) -> str:
        """A name unique in a comparison."""
        if self.field is None:
            return self.method
        return f"{self.method}[{self.field}={self.value}]"

    @property
    def describe(self) -> str:
        """What it is, in a line."""
        return METHODS[self.method].describe

    def trial(self, setup: Setup, seed: int) -> runs.Trial:
        """Returns what one trial of it takes."""
        trial = METHODS[self.method].make(self._setup(setup), seed)
        field = ALIASES.get(str(self.field), str(self.field))
        learns = any(run.config.codistillation.enabled for run in trial.runs)
        if field.startswith(("codistillation.", "exchange.")) and not learns:
            raise ValueError(
                f"{self.method} learns from nobody; received the sweep of "
                f"{field}, which would change nothing. Sweep another method."
            )
        return trial

    def _setup(self, setup: Setup) -> Setup:
        if self.field is None:
            return setup
        if self.field == NUM_GROUPS:
            if not str(self.value).isdecimal():
                raise ValueError(
                    "num_groups must be a whole number; received "
                    f"{self.value!r}."
                )
            return dataclasses.replace(setup, num_groups=int(str(self.value)))
        field = ALIASES.get(self.field, self.field)
        config = recipes.override(setup.config, [f"{field}={self.value}"])
        exchange = config.exchange
        if exchange.refresh_every_steps > exchange.every_steps:
            # To look less often than there is news would hide the interval.
            exchange = dataclasses.replace(
                exchange, refresh_every_steps=exchange.every_steps
            )
        return dataclasses.replace(
            setup, config=dataclasses.replace(config, exchange=exchange)
        )


def parse_methods(text: str) -> list[Variant]:
    """Returns the methods that a comma-separated list names."""
    return [Variant(method=_checked(name)) for name in text.split(",")]


def parse_sweep(text: str) -> list[Variant]:
    """Returns the variants of one sweep.

    `[METHOD:]FIELD=VALUE,VALUE,...`: the method is codistill by default, and
    the field one of `ALIASES`, `num_groups`, or any of the recipe.
    """
    before, equals, after = text.partition("=")
    method, colon, field = before.rpartition(":")
    values = split(after)
    if not equals or not field or not all(values):
        raise ValueError(
            "A sweep must be [METHOD:]FIELD=VALUE,VALUE,... such as "
            f"exchange_interval=50,250,1000; received {text!r}."
        )
    name = _checked(method) if colon else "codistill"
    return [Variant(method=name, field=field, value=v) for v in values]


def split(text: str) -> list[str]:
    """Splits at the commas outside of brackets."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            values.append("")
        else:
            values[-1] += character
    return [value.strip() for value in values]


def _checked(name: str) -> str:
    name = name.strip()
    if name in METHODS:
        return name
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"There is no method {name!r}.{hint} Methods: {', '.join(METHODS)}."
    )


def unique(variants: Sequence[Variant]) -> list[Variant]:
    """Returns each variant once, in the order given."""
    return list(dict.fromkeys(variants))
