"""What a TeacherSet was asked for."""

import dataclasses
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.exchange import publisher
from tfdistill.labels import forms
from tfdistill.system import run_files

# How peers teach: their models run here, or they send what they predict.
VERSIONS, PREDICTIONS = "versions", "predictions"
# Of `max_staleness_steps`: a peer that falls silent fades; see staleness.py.
AUTO = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """What a `TeacherSet` was made with: its arguments, by their names.

    `weights` holds one number for each teacher, and `schema` the hashes that
    `gates.digests` makes.
    """

    peers: tuple[int, ...] = ()
    saved_models: tuple[str, ...] = ()
    models: tuple[Any, ...] = ()
    include_past: bool | float = False
    labels: tuple[str, ...] = ()
    cohort: int | None = None
    weights: Sequence[float] | None = None
    max_staleness_steps: int | str | None = AUTO
    max_staleness_secs: float | None = None
    max_staleness_examples: float | None = None
    staleness_ramp_steps: int = 0
    staleness_ramp_secs: float = 0.0
    staleness_ramp_examples: float = 0.0
    max_bad_batches: int = 3
    allow_other_graphs: bool = False
    trust_saved_models: bool = False
    schema: Mapping[str, str] = dataclasses.field(default_factory=dict)
    allow_other_schemas: bool = False
    canary: Any = None
    poll_secs: float = 0.1
    by: str = VERSIONS
    form: forms.Form | None = None
    wait_secs: float = 0.05

    def __post_init__(self) -> None:
        """Checks everything but what depends on the strategy."""
        _check_peers(self.peers)
        # Frozen: set as dataclasses do it themselves.
        object.__setattr__(
            self, "weights", _checked_weights(self.weights, self.num_teachers)
        )
        if (
            isinstance(self.max_staleness_steps, str)
            and self.max_staleness_steps != AUTO
        ):
            raise ValueError(
                "`max_staleness_steps` must be a number of steps, None or "
                f'"{AUTO}"; received {self.max_staleness_steps!r}.'
            )
        _check_bound("steps", self.most_steps, self.staleness_ramp_steps)
        _check_bound("secs", self.max_staleness_secs, self.staleness_ramp_secs)
        _check_bound(
            "examples",
            self.max_staleness_examples,
            self.staleness_ramp_examples,
        )
        if self.max_bad_batches < 1:
            raise ValueError(
                "`max_bad_batches` must be >= 1; received "
                f"{self.max_bad_batches}."
            )
        if self.allow_other_schemas and not self.schema:
            raise ValueError(
                "`allow_other_schemas` must come with a `schema` to compare; "
                f"received schema={self.schema!r}. Leave it out."
            )
        if not self.poll_secs > 0:
            raise ValueError(
                f"`poll_secs` must be > 0; received {self.poll_secs}."
            )
        self._check_by()

    def _check_by(self) -> None:
        if self.by not in (VERSIONS, PREDICTIONS):
            raise ValueError(
                f'`by` must be "{VERSIONS}" or "{PREDICTIONS}"; received '
                f"{self.by!r}."
            )
        if not 0 <= self.wait_secs < math.inf:
            raise ValueError(
                "`wait_secs` must be finite and >= 0; received "
                f"{self.wait_secs}."
            )
        if self.by == VERSIONS:
            if self.form is not None:
                raise ValueError(
                    "`form` is how predictions are sent; received "
                    f'{self.form} with by="{VERSIONS}". Leave it out, or pass '
                    f'by="{PREDICTIONS}".'
                )
            return
        if self.form is not None and not isinstance(self.form, forms.Form):
            raise ValueError(
                "`form` must be a tfdistill.labels.Form; received "
                f"{self.form!r}."
            )
        given = [
            name
            for name, value in {
                "max_staleness_steps": self.most_steps,
                "max_staleness_secs": self.max_staleness_secs,
                "max_staleness_examples": self.max_staleness_examples,
                "allow_other_graphs": self.allow_other_graphs or None,
                "schema": self.schema or None,
                "canary": None if any(self.is_run) else self.canary,
            }.items()
            if value is not None
        ]
        if given:
            raise ValueError(
                f"{', '.join(given)} are about versions; received them with "
                f'by="{PREDICTIONS}", whose predictions are always of the same '
                "step. Leave them out."
            )

    @property
    def num_teachers(self) -> int:
        """Number of teachers of all kinds; of a cohort, all but oneself."""
        return len(self.is_run)

    @property
    def is_run(self) -> list[bool]:
        """By teacher, whether its model runs in the student's own step."""
        held = [*self.saved_models, *self.models]
        if self.includes_past:
            held.append(self.include_past)
        return [
            *[self.by == VERSIONS] * len(self.peers),
            *[True] * len(held),
            *[False] * len(self.labels),
            *[False] * ((self.cohort or 1) - 1),
        ]

    @property
    def includes_past(self) -> bool:
        """Whether the student's own past is a teacher."""
        return self.include_past is not False

    @property
    def names_of_peers(self) -> dict[int, str]:
        """The name of each peer, by group."""
        return {group: run_files.group_name(group) for group in self.peers}

    @property
    def most_steps(self) -> int | None:
        """How many steps old a version may be, if a number was given."""
        most = self.max_staleness_steps
        return None if isinstance(most, str) else most

    @property
    def bounds(self) -> str:
        """How old a version may be, for messages."""
        found = {
            "max_staleness_steps": self.most_steps,
            "staleness_ramp_steps": self.staleness_ramp_steps or None,
            "max_staleness_secs": self.max_staleness_secs,
            "staleness_ramp_secs": self.staleness_ramp_secs or None,
            "max_staleness_examples": self.max_staleness_examples,
            "staleness_ramp_examples": self.staleness_ramp_examples or None,
        }
        return ", ".join(
            f"{name}={value}"
            for name, value in found.items()
            if value is not None
        )

    def check_remote(self) -> None:
        """Refuses what a parameter-server group cannot have."""
        if self.by == PREDICTIONS:
            raise ValueError(
                "Peers teach by their predictions of the same batch, which "
                "workers of parameter servers do not have: each is at a step "
                f'of its own. Received by="{PREDICTIONS}". Take labels from '
                "servers of teachers instead, which a data set asks: "
                "TeacherSet(labels=[...]). Or leave `by` out, for versions."
            )
        if self.includes_past:
            raise ValueError(
                "`include_past` must not be used with parameter servers, where "
                "no worker has all of the student's values; received "
                f"include_past={self.include_past}. Leave it out, or train "
                "without parameter servers."
            )
        if self.saved_models or self.allow_other_graphs:
            raise ValueError(
                "Teachers of a parameter-server group must be peers with the "
                "student's own graph, or Keras models in memory; received "
                f"saved_models={self.saved_models} and allow_other_graphs="
                f"{self.allow_other_graphs}. Pass a Keras model or a .keras "
                "file as TeacherSet(models=[...]), or train without parameter "
                "servers."
            )


def check_exchange(peers: Sequence[int], exchange: Any) -> None:
    """Checks that there is an exchange if there are peers."""
    if peers and exchange is None:
        raise ValueError(
            f"`peers` {tuple(peers)} need an `exchange`; received None."
        )
    if exchange is not None:
        publisher.check_exchange(exchange)


def checked_paths(saved_models: Any) -> tuple[str, ...]:
    """Returns the directories of fixed teachers; one path is no list."""
    if isinstance(saved_models, str | bytes | os.PathLike):
        raise ValueError(
            "`saved_models` must be a list of directories; received "
            f"{saved_models!r}. Put it into brackets."
        )
    return tuple(os.fspath(path) for path in saved_models)


def checked_names(labels: Any, peers: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of teachers that come as labels; each once.

    `labels` holds names, or what has one as `labels.Teachers` does.
    """
    given = (labels,) if isinstance(labels, str) else tuple(labels)
    found = tuple(getattr(label, "name", label) for label in given)
    taken = [run_files.group_name(group) for group in peers]
    is_new = len(set(found)) == len(found) and not {*found} & {*taken}
    if not all(isinstance(name, str) and name for name in found) or not is_new:
        raise ValueError(
            "`labels` must hold names of teachers, each once, and no peer of "
            f"`peers` again; received {labels!r} beside {taken}."
        )
    return found


def _check_bound(unit: str, most: float | None, ramp: float) -> None:
    if most is not None and not 0 <= most < math.inf:
        raise ValueError(
            f"`max_staleness_{unit}` must be >= 0 or None; received {most}."
        )
    if not 0 <= ramp < math.inf:
        raise ValueError(
            f"`staleness_ramp_{unit}` must be finite and >= 0; received {ramp}."
        )
    if ramp and most is None:
        raise ValueError(
            f"`staleness_ramp_{unit}` must come with a "
            f"`max_staleness_{unit}` at which the ramp begins; received "
            f"{ramp} without one."
        )


def _check_peers(peers: Sequence[int]) -> None:
    is_index = all(isinstance(g, int) and g >= 0 for g in peers)
    if not is_index or len(set(peers)) != len(peers):
        raise ValueError(
            "`peers` must hold group indices >= 0, each once; received "
            f"{tuple(peers)}."
        )


def _checked_weights(
    weights: Sequence[float] | None, count: int
) -> list[float]:
    if weights is None:
        return [1.0] * count
    found = [float(weight) for weight in weights]
    if (
        len(found) != count
        or not all(0 <= weight < math.inf for weight in found)
        or (found and not sum(found) > 0)
    ):
        raise ValueError(
            f"`weights` must hold one finite number >= 0 for each of {count} "
            f"teachers, not all of them 0; received {list(weights)}."
        )
    return found
