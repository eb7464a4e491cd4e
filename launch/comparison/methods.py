"""The methods that are compared, each as the runs that one trial of it takes.

A method changes the recipe as little as it can: its own fields, the shape of
the cluster, the seed, and the steps if the budget asks for it.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import fractions
import math
from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

from launch import config as config_lib
from launch.comparison import budget
from launch.comparison import plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What all methods have in common.

    Attributes:
        config: The recipe with its overrides.
        num_groups: Groups of a codistilled run.
        workers_per_group: Workers in each group.
        ps_per_group: Parameter servers in each group.
        budget: One of `budget.BUDGETS`.
        ensemble_size: Members of an ensemble.
        learning_rate_scale: Of `large_group`, whose batches are larger.
        smoothing_weight: Of both kinds of label smoothing.
    """

    config: config_lib.Config
    num_groups: int = 2
    workers_per_group: int = 1
    ps_per_group: int = 0
    budget: str = "per_group"
    ensemble_size: int = 2
    learning_rate_scale: float = 1.0
    smoothing_weight: float = 0.1

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
        if not 0 < self.learning_rate_scale < math.inf:
            raise ValueError(
                "--learning_rate_scale must be > 0; received "
                f"{self.learning_rate_scale}."
            )
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

        Args:
            seed: Added to the recipe's own: of weights and of the data's
                order. The split of the data stays.
            parts: Over how many parts the budget of a trial is shared out.
            **changes: Sections to replace.
        """
        whole = budget.scaled(self.config, self.share(parts))
        data = changes.pop("data", whole.data)
        changes["data"] = dataclasses.replace(data, seed=whole.data.seed + seed)
        return dataclasses.replace(whole, seed=whole.seed + seed, **changes)

    def group(
        self, config: config_lib.Config, *, name: str, workers: int = 1
    ) -> plan.Run:
        """Returns the run of one group that learns from nobody.

        Args:
            config: What to run.
            name: The part it plays in its trial.
            workers: Multiple of the tasks of a group.
        """
        model = config.model
        alone = dataclasses.replace(
            config,
            # Of groups that differ it is the first.
            model=dataclasses.replace(
                model, arguments=model.arguments_of(0), group_arguments=()
            ),
            codistillation=dataclasses.replace(
                config.codistillation, enabled=False, saved_models=()
            ),
            # Nobody reads its exports; the last one is always written.
            exchange=dataclasses.replace(
                config.exchange, every_steps=config.num_steps, topology="all"
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
        teachers: tuple[plan.Run, ...] = (),
    ) -> plan.Run:
        """Returns a run with groups of the common shape."""
        config.check_num_groups(num_groups)
        return plan.Run(
            part=name,
            config=config,
            num_groups=num_groups,
            workers_per_group=workers * self.workers_per_group,
            ps_per_group=workers * self.ps_per_group,
            teachers=teachers,
        )


# Seeds of further members: far from those of other trials.
_SEEDS_PER_MEMBER = 1000
# For the first step of the other groups.
_WAIT_SECS = 300.0


def _independent(setup: Setup, seed: int) -> plan.Trial:
    run = setup.group(setup.seeded(seed), name="group")
    return plan.Trial(runs=(run,), students=(run,))


def _large_group(setup: Setup, seed: int) -> plan.Trial:
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
    run = setup.group(changed, name="group", workers=parts)
    return plan.Trial(runs=(run,), students=(run,))


def _smoothed(kind: str) -> Callable[[Setup, int], plan.Trial]:
    def make(setup: Setup, seed: int) -> plan.Trial:
        smoothing = dataclasses.replace(
            setup.config.smoothing, kind=kind, weight=setup.smoothing_weight
        )
        run = setup.group(setup.seeded(seed, smoothing=smoothing), name="group")
        return plan.Trial(runs=(run,), students=(run,))

    return make


def _ensemble(setup: Setup, seed: int) -> plan.Trial:
    size = setup.ensemble_size
    members = tuple(
        setup.group(
            setup.seeded(seed + _SEEDS_PER_MEMBER * index, parts=size),
            name=f"member_{index}",
        )
        for index in range(size)
    )
    return plan.Trial(runs=members, students=members, averaged=True)


def _offline_distillation(setup: Setup, seed: int) -> plan.Trial:
    teacher = setup.group(
        setup.seeded(seed + _SEEDS_PER_MEMBER, parts=2), name="teacher"
    )
    config = setup.seeded(seed, parts=2)
    # A finished teacher is worth hearing from the first step on.
    learn = dataclasses.replace(
        config.codistillation, enabled=True, burn_in_steps=0, ramp_steps=0
    )
    alone = dataclasses.replace(
        config.exchange, every_steps=config.num_steps, topology="all"
    )
    config = dataclasses.replace(config, codistillation=learn, exchange=alone)
    student = setup.run(
        config, name="student", num_groups=1, teachers=(teacher,)
    )
    return plan.Trial(runs=(teacher, student), students=(student,))


def _codistilled(mode: str) -> Callable[[Setup, int], plan.Trial]:
    def make(setup: Setup, seed: int) -> plan.Trial:
        config = setup.config
        if setup.num_groups < 2:
            raise ValueError(
                "Groups that teach each other are >= 2; received num_groups="
                f"{setup.num_groups}. One group alone is the method "
                "independent."
            )
        config = setup.seeded(
            seed,
            parts=setup.num_groups,
            data=dataclasses.replace(config.data, mode=mode),
        )
        config = dataclasses.replace(
            config,
            codistillation=dataclasses.replace(
                config.codistillation, enabled=True
            ),
        )
        config = dataclasses.replace(config, start_together_secs=_WAIT_SECS)
        run = setup.run(config, name="groups", num_groups=setup.num_groups)
        return plan.Trial(runs=(run,), students=(run,))

    return make


@dataclasses.dataclass(frozen=True)
class Method:
    """One way to train.

    Attributes:
        make: Returns the trial of a seed.
        describe: What it is, in a line.
    """

    make: Callable[[Setup, int], plan.Trial]
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
    "ensemble": Method(
        _ensemble, "the mean predictions of several independent groups"
    ),
    "offline_distillation": Method(
        _offline_distillation,
        "independent, taught by an independent group that was trained before",
    ),
    "codistill": Method(
        _codistilled("disjoint"),
        "groups that teach each other, each on its own part of the data",
    ),
    "codistill_shared": Method(
        _codistilled("shared"),
        "groups that teach each other, each on all of the data",
    ),
}
