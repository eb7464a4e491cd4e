"""What is compared: methods, each as the runs that one trial of it takes.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import functools
import hashlib
import json
import math
import statistics
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.launcher import fields
from tfdistill.recipes import methods
from tfdistill.recipes import recipes

BUDGETS = ("per_group", "total")
# Fewer trials than this show nothing: intervals are given, no conclusions. The
# interval of a churn ratio leaves out "no difference" in 3 of 10 comparisons of
# a method with itself at three trials, in 1 of 20 at four.
LEAST_TRIALS = 4
# The part of a group that has all workers: its gradients take the slow links
# that separate groups leave alone.
LARGE_GROUP = "large_group"
# Seeds of further members: far from other trials' seeds.
_SEEDS_PER_MEMBER = 1000
# And of trials by which a value is chosen.
_TUNING_SEED = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training of some groups.

    `part` names its role in its trial. The last export of `teacher`, a run of
    one group, is its fixed teacher.
    """

    part: str
    recipe: recipes.Recipe
    num_groups: int
    workers_per_group: int
    ps_per_group: int = 0
    seed: int = 0
    teacher: "Run | None" = None

    @property
    def key(self) -> str:
        """Equal for runs that train the same; the name of its directory."""
        content = {
            "recipe": dataclasses.asdict(self.recipe),
            "shape": [
                self.num_groups,
                self.workers_per_group,
                self.ps_per_group,
            ],
            "teacher": self.teacher and self.teacher.key,
        }
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"seed_{self.seed}_{digest}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What one method takes for one seed.

    The groups of `students` predict, as one ensemble if `averaged`.
    """

    students: tuple[Run, ...]
    averaged: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs, in the order in which they must run."""
        teachers = [run.teacher for run in self.students if run.teacher]
        return (*teachers, *self.students)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What all methods share."""

    recipe: recipes.Recipe
    num_groups: int = fields.option(
        "groups in a codistilled run", 2, section="how", least=1
    )
    workers_per_group: int = fields.option("workers in each group", 1, least=1)
    ps_per_group: int = fields.option(
        "parameter servers in each group", 0, least=0
    )
    ensemble_size: int = fields.option(
        "number of models in an ensemble", 2, least=2
    )
    learning_rate_scale: float = fields.option(
        "factor for the learning rate of large_group", 1.0
    )
    smoothing_weight: float = fields.option(
        "how far smoothing moves the labels, in (0, 1)", 0.1
    )
    weight_decay: float = fields.option(
        "weight decay of the method weight_decay", 0.1
    )
    budget: str = fields.option(
        "per_group (default): each group trains for the recipe's steps, so "
        "methods with several groups see more examples in total; total: all "
        "methods see as many examples in total as independent",
        "per_group",
        choices=BUDGETS,
    )

    def __post_init__(self) -> None:
        """Validates what no recipe is made of."""
        fields.check(self)
        for name, most in (
            ("learning_rate_scale", math.inf),
            ("weight_decay", math.inf),
            ("smoothing_weight", 1.0),
        ):
            value = getattr(self, name)
            if not 0 < value < most:
                raise ValueError(
                    f"`{name}` must be above 0 and below {most:g}; received "
                    f"{value}."
                )

    def run(
        self,
        method: str,
        seed: int,
        *,
        part: str = "group",
        num_groups: int = 1,
        workers: int = 1,
        shares: int = 1,
        teacher: Run | None = None,
        **arguments: object,
    ) -> Run:
        """Returns a run of the recipe by a method.

        The seed is added to the recipe's own; the split of the data stays.
        `workers` is a multiple of the tasks of a group, and the budget of a
        trial is shared out over `shares`.
        """
        recipe = self.recipe
        if self.budget == "total":
            recipe = recipe.shortened(shares)
        seed += recipe.settings.get("seed", 0)
        return Run(
            part=part,
            recipe=recipe.changed({"seed": seed}).by_method(
                method, **arguments
            ),
            num_groups=num_groups,
            workers_per_group=workers * self.workers_per_group,
            ps_per_group=workers * self.ps_per_group,
            seed=seed,
            teacher=teacher,
        )


def _one(setup: Setup, seed: int, method: str, **options: str) -> Trial:
    """One group; `options` of the setup are arguments of the method."""
    arguments = {name: getattr(setup, own) for name, own in options.items()}
    return Trial(students=(setup.run(method, seed, **arguments),))


def _several(setup: Setup, seed: int, method: str) -> Trial:
    if setup.num_groups < 2:
        raise ValueError(
            "--num-groups must be >= 2 for groups that teach each other; "
            f"received {setup.num_groups}. To train one group, use the method "
            "independent."
        )
    size = setup.num_groups
    run = setup.run(method, seed, part="groups", num_groups=size, shares=size)
    return Trial(students=(run,))


def _large_group(setup: Setup, seed: int, method: str) -> Trial:
    parts = setup.num_groups
    run = setup.run(
        method,
        seed,
        part=LARGE_GROUP,
        workers=parts,
        shares=parts,
        parts=parts,
        learning_rate_scale=setup.learning_rate_scale,
    )
    return Trial(students=(run,))


def _ensemble(setup: Setup, seed: int, method: str) -> Trial:
    size = setup.ensemble_size
    members = tuple(
        setup.run(
            "independent",
            seed + _SEEDS_PER_MEMBER * index,
            part=f"member_{index}",
            shares=size,
        )
        for index in range(size)
    )
    return Trial(students=members, averaged=True)


def _offline(setup: Setup, seed: int, method: str) -> Trial:
    teacher = setup.run(
        "independent", seed + _SEEDS_PER_MEMBER, part="teacher", shares=2
    )
    student = setup.run(method, seed, part="student", shares=2, teacher=teacher)
    return Trial(students=(student,))


# How many groups a method takes, and which. One of `launch.methods`, except
# for the ensemble, which is several independent groups. The first ones learn
# from nobody, so that nothing of teachers can be swept.
_ALONE: Mapping[str, Callable[[Setup, int, str], Trial]] = {
    "independent": _one,
    "large_group": _large_group,
    "label_smoothing": functools.partial(_one, weight="smoothing_weight"),
    "unigram_smoothing": functools.partial(_one, weight="smoothing_weight"),
    "weight_decay": functools.partial(_one, decay="weight_decay"),
    "ensemble": _ensemble,
    "diloco_alone": _one,
}
_SEVERAL = (
    *("codistill", "codistill_shared", "codistill_coordinated"),
    *("predictions", "averaging", "diloco", "diloco_fragments"),
)
_SHAPES: Mapping[str, Callable[[Setup, int, str], Trial]] = {
    **_ALONE,
    "offline_distillation": _offline,
    "ema_teacher": _one,
    "own_past": _one,
    **dict.fromkeys(_SEVERAL, _several),
}
DESCRIPTIONS: Mapping[str, str] = {
    **{name: methods.describe(name) for name in _SHAPES if name != "ensemble"},
    "independent": "one group with all of the data, without teachers",
    "ensemble": "the mean predictions of several independent groups",
}
_OF_TEACHERS = (
    *("burn_in_steps", "ramp_steps", "weight", "temperature"),
    *("every_steps", "refresh_every_steps"),
)
# Short names of what is swept most.
_BURN_IN = "burn_in"
ALIASES: Mapping[str, str] = {
    _BURN_IN: "burn_in_steps",
    "exchange_interval": "every_steps",
}
NUM_GROUPS = "num_groups"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A method, and perhaps an argument and its value as they were written.

    Or a user's method: `label` is its name, and `options` are an ordinary
    script's options, `NAME=VALUE,...`, on top of `method`.
    """

    method: str
    field: str | None = None
    value: str | None = None
    label: str | None = None
    options: str | None = None

    @property
    def name(self) -> str:
        """A name unique in a comparison."""
        if self.label is not None:
            return self.label
        if self.field is None:
            return self.method
        return f"{self.method}[{self.field}={self.value}]"

    @property
    def describe(self) -> str:
        """What it is, in a line."""
        if self.options is not None:
            return f"{self.method} with {self.options}"
        return DESCRIPTIONS[self.method]

    def trial(self, setup: Setup, seed: int) -> Trial:
        """Returns what one trial of it takes."""
        field = ALIASES.get(str(self.field), str(self.field))
        if field in _OF_TEACHERS and self.method in _ALONE:
            raise ValueError(
                f"{self.method} has no teachers, so a sweep of {field} would "
                "change nothing. Sweep another method."
            )
        return _SHAPES[self.method](self._setup(setup), seed, self.method)

    def _setup(self, setup: Setup) -> Setup:
        if self.options is not None:
            recipe = setup.recipe.with_options(pairs(self.options))
            return dataclasses.replace(setup, recipe=recipe)
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
        known = {**setup.recipe.arguments, **setup.recipe.settings}
        if self.field == _BURN_IN and field not in known:
            raise ValueError(
                f"{self.field} sweeps the argument {field}, which the recipe "
                f"doesn't have. Add {field}=100 to its function, and let the "
                "workload use schedules.BurnIn(steps=burn_in_steps)."
            )
        recipe = recipes.override(setup.recipe, [f"{field}={self.value}"])
        given = {**recipe.arguments, **recipe.settings}
        every, looks = (
            given.get(name, 1)
            for name in ("every_steps", "refresh_every_steps")
        )
        if field == "every_steps" and looks > every:
            # To look less often than there is news would hide the interval.
            recipe = recipe.changed({"refresh_every_steps": every})
        return dataclasses.replace(setup, recipe=recipe)


def parse_methods(text: str) -> list[Variant]:
    """Returns the methods that a comma-separated list names."""
    return [Variant(method=_checked(name)) for name in text.split(",")]


def parse_sweep(text: str) -> list[Variant]:
    """Returns the variants of one sweep.

    `[METHOD:]NAME=VALUE,VALUE,...`: the method is codistill by default, and
    the name one of `ALIASES`, `num_groups`, or any argument of the recipe.
    """
    before, equals, after = text.partition("=")
    method, colon, field = before.rpartition(":")
    values = split(after)
    if not equals or not field or not all(values):
        raise ValueError(
            "A sweep must be [METHOD:]NAME=VALUE,VALUE,... such as "
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


def pairs(text: str) -> dict[str, str]:
    """Returns the values of `NAME=VALUE,NAME=VALUE` by name."""
    return dict(x.split("=", 1) for x in split(text))


def _checked(name: str) -> str:
    return methods.check(name.strip(), DESCRIPTIONS)


def unique(variants: Sequence[Variant]) -> list[Variant]:
    """Returns each variant once, in the order given."""
    return list(dict.fromkeys(variants))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """A field, the values that each method is tried with, and how.

    `overrides` turn the report's recipe into the recipe of these trials, which
    have other validation data.
    """

    field: str
    values: tuple[str, ...]
    overrides: tuple[str, ...]
    num_trials: int

    @classmethod
    def parse(
        cls, text: str, *, overrides: Sequence[str], num_trials: int
    ) -> "Tuning":
        """Returns what the options of `tfdistill compare` ask for."""
        field, equals, after = text.partition("=")
        values = split(after)
        if not equals or not field or len(set(values)) < 2 or not all(values):
            raise ValueError(
                "--tune must be FIELD=VALUE,VALUE,... with different values, "
                "such as learning_rate=0.01,0.02; received "
                f"{text!r}."
            )
        if not overrides:
            raise ValueError(
                "--tune must use validation data other than the report's; "
                "received no --tune-override. Name other data, such as "
                "--tune-override=validation=tuning or another path."
            )
        return cls(
            field=ALIASES.get(field, field),
            values=tuple(values),
            overrides=tuple(overrides),
            num_trials=num_trials,
        )

    def tuned(self, setup: Setup, value: str) -> Setup:
        """Returns the setup with a value of the field."""
        return _overridden(setup, [f"{self.field}={value}"])

    def trials(self, variant: Variant, setup: Setup) -> dict[str, list[Trial]]:
        """Returns the trials of one method, by value.

        A batch belongs to a whole group: one worker trains the same.
        """
        setup = _overridden(setup, self.overrides)
        if not setup.ps_per_group:
            setup = dataclasses.replace(setup, workers_per_group=1)
        return {
            value: [
                variant.trial(self.tuned(setup, value), _TUNING_SEED + index)
                for index in range(self.num_trials)
            ]
            for value in self.values
        }

    def chosen(self, losses: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Returns the value of the lowest mean final loss, and all losses."""
        best = min(losses, key=lambda value: statistics.fmean(losses[value]))
        return {"field": self.field, "value": best, "losses": losses}


def _overridden(setup: Setup, changes: Sequence[str]) -> Setup:
    recipe = recipes.override(setup.recipe, changes)
    return dataclasses.replace(setup, recipe=recipe)
