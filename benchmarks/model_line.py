"""Retrains a line day by day, beside fresh retrains and warm starts alone.

Each seed has three lines of the same model on the same days. `fresh`: a new
training on all days so far. `warm`: from the weights of the version before, on
the new day. `line`: the same, taught by that version under a churn budget. All
are judged on the next day, which none of them has seen: churn to the version
before, and log loss. What they hold out of the day itself has the churn by
which a budget is judged.

Prints one line of JSON. "churn_of_fresh" and "churn_of_warm" are the line's
churn as a share of theirs, "log_loss_less_fresh" and "log_loss_less_warm" the
differences, each of a seed's means over its days, as seeds may be worlds of
their own; with 95% intervals of the bootstrap over seeds.
"""

import contextlib
import json
import operator
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

from absl import app
from absl import flags

from tfdistill.comparison import bootstrap
from tfdistill.held_out import predictions
from tfdistill.launcher import parent
from tfdistill.line import gate
from tfdistill.line import retrain
from tfdistill.line import store
from tfdistill.recipes import outputs
from tfdistill.recipes import recipes

_RECIPE = flags.DEFINE_enum(
    "recipe", "criteo_daily", ["criteo_daily", "clicks_daily"], "what retrains"
)
_SEEDS = flags.DEFINE_integer("seeds", 6, "retrained lines of each kind")
_DAYS = flags.DEFINE_integer("days", 6, "days of the log")
_FIRST = flags.DEFINE_integer("first_days", 1, "days of the first training")
_WINDOW = flags.DEFINE_integer(
    "window", 0, "days of a fresh training; default all so far"
)
_REPLAY = flags.DEFINE_integer("replay", 0, "earlier days in a warm start")
_BUDGET = flags.DEFINE_float("budget", 0.0, "of churn; default none")
_BUDGET_SHARE = flags.DEFINE_float(
    "budget_share",
    0.0,
    "budget as a share of the held-out churn of fresh retrains of the seed, "
    "which must be trained first",
)
_WEIGHT = flags.DEFINE_float(
    "weight", None, "of the teacher, without a budget; default the recipe's"
)
_KINDS = flags.DEFINE_list("kinds", "fresh,warm,line", "which are trained")
_WORKDIR = flags.DEFINE_string("workdir", None, "default a temporary one")


def _main(argv: list[str]) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from models import RECIPES

    recipes.register(RECIPES, train="launch.train")
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        place = _WORKDIR.value or stack.enter_context(
            tempfile.TemporaryDirectory()
        )
        stack.enter_context(parent.keep())  # One for all trainings.
        found = [
            _seed(pathlib.Path(place), seed) for seed in range(_SEEDS.value)
        ]
    print(
        json.dumps(
            {
                **_compared(found),
                "seeds": _SEEDS.value,
                "recipe": _RECIPE.value,
                "seconds": round(time.monotonic() - begin),
            }
        ),
        flush=True,
    )


def _seed(place: pathlib.Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Trains the lines of a seed, in the order of the kinds."""
    found: dict[str, list[dict[str, Any]]] = {}
    budget = _BUDGET.value
    for kind in _KINDS.value:
        if kind == "line" and _BUDGET_SHARE.value:
            churn = [day["held_out_churn"] for day in found["fresh"]]
            budget = _BUDGET_SHARE.value * sum(churn) / len(churn)
        lines = _Lines(place / f"{kind}_{seed}", kind, seed, budget)
        found[kind] = [{**day, "budget": budget} for day in lines.month()]
    return found


def _compared(found: list[dict[str, list[dict[str, Any]]]]) -> dict[str, Any]:
    def means(kind: str, name: str) -> list[float]:
        return [
            sum(day[name] for day in days) / len(days)
            for days in ([d for d in seed[kind] if name in d] for seed in found)
        ]

    result: dict[str, Any] = {}
    for kind in _KINDS.value:
        result[kind] = {
            name: round(sum(values) / len(values), 5)
            for name in ("churn", "log_loss", "examples")
            for values in [means(kind, name)]
        }
    if "line" not in _KINDS.value:
        return result
    for other in set(_KINDS.value) - {"line"}:
        result[f"churn_of_{other}"] = _paired(
            operator.truediv, means("line", "churn"), means(other, "churn")
        )
        result[f"log_loss_less_{other}"] = _paired(
            operator.sub, means("line", "log_loss"), means(other, "log_loss")
        )
    days = [day for seed in found for day in seed["line"]]
    result["verdicts"] = [day["verdict"] for day in days]
    if all(day["budget"] for day in days):
        shares = [day["held_out_churn"] / day["budget"] for day in days]
        result["budget"] = {
            "shares": [round(share, 3) for share in shares],
            "kept": sum(share <= 1 for share in shares),
            "within_20_percent": sum(0.8 <= share <= 1 for share in shares),
            "retrains": len(shares),
        }
    return result


def _paired(
    compare: Callable[[float, float], float],
    ours: list[float],
    theirs: list[float],
) -> dict[str, Any]:
    return bootstrap.over_trials(list(map(compare, ours, theirs)))


class _Lines:
    """One kind of a line, of one seed."""

    def __init__(
        self, place: pathlib.Path, kind: str, seed: int, budget: float
    ) -> None:
        self._place, self._kind = place, kind
        overrides: dict[str, Any] = {"seed": seed}
        if _RECIPE.value == "clicks_daily":
            overrides |= {"log_seed": seed, "num_days": _DAYS.value}
        if kind == "line":
            overrides["churn_budget"] = budget
        self._recipe = recipes.get(_RECIPE.value).changed(overrides)
        self._line = store.Line.init(
            place, workload=_RECIPE.value, overrides=overrides
        )
        digits = len(str(_DAYS.value - 1))
        self._names = [f"day_{d:0{digits}}" for d in range(_DAYS.value)]

    def month(self) -> list[dict[str, Any]]:
        """Returns what each retrain came to."""
        first = self._names[: _FIRST.value]
        number = retrain.run(self._line, span=",".join(first))
        self._promote(number)
        days = []
        for day in range(_FIRST.value, _DAYS.value):
            before = self._line.local_version(number)
            found = self._retrain(day)
            number = found.pop("number")
            found |= self._judged(day, before, self._line.local_version(number))
            print(self._place.name, day, json.dumps(found), flush=True)
            days.append(found)
        return days

    def _promote(self, number: int) -> None:
        source, extra = retrain.files_of(self._line, number)
        self._line.promote(number, source, extra=extra)

    def _retrain(self, day: int) -> dict[str, Any]:
        own = self._names[day]
        if self._kind == "fresh":
            start = max(0, day + 1 - _WINDOW.value) if _WINDOW.value else 0
            spans = ",".join(self._names[start : day + 1])
            number = retrain.run(
                self._line, span=spans, warm_start=False, teacher_weight=0.0
            )
        else:
            weight = 0.0 if self._kind == "warm" else _WEIGHT.value
            number = retrain.run(
                self._line,
                span=own,
                replay=_REPLAY.value,
                teacher_weight=weight,
            )
        report = gate.judge(self._line, number)
        self._promote(number)
        candidate = self._line.candidate_path(number)
        tested = predictions.read(f"{candidate}/{gate.TESTED}")
        group = outputs.group_dir(f"{candidate}/{gate.RUN}", 0)
        return {
            "number": number,
            "verdict": report["verdict"],
            "reasons": report["reasons"],
            "examples": self._line.lineage(number)["examples"],
            "held_out_churn": predictions.read(group).churn(tested)["churn"],
        }

    def _judged(self, day: int, before: str, after: str) -> dict[str, Any]:
        """Returns the figures on the next day, if there is one."""
        if day + 1 == _DAYS.value:
            return {}
        from tfdistill.line import span_data

        rows = span_data.read(
            self._recipe.changed({"spans": [self._names[day + 1]]})
        )
        old, new = (
            predictions.concatenate(
                [
                    span_data.predictor(version, rows.objective)(part)
                    for part in (rows.training, rows.held_out)
                    if part is not None
                ]
            )
            for version in (before, after)
        )
        return {
            "churn": new.churn(old)["churn"],
            "log_loss": new.figures()["log_loss"],
        }


if __name__ == "__main__":
    app.run(_main)
