"""What one run of a recipe consists of: checked, immutable, exact in JSON.

Imports neither TensorFlow nor Keras, so that a mistake is reported at once.
"""

import dataclasses
import json
import pathlib
from typing import ClassVar

from launch.config import fields
from launch.config import sections

DTYPE_POLICIES = ("float32", "mixed_bfloat16", "bfloat16", "float64")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(fields.Section):
    """A whole run, the same for all of its groups."""

    PREFIX: ClassVar[str] = ""
    # Name of the recipe that it began as.
    recipe: str
    model: sections.Model
    data: sections.Data
    optimizer: sections.Optimizer
    codistillation: sections.Codistillation
    exchange: sections.Exchange
    # Training steps of each group, and steps between evaluations.
    num_steps: int = fields.option(least=1)
    evaluate_every_steps: int = fields.option(least=1)
    # Of Keras' `compile`; divides `evaluate_every_steps`.
    steps_per_execution: int = fields.option(1, least=1)
    # Of the student.
    dtype_policy: str = fields.option("float32", choices=DTYPE_POLICIES)
    # Of initial weights and dropout; each group makes another one of it, and
    # all workers of a group the same.
    seed: int = fields.option(0, least=0)
    # "best": the student of the lowest validation loss as `best.keras`;
    # "all": one at each evaluation.
    checkpoints: str = fields.option("none", choices=("none", "best", "all"))
    # A group resumes from its last backup when the same command is run again.
    # Null: one at each evaluation.
    backup_every_steps: int | None = fields.option(None, least=1)
    # Of the labels.
    smoothing: sections.Smoothing = dataclasses.field(
        default_factory=sections.Smoothing
    )
    mixing: sections.Mixing = dataclasses.field(default_factory=sections.Mixing)
    # Whether all groups begin with the same weights, as those that mix must.
    seed_groups_alike: bool = False
    # How long a group waits, after its first step, for the first step of the
    # others: for experiments that are short against a start.
    start_together_secs: float = fields.option(0.0, least=0)

    def __post_init__(self) -> None:
        """Validates the fields, each and together."""
        super().__post_init__()
        self._check_divides("evaluate_every_steps", "num_steps")
        self._check_divides("steps_per_execution", "evaluate_every_steps")
        if sections.MODELS[self.model.name] != self.data.name:
            raise ValueError(
                f"The model {self.model.name!r} is for the data "
                f"{sections.MODELS[self.model.name]!r}; received "
                f"{self.data.name!r}. Override model.name and data.name "
                "together."
            )
        for learns in (False, True):
            self._check_steps(self.optimizer_of(learns=learns))
        if self.codistillation.saved_models and not self.codistillation.enabled:
            raise ValueError(
                "`codistillation.saved_models` are teachers; received "
                "codistillation.enabled=false. Enable it, or leave them out."
            )
        by, mode = self.codistillation.by, self.data.mode
        if by == "predictions" and mode != "coordinated":
            raise ValueError(
                "Groups that send each other predictions must read the same "
                f"batches; received data.mode={mode}. Override "
                "data.mode=coordinated."
            )
        if self.codistillation.num_students > 1:
            self._check_cohort()
        if self.mixing.enabled:
            self._check_mixing()
        first, *others = self.model.group_arguments or ({},)
        differ = any(arguments != first for arguments in others)
        learn = self.codistillation.enabled
        if differ and learn and not self.exchange.allow_other_graphs:
            raise ValueError(
                "Groups with different `model.group_arguments` run each "
                "other's graphs; received exchange.allow_other_graphs=false. "
                "Override exchange.allow_other_graphs=true if you trust them."
            )

    def _check_mixing(self) -> None:
        """Refuses what groups that mix their weights cannot have."""
        if not self.seed_groups_alike:
            raise ValueError(
                "Groups that mix their weights must begin with equal ones; "
                f"received mixing.rule={self.mixing.rule} and "
                "seed_groups_alike=false. Override seed_groups_alike=true."
            )
        learn = self.codistillation
        taught = learn.enabled and learn.canary_examples
        if self.mixing.barrier_margin is not None and not taught:
            raise ValueError(
                "`mixing.barrier_margin` is of groups that teach each other "
                "later, and compares their losses on the canary batch; "
                f"received codistillation.enabled={learn.enabled} and "
                f"canary_examples={learn.canary_examples}. Override them, or "
                "leave it out."
            )
        offset, holds = self.exchange.offset_steps, self.exchange.weights
        if offset or holds != "model":
            raise ValueError(
                "Groups that mix their weights publish the weights themselves, "
                "of the same steps; received exchange.offset_steps="
                f"{offset} and exchange.weights={holds}. Leave both at their "
                "defaults."
            )
        mixes, exports = self.mixing.every_steps, self.exchange.every_steps
        if mixes % exports:
            raise ValueError(
                "`mixing.every_steps` must be a multiple of "
                f"`exchange.every_steps`; received {mixes} and {exports}. "
                "Override both."
            )

    def _check_cohort(self) -> None:
        """Refuses what several students in one process cannot have."""
        learn = self.codistillation
        given = {
            "codistillation.enabled": not learn.enabled,
            "codistillation.saved_models": learn.saved_models,
            "codistillation.include_past": learn.include_past is not False,
            "codistillation.labels_from": learn.labels_from,
            "mixing.rule": self.mixing.enabled,
            "checkpoints": self.checkpoints != "none",
        }
        idle = [name for name, is_given in given.items() if is_given]
        if idle:
            raise ValueError(
                "Students in one process learn from each other, and each is "
                f"saved at the end; received {', '.join(idle)} with "
                f"codistillation.num_students={learn.num_students}. Leave "
                f"{idle[0]} at its default."
            )

    def optimizer_of(self, *, learns: bool) -> sections.Optimizer:
        """Returns the optimizer's section of a group.

        A group that learns from others has the schedules for that.
        """
        own = {
            name: getattr(self.codistillation, name)
            for name in ("weight_decay", "boundaries", "weight_decay_factors")
            if getattr(self.codistillation, name) is not None
        }
        if not learns or not own:
            return self.optimizer
        try:
            return dataclasses.replace(self.optimizer, **own)
        except ValueError as cause:
            raise ValueError(
                f"With {', '.join(f'codistillation.{name}' for name in own)} "
                f"in place of the optimizer's: {cause}"
            ) from cause

    def _check_steps(self, optimizer: sections.Optimizer) -> None:
        last = max((optimizer.warmup_steps, *optimizer.boundaries))
        if last >= self.num_steps:
            raise ValueError(
                "`optimizer.warmup_steps` and boundaries must be < "
                f"`num_steps`; received {last} of {self.num_steps}."
            )

    def _check_divides(self, part: str, whole: str) -> None:
        if getattr(self, whole) % getattr(self, part):
            raise ValueError(
                f"`{part}` must divide `{whole}`; received "
                f"{getattr(self, part)} and {getattr(self, whole)}. Override "
                "both."
            )

    def check_num_groups(self, num_groups: int) -> None:
        """Checks that each list by group has an entry for each group."""
        topology = self.exchange.topology
        num_students = self.codistillation.num_students
        if num_students > 1:
            if num_groups > 1:
                raise ValueError(
                    "`codistillation.num_students` > 1 trains all students in "
                    f"one process; received {num_students} with {num_groups} "
                    "groups. Run one group, or override "
                    "codistillation.num_students=1."
                )
            num_groups = num_students
        for name, entries in (
            ("exchange.topology", topology),
            ("mixing.topology", self.mixing.topology),
            ("model.group_arguments", self.model.group_arguments or None),
            ("codistillation.addresses", self.codistillation.addresses or None),
        ):
            if entries is None or isinstance(entries, str):
                continue
            if len(entries) != num_groups:
                raise ValueError(
                    f"`{name}` must have one entry for each of {num_groups} "
                    f"groups; received {len(entries)}."
                )

    def to_json(self) -> str:
        """Returns JSON text from which `from_json` makes an equal one."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> "Config":
        """Returns the configuration that `to_json` has written."""
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as cause:
            raise ValueError(f"A configuration must be JSON: {cause}") from None
        return cls.from_tree(tree)

    @classmethod
    def read(cls, path: str | pathlib.Path) -> "Config":
        """Returns the configuration in a file, such as a run's config.json."""
        try:
            text = pathlib.Path(path).read_bytes()
        except OSError as cause:
            raise ValueError(
                f"The configuration {path} cannot be read: {cause.strerror}."
            ) from cause
        try:
            return cls.from_json(text)
        except ValueError as cause:
            raise ValueError(f"{path}: {cause}") from cause
