"""Runs and trials: what is to be trained, each named by its content.

Two trials that need the same training share one run: an ensemble's first
member is the independent group of the same seed.

Imports neither TensorFlow nor Keras.
"""

import dataclasses
import hashlib
import json
from typing import Any

from launch import config as config_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training of some groups.

    Attributes:
        part: The part it plays in its trial; not what it is.
        config: What each group runs.
        num_groups: Number of groups.
        workers_per_group: Workers in each.
        ps_per_group: Parameter servers in each.
        teachers: Runs of one group whose last exports are fixed teachers.
    """

    part: str
    config: config_lib.Config
    num_groups: int
    workers_per_group: int
    ps_per_group: int = 0
    teachers: tuple["Run", ...] = ()

    @property
    def key(self) -> str:
        """Equal for runs that train the same; the name of its directory."""
        content = {
            "config": _essentials(self.config),
            "shape": [
                self.num_groups,
                self.workers_per_group,
                self.ps_per_group,
            ],
            "teachers": [teacher.key for teacher in self.teachers],
        }
        text = json.dumps(content, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"seed_{self.config.seed}_{digest}"

    @property
    def num_steps(self) -> int:
        """Training steps of all groups together."""
        return self.num_groups * self.config.num_steps

    @property
    def num_examples(self) -> int:
        """Training examples of all groups together, repeats counted."""
        return self.num_steps * self.config.data.global_batch_size


def _essentials(section: Any) -> dict[str, Any]:
    """A configuration without what is at its default.

    So that runs keep their names when a later release has more fields.
    """
    found = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        default = (
            field.default_factory()
            if field.default_factory is not dataclasses.MISSING
            else field.default
        )
        if value == default:
            continue
        nested = dataclasses.is_dataclass(value)
        found[field.name] = _essentials(value) if nested else value
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What one method takes for one seed.

    Attributes:
        runs: All of its runs, in the order in which they must be run.
        students: Those whose groups predict.
        averaged: Whether the students are one ensemble.
    """

    runs: tuple[Run, ...]
    students: tuple[Run, ...]
    averaged: bool = False

    @property
    def num_steps(self) -> int:
        """Training steps of all groups of all runs."""
        return sum(run.num_steps for run in self.runs)

    @property
    def num_examples(self) -> int:
        """Training examples of all groups of all runs, repeats counted."""
        return sum(run.num_examples for run in self.runs)
