"""What a comparison decides in a script's place: `Cluster.method`.

`tfdistill compare my_train.py` sets five variables for each run. A cluster
reads them once, and each of them takes effect in one place: the seed in
`make_strategy`, the share of the data in `data.group_shard`, the teachers and
the weight decay in `CodistillModel`, the interval in `StudentExporter` and
`TeacherLoader`, the mixing of weights in `callbacks.defaults`.
`HeldOutPredictions` refuses a script that goes round one of these.
"""

import dataclasses
import math
from collections.abc import Mapping

_METHOD, _SEED = "TFDISTILL_METHOD", "TFDISTILL_SEED"
_EVERY_STEPS, _HELD_OUT = "TFDISTILL_EVERY_STEPS", "TFDISTILL_HELD_OUT"
_WEIGHT_DECAY = "TFDISTILL_WEIGHT_DECAY"
# What is held out of a script that names nothing: its validation data.
VALIDATION = "validation"
NOBODY, PEERS, OWN_PAST = "nobody", "peers", "own_past"
PREDICTIONS = "predictions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """How the groups of one run of a comparison train.

    Attributes:
        name: What the comparison calls it.
        teachers: Whom groups learn from.
        share: Which examples a group trains on: a mode of `group_shard`.
        mixes: Whether groups average their weights.
        weight_decay: The optimizer's; None (default) for the script's own.
        seed: The trial's, >= 0; None (default) for the script's own.
        every_steps: Steps between exports; None (default) for the script's own.
        held_out: Name of the predictions that are compared; None (default) for
            none.
    """

    name: str
    teachers: str = NOBODY
    share: str = "disjoint"
    mixes: bool = False
    weight_decay: float | None = None
    seed: int | None = None
    every_steps: int | None = None
    held_out: str | None = None

    def group_seed(self, group: int) -> int | None:
        """Returns the seed of a group, which no other group or trial has.

        Groups that mix their weights begin with the same. None if there is
        none.
        """
        if self.seed is None:
            return None
        import numpy as np  # Only here: launchers answer --help without it.

        drawn = np.random.SeedSequence([self.seed, 0 if self.mixes else group])
        return int(drawn.generate_state(1)[0])

    def to_env(self) -> dict[str, str]:
        """Returns the variables that `from_env` turns into this method."""
        given = {
            _METHOD: self.name,
            _SEED: self.seed,
            _EVERY_STEPS: self.every_steps,
            _HELD_OUT: self.held_out,
            _WEIGHT_DECAY: self.weight_decay,
        }
        return {n: "" if v is None else str(v) for n, v in given.items()}


METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method(name="independent"),
        Method(name="codistill", teachers=PEERS),
        Method(name="codistill_shared", teachers=PEERS, share="shared"),
        Method(name="own_past", teachers=OWN_PAST),
        Method(name="predictions", teachers=PREDICTIONS, share="coordinated"),
        Method(name="averaging", mixes=True),
        Method(name="weight_decay", weight_decay=0.1),
    )
}
# Whom the groups of an ordinary script learn from, and what they agree on.
TEACHERS = ("peers", "own-past", "predictions", "none")
DISTILLATION_LOSSES = ("classes", "binary", "values")
# Steps between the mixes of weights where nobody says how many.
MIX_EVERY_STEPS = 50
# How long groups of a comparison, or of an ordinary script, wait for others.
TOGETHER_SECS = 300.0
# What only the script's own calls show: the modes of its `group_shard`, and the
# names of the `callbacks.HeldOutPredictions` that it has made.
shares: set[str] = set()
predicted: set[str] = set()


def share(chosen: Method | None, mode: str, *, num_groups: int) -> str:
    """Returns which examples a group trains on, and notes it.

    `mode` is the script's own, which a comparison of several groups replaces.
    """
    if chosen is None or num_groups == 1:
        return mode
    shares.add(chosen.share)
    return chosen.share


def check_predicted(chosen: Method | None) -> None:
    """Refuses a `fit` after which a comparison would have no predictions."""
    name = chosen and chosen.held_out
    if name and name not in predicted:
        others = ", ".join(map(repr, sorted(predicted)))
        raise ValueError(
            f"`fit` must have a HeldOutPredictions({name!r}, ...), which the "
            "comparison reads; this script has "
            f"{f'made only {others}' if others else 'none'}. Add "
            f"tfdistill.callbacks.HeldOutPredictions({name!r}, (x, y)) to the "
            "callbacks, before the first `fit`."
        )


def from_env(environ: Mapping[str, str]) -> Method | None:
    """Returns the method that the variables describe; None without a name.

    Raises:
        ValueError: Naming the variable that is wrong and the remedy.
    """
    name = environ.get(_METHOD)
    if not name:
        return None
    if name not in METHODS:
        raise ValueError(
            f"{_METHOD} must be one of {', '.join(METHODS)}; received {name!r}."
            " Correct it, or unset it to train with the script's own settings."
        )
    found = METHODS[name]
    decay = found.weight_decay
    if decay is not None:
        decay = _decay(environ.get(_WEIGHT_DECAY) or str(decay))
    return dataclasses.replace(
        found,
        weight_decay=decay,
        seed=number(environ, _SEED, least=0),
        every_steps=number(environ, _EVERY_STEPS, least=1),
        held_out=environ.get(_HELD_OUT) or None,
    )


def _decay(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(
            f"{_WEIGHT_DECAY} must be a number > 0; received {text!r}. Correct "
            "it, or unset it for 0.1."
        )
    return found


def number(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    """Returns the whole number that a variable has; None if it isn't set."""
    text = environ.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name} must be a whole number >= {least}; received {text!r}. "
            "Correct it, or unset it."
        )
    return int(text)
