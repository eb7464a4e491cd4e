"""What codistillation does by its defaults, on data that it wasn't tuned for.

Two groups train each data set by turns (`two_groups`) with several seeds, by
each candidate of settings; for some, four groups, or one with its own past. The
record has, beside independent training with the same seeds: the churn between
retrains, which are the same group of different seeds, as the mean absolute
difference of predictions and as the share of flipped decisions, with 95%
intervals over seeds; the held-out loss, and its difference by seed; and the
share of the steps after the burn-in with a teacher.
The ensemble is the mean of two independent students. docs/results/promise.md
has the hypothesis, and what came of it.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

import tfdistill
from benchmarks import measure
from benchmarks import promise_data
from benchmarks import two_groups
from tfdistill.statistics import estimates
from tfdistill.system import programs


def _settings(
    weight: float = 1.0,
    burn_in: float | None = 0.1,
    every: int = 50,
    agree_on: str = "batch",
    averaged: bool = False,
) -> Callable[[Any], dict[str, Any]]:
    """Fields of a workload; the burn-in is a share of its steps.

    With `averaged`, running means of the weights, over about the last 20 steps,
    are what versions hold and what is evaluated at the end.
    """

    def optimizer(workload: Any) -> Any:
        made = workload.optimizer()
        changes = {"use_ema": averaged, "ema_momentum": 0.95}
        return type(made).from_config(made.get_config() | changes)

    return lambda workload: {
        "optimizer": lambda: optimizer(workload),
        "distillation_weight": tfdistill.schedules.BurnIn(
            steps=int(burn_in * workload.num_steps), weight=weight
        )
        if burn_in is not None
        else "auto",
        "every_steps": every,
        "refresh_every_steps": min(every, 10),
        "agree_on": agree_on,
        "exporter": {**workload.exporter, "offset_steps": None},
    }


# The first is what the docs' templates say.
_CANDIDATES: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "templates": _settings(),
    "no_burn_in": _settings(burn_in=0.0),
    "burn_in_30": _settings(burn_in=0.3),
    "auto": _settings(burn_in=None, every=25),
    "every_25": _settings(every=25),
    "both": _settings(every=25, agree_on="both"),
    "weight_2": _settings(weight=2.0, every=25),
    "weight_4": _settings(weight=4.0, every=25),
    "every_5": _settings(burn_in=0.3, every=5),
    "weight_2_every_5": _settings(weight=2.0, burn_in=0.3, every=5),
    "weight_4_every_5": _settings(weight=4.0, burn_in=0.3, every=5),
    "weight_4_both": _settings(weight=4.0, every=25, agree_on="both"),
    "four_groups": _settings(burn_in=None, every=25),
    "own_past": _settings(burn_in=None, every=25),
    "averaged": _settings(burn_in=None, every=25, averaged=True),
    "averaged_alone": _settings(burn_in=None, every=25, averaged=True),
}

# What isn't two groups that teach each other.
_METHODS: Mapping[str, dict[str, Any]] = {
    "independent": {"teachers": lambda _: None},
    "averaged_alone": {"teachers": lambda _: None},
    "four_groups": {"num_groups": 4},
    "own_past": {"teachers": lambda _: tfdistill.teachers.OwnPast()},
}


def _probabilities(predictions: np.ndarray, workload: Any) -> np.ndarray:
    """Returns probabilities of logits; what a regression says stays."""
    kind = type(workload.loss).__name__
    logits = predictions.astype(np.float64)
    if kind.startswith("Binary"):
        return 1 / (1 + np.exp(-logits))
    if kind.startswith("Sparse"):
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(-1, keepdims=True))
    return logits


def _decisions(found: np.ndarray) -> np.ndarray:
    """Classes, or whether a number is above the middle of its range."""
    if found.shape[-1] > 1:
        return found.argmax(-1)
    middle = 0.5 if found.min() >= 0 else 0.0
    return found[..., 0] > middle


def _matrices(students: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns by kind of churn that of each pair, `[seeds, seeds]`."""
    decided = [_decisions(each) for each in students]
    return {
        "difference": np.array(
            [[np.abs(a - b).mean() for a in students] for b in students]
        ),
        "flips": np.array(
            [[np.mean(a != b) for a in decided] for b in decided]
        ),
    }


def _of_groups(pairs: Sequence[Sequence[np.ndarray]]) -> dict[str, np.ndarray]:
    """The mean over groups of the churn between a group's retrains."""
    found = [_matrices(students) for students in zip(*pairs, strict=True)]
    return {
        kind: np.mean([each[kind] for each in found], 0) for kind in found[0]
    }


def _share(churn: np.ndarray, of: np.ndarray) -> dict[str, Any]:
    """By how much churn differs, seeds drawn together for both."""
    seeds = np.arange(len(of))

    def ratio(rows: np.ndarray, axis: int) -> Any:
        mean = estimates.mean_of_pairs
        return mean(churn, rows) / mean(of, rows) - 1

    with np.errstate(divide="ignore", invalid="ignore"):
        return {
            "change": round(float(ratio(seeds, -1)), 4),
            "interval": estimates.interval(ratio, seeds)
            if len(seeds) > 2
            else None,
        }


def _study(name: str, options: programs.Options) -> dict[str, Any]:
    """Trains a data set by all candidates, beside independent training."""
    workload = promise_data.get(name)
    seeds = range(options.first_seed, options.first_seed + options.seeds)

    def trained(candidate: str, **changes: Any) -> list[Any]:
        return [
            two_groups.train(
                dataclasses.replace(workload, seed=seed, **changes),
                **_METHODS.get(candidate, {}),
            )
            for seed in seeds
        ]

    def predicted(runs: list[Any]) -> list[list[np.ndarray]]:
        return [
            [_probabilities(g.predictions, workload) for g in groups]
            for groups in runs
        ]

    def losses(runs: list[Any]) -> list[float]:
        return [float(np.mean([g.loss for g in groups])) for groups in runs]

    alone = trained("independent")
    alone_losses = losses(alone)
    of = _of_groups(predicted(alone))
    ensembles = [[np.mean(pair, 0)] for pair in predicted(alone)]
    found: dict[str, Any] = {
        "independent": {
            "loss": float(np.mean(alone_losses)),
            **{kind: estimates.over_pairs(m)["mean"] for kind, m in of.items()},
        },
        "ensemble": {
            kind: _share(churn, of[kind])
            for kind, churn in _of_groups(ensembles).items()
        },
    }
    measure.log(f"{name}: {found}")
    for candidate in options.candidates:
        runs = trained(candidate, **_CANDIDATES[candidate](workload))
        costs = np.subtract(losses(runs), alone_losses)
        found[candidate] = {
            **{
                kind: _share(churn, of[kind])
                for kind, churn in _of_groups(predicted(runs)).items()
            },
            "loss": estimates.over_trials(costs.tolist()) | {"values": None},
            "taught": min(g.taught for groups in runs for g in groups),
            "secs": float(np.mean([g.secs for gs in runs for g in gs])),
        }
        measure.log(f"{name}, {candidate}: {found[candidate]}")
    return found


def run(options: programs.Options, record: dict[str, Any]) -> None:
    """Trains all data sets, and fills the record."""
    found = {name: _study(name, options) for name in options.data}
    record.update(
        benchmark="promise",
        config=vars(options),
        data=found,
        median={
            candidate: float(
                np.median(
                    [
                        each[candidate]["difference"]["change"]
                        for each in found.values()
                    ]
                )
            )
            for candidate in options.candidates
        },
        machine=measure.machine(),
    )


def _add_options(options: programs.Program) -> None:
    options.add(
        "data", "data sets, or recipes", [*promise_data.DATA], quick=["digits"]
    )
    options.add(
        "candidates",
        "of settings",
        [*_CANDIDATES],
        enum_values=[*_CANDIDATES],
        quick=["templates"],
    )
    options.add("seeds", "retrains", 8, quick=2)
    options.add("first_seed", "of these", 1)


PROGRAM = measure.program("promise", __doc__, define=_add_options, run=run)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
