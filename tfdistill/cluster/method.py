"""What a comparison decides in a script's place, by the environment.

`tfdistill compare my_train.py` sets these variables for each run. Each of them
is obeyed in one place: the seed by `make_strategy`, the share by `group_shard`,
the teachers and the weight decay by `CodistillModel`, the interval by
`StudentExporter` and `TeacherLoader`, the mixing of weights by
`callbacks.defaults`. What was obeyed is noted, and
`callbacks.HeldOutPredictions` writes it down. What a script lacks is found
before its first step.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

METHOD = "TFDISTILL_METHOD"
SEED = "TFDISTILL_SEED"
EVERY_STEPS = "TFDISTILL_EVERY_STEPS"
HELD_OUT = "TFDISTILL_HELD_OUT"
WEIGHT_DECAY = "TFDISTILL_WEIGHT_DECAY"
# What is held out of a script that names nothing: its validation data.
VALIDATION = "validation"
NOBODY, PEERS, OWN_PAST = "nobody", "peers", "own_past"
PREDICTIONS = "predictions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """Whom groups learn from, on which data; whether weights mix or decay."""

    teachers: str = NOBODY
    share: str = "disjoint"
    mixes: bool = False
    decays: bool = False


METHODS: Mapping[str, Method] = {
    "independent": Method(),
    "codistill": Method(teachers=PEERS),
    "codistill_shared": Method(teachers=PEERS, share="shared"),
    "own_past": Method(teachers=OWN_PAST),
    "predictions": Method(teachers=PREDICTIONS, share="coordinated"),
    "averaging": Method(mixes=True),
    "weight_decay": Method(decays=True),
}
# Whom the groups of an ordinary script learn from, and what they agree on.
TEACHERS = ("peers", "own-past", "predictions", "none")
DISTILLATION_LOSSES = ("classes", "binary", "values")
# Steps between the mixes of weights where nobody says how many.
MIX_EVERY_STEPS = 50
# How long groups of a comparison, or of an ordinary script, wait for others.
TOGETHER_SECS = 300.0
# What this process has obeyed so far, by name.
obeyed: dict[str, Any] = {}
# The names of the `callbacks.HeldOutPredictions` that this process has made.
predicted: set[str] = set()


def chosen() -> Method | None:
    """Returns the method that the environment names; None if it names none."""
    name = os.environ.get(METHOD)
    if not name:
        return None
    if name not in METHODS:
        raise ValueError(
            f"{METHOD} must be one of {', '.join(METHODS)}; received {name!r}. "
            "Correct it, or unset it to train with the script's own settings."
        )
    obeyed["method"] = name
    return METHODS[name]


def share(mode: str, *, num_groups: int) -> str:
    """Returns which examples a group trains on; `mode` is the script's own."""
    method = chosen()
    if method is None or num_groups == 1:
        return mode
    obeyed["share"] = method.share
    return method.share


def every_steps(own: Any) -> Any:
    """Returns the steps between exports; `own` is what the script says."""
    return _number(EVERY_STEPS, least=1) or own


def seed(group: int) -> int | None:
    """Returns the seed of a group, which no other group or seed has.

    Groups that mix their weights begin with the same. None if there is none.
    """
    given = _number(SEED, least=0)
    if given is None:
        return None
    obeyed["seed"] = given
    method = chosen()
    import numpy as np  # Only here: launchers answer --help without it.

    drawn = np.random.SeedSequence(
        [given, 0 if method and method.mixes else group]
    )
    return int(drawn.generate_state(1)[0])


def weight_decay() -> float | None:
    """Returns the weight decay of the optimizer; None for the script's own."""
    method = chosen()
    if method is None or not method.decays:
        return None
    text = os.environ.get(WEIGHT_DECAY) or "0.1"
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise ValueError(
            f"{WEIGHT_DECAY} must be a number > 0; received {text!r}. Correct "
            "it, or unset it for 0.1."
        )
    obeyed["weight_decay"] = found
    return found


def check_predicted() -> None:
    """Refuses a `fit` after which the comparison would have no predictions."""
    name = os.environ.get(HELD_OUT)
    if name and name not in predicted:
        others = ", ".join(map(repr, sorted(predicted)))
        raise ValueError(
            f"`fit` must have a HeldOutPredictions({name!r}, ...), which the "
            "comparison reads; this script has "
            f"{f'made only {others}' if others else 'none'}. Add "
            f"tfdistill.callbacks.HeldOutPredictions({name!r}, (x, y)) to the "
            "callbacks, before the first `fit`."
        )


def disobeyed(
    name: str,
    found: Mapping[str, Any],
    *,
    teachers: Sequence[str],
    every_steps: int | None,
    mixes: bool,
    num_groups: int,
    asked: tuple[Any, Any],
) -> str:
    """Returns what a training does not show of a method, and a remedy.

    Empty if it shows all. `found` is what it obeyed, `every_steps` None without
    an exporter, and `asked` are the seed and the interval, if there is one.
    """
    method, (seed, every) = METHODS[name], asked
    peers = [each for each in teachers if each != OWN_PAST]
    taught = {
        NOBODY: not teachers,
        OWN_PAST: list(teachers) == [OWN_PAST],
        PEERS: bool(peers) and len(peers) == len(teachers),
    }
    taught[PREDICTIONS] = taught[PEERS]
    if found.get("seed") != seed:
        return "make_strategy() was not called, which sets the seed."
    if not taught[method.teachers]:
        return (
            f"the teachers were {', '.join(teachers) or 'none'}. Make the "
            "tfdistill.CodistillModel after make_strategy()."
        )
    if num_groups > 1 and found.get("share") != method.share:
        return (
            "the script chooses the groups' data itself. Pass the data through "
            "tfdistill.data.group_shard."
        )
    if every_steps is None or (every or every_steps) != every_steps:
        return (
            "no StudentExporter was in `fit`. Add "
            "tfdistill.callbacks.defaults(every_steps=...)."
        )
    if method.decays and "weight_decay" not in found:
        return (
            "the optimizer was not made to decay weights. Train by a "
            "tfdistill.CodistillModel."
        )
    if mixes != method.mixes:
        return (
            "a WeightMixer is missing, or the script adds its own. Leave it to "
            "tfdistill.callbacks.defaults(every_steps=...)."
        )
    return ""


def asked() -> tuple[int | None, int | None]:
    """Returns the seed and the interval that the environment names."""
    return _number(SEED, least=0), _number(EVERY_STEPS, least=1)


def _number(name: str, *, least: int) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal() or int(text) < least:
        raise ValueError(
            f"{name} must be a whole number >= {least}; received {text!r}. "
            "Correct it, or unset it."
        )
    return int(text)
