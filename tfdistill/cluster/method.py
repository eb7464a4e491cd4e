"""What a comparison decides in a script's place, by the environment.

`tfdistill compare my_train.py` sets these variables for each run. Each of them
is obeyed in one place: the seed by `make_strategy`, the share by `group_shard`,
the teachers by `CodistillModel`, the interval by `StudentExporter` and
`TeacherLoader`, the mixing of weights by `callbacks.defaults`. What was obeyed
is noted, and `callbacks.HeldOutPredictions` writes it down.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

METHOD = "TFDISTILL_METHOD"
SEED = "TFDISTILL_SEED"
EVERY_STEPS = "TFDISTILL_EVERY_STEPS"
NOBODY, PEERS, OWN_PAST = "nobody", "peers", "own_past"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """Whom groups learn from, on which data, and whether weights are mixed."""

    teachers: str = NOBODY
    share: str = "disjoint"
    mixes: bool = False


METHODS: Mapping[str, Method] = {
    "independent": Method(),
    "codistill": Method(teachers=PEERS),
    "codistill_shared": Method(teachers=PEERS, share="shared"),
    "own_past": Method(teachers=OWN_PAST),
    "averaging": Method(mixes=True),
}
# What this process has obeyed so far, by name.
obeyed: dict[str, Any] = {}


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
