"""The report's plots: curves with bands, churn, and sweeps."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdistill.comparison import collect
from tfdistill.statistics import plots

CURVES, CHURN = "curves.png", "churn.png"
# More methods than this do not fit into a legend over the curves.
_FEW = 8
_LINES = ("-", "--", ":", "-.")
_VARIANT = re.compile(r"(?P<method>.+)\[(?P<name>[^=]+)=(?P<value>.+)\]")


def draw(report: Mapping[str, Any], directory: pathlib.Path) -> list[str]:
    """Draws what the report has figures for."""
    methods, drawn = report["methods"], []
    curves = {
        name: [t["curve"] for t in method["trials"] if t["curve"]]
        for name, method in methods.items()
    }
    if any(curves.values()):
        metric = collect.curve_of(next(iter(methods.values()))["figures"])
        _curves(curves, metric, report["target"], directory / CURVES)
        drawn.append(CURVES)
    churn = {n: m["churn"]["churn"] for n, m in methods.items() if m["churn"]}
    if churn:
        _churn(churn, directory / CHURN)
        drawn.append(CHURN)
    # Method and swept field to the values, each with its estimate.
    sweeps: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    for variant, found in methods.items():
        if match := _VARIANT.fullmatch(variant):
            values = sweeps.setdefault((match["method"], match["name"]), [])
            metric = collect.metric_in(found["figures"])
            values.append((match["value"], found["figures"][metric]))
    alone = methods.get("independent")
    for (method, name), values in sweeps.items():
        file = f"sweep_{method}_{re.sub('[^a-zA-Z0-9]+', '_', name)}.png"
        _sweep(f"{method}: {name}", values, alone, directory / file)
        drawn.append(file)
    return drawn


def _errors(estimates: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the means, and how far the intervals reach below and above."""
    means = np.array([estimate["mean"] for estimate in estimates])
    bounds = [e["interval"] or (e["mean"], e["mean"]) for e in estimates]
    low, high = np.array(bounds).T
    return means, np.maximum([means - low, high - means], 0)


def _curves(
    curves: Mapping[str, list[Any]],
    metric: str,
    target: dict[str, Any],
    path: pathlib.Path,
) -> None:
    many = len(curves) > _FEW
    figure, axes = plots.figure(*(12, 7) if many else (8, 4.5))
    shown = []
    for place, (name, found) in enumerate(curves.items()):
        if not found:
            continue
        length = min(len(curve["steps"]) for curve in found)
        steps = found[0]["steps"][:length]
        # What is not finite is null in JSON.
        values = np.array([c[metric][:length] for c in found], np.float64)
        shown.append(values[np.isfinite(values)])
        mean = values.mean(axis=0)
        # Ten colours, then the same ten with another line.
        look = {"color": f"C{place % 10}"}
        line = _LINES[place // 10 % len(_LINES)]
        label = f"{name} ({len(found)})"
        axes.plot(steps, mean, linestyle=line, label=label, **look)
        if len(found) > 1:
            error = values.std(axis=0, ddof=1) / np.sqrt(len(found))
            band = mean - error, mean + error
            axes.fill_between(steps, *band, alpha=0.2, linewidth=0, **look)
    if target:
        axes.axhline(target["value"], **plots.REFERENCE)
    axes.set(
        xlabel="steps of a group",
        ylabel="validation log loss (nats)"
        if metric == collect.LOG_LOSS
        else "validation loss",
        title="mean over trials, band of one standard error",
    )
    # The first evaluations would flatten what matters.
    joined = np.concatenate(shown)
    low, high = joined.min(), np.quantile(joined, 0.8)
    if high > low:
        margin = 0.05 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    if many:
        figure.legend(fontsize="small", loc="outside right upper")
    else:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _churn(found: Mapping[str, Any], path: pathlib.Path) -> None:
    figure, axes = plots.figure(8, max(4.5, 1 + 0.4 * len(found)))
    means, errors = _errors(list(found.values()))
    drawn = axes.barh(list(found), means, xerr=errors, capsize=3)
    axes.bar_label(drawn, fmt="%.4f", padding=4, fontsize="small")
    axes.invert_yaxis()
    axes.set(xlabel="mean |p1 - p2| between retrains, 95% interval")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)


def _sweep(
    title: str, values: list[tuple[str, Any]], alone: Any, path: pathlib.Path
) -> None:
    figure, axes = plots.figure(6, 4.5)
    try:  # Numbers, which may have been swept in several calls.
        values = sorted(values, key=lambda pair: float(pair[0]))
    except ValueError:
        pass
    names, estimates = zip(*values, strict=True)
    means, errors = _errors(list(estimates))
    axes.errorbar(names, means, yerr=errors, marker="o", capsize=3)
    if alone:
        metric = collect.metric_in(alone["figures"])
        mean = alone["figures"][metric]["mean"]
        axes.axhline(mean, label="independent", **plots.REFERENCE)
        axes.legend(fontsize="small")
    axes.set(
        xlabel=title,
        ylabel="final validation figure",
        title="mean and 95% interval over trials",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
