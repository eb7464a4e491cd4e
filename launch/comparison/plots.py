"""The report's plots: curves with bands, churn, and sweeps."""

import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

CURVES, CHURN = "curves.png", "churn.png"
# More methods than this do not fit into a legend over the curves.
_FEW = 8
_LINES = ("-", "--", ":", "-.")
_VARIANT = re.compile(r"(?P<method>.+)\[(?P<name>[^=]+)=(?P<value>.+)\]")


def draw(report: Mapping[str, Any], directory: pathlib.Path) -> list[str]:
    """Draws what the report has figures for."""
    methods = report["methods"]
    drawn = []
    if any(m["trials"][0]["curve"] for m in methods.values()):
        _curves(methods, report["target"], directory / CURVES)
        drawn.append(CURVES)
    if any("churn" in m["churn"] for m in methods.values()):
        _churn(methods, directory / CHURN)
        drawn.append(CHURN)
    for (method, name), values in _sweeps(methods).items():
        file = f"sweep_{method}_{re.sub('[^a-zA-Z0-9]+', '_', name)}.png"
        _sweep(f"{method}: {name}", values, methods, directory / file)
        drawn.append(file)
    return drawn


def _figure(width: float = 8, height: float = 4.5) -> tuple[Any, Any]:
    # Imported here: it takes a second. Never `pyplot`, which may want a screen.
    from matplotlib import figure as figure_lib

    figure = figure_lib.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _curves(methods: Any, target: Any, path: pathlib.Path) -> None:
    many = len(methods) > _FEW
    figure, axes = _figure(12 if many else 8, 7 if many else 4.5)
    for place, (name, method) in enumerate(methods.items()):
        curves = [t["curve"] for t in method["trials"] if t["curve"]]
        if not curves:
            continue
        # Ten colours, then the same ten with another line.
        line = _LINES[place // 10 % len(_LINES)]
        label = f"{name} ({len(curves)})"
        _band(axes, curves, label=label, color=f"C{place % 10}", line=line)
    if target:
        axes.axhline(target["value"], color="0.5", linestyle=":")
    axes.set(
        xlabel="steps of a group",
        ylabel="validation log loss (nats)",
        title="mean over trials, band of one standard error",
    )
    # The first evaluations would flatten what matters.
    _crop(axes, methods)
    if many:
        figure.legend(fontsize="small", loc="outside right upper")
    else:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def _band(
    axes: Any, curves: list[Any], *, label: str, color: str, line: str
) -> None:
    length = min(len(curve["steps"]) for curve in curves)
    steps = curves[0]["steps"][:length]
    values = np.array(
        [
            [np.nan if v is None else v for v in c["log_loss"][:length]]
            for c in curves
        ]
    )
    mean = values.mean(axis=0)
    axes.plot(steps, mean, color=color, linestyle=line, label=label)
    if len(curves) > 1:
        error = values.std(axis=0, ddof=1) / np.sqrt(len(curves))
        axes.fill_between(
            steps,
            mean - error,
            mean + error,
            color=color,
            alpha=0.2,
            linewidth=0,
        )


def _crop(axes: Any, methods: Any) -> None:
    values = np.concatenate(
        [
            [v for v in trial["curve"]["log_loss"] if v is not None]
            for method in methods.values()
            for trial in method["trials"]
            if trial["curve"]
        ]
    )
    low, high = values.min(), np.quantile(values, 0.8)
    if high > low:
        margin = 0.05 * (high - low)
        axes.set_ylim(low - margin, high + margin)


def _churn(methods: Any, path: pathlib.Path) -> None:
    found = {n: m["churn"]["churn"] for n, m in methods.items() if m["churn"]}
    names = list(found)
    figure, axes = _figure(height=max(4.5, 1 + 0.4 * len(names)))
    for place, name in enumerate(names):
        estimate = found[name]
        low, high = estimate["interval"] or (estimate["mean"],) * 2
        spread = [[estimate["mean"] - low], [high - estimate["mean"]]]
        drawn = axes.barh(
            place,
            estimate["mean"],
            xerr=np.maximum(spread, 0),
            capsize=3,
            color="C0",
        )
        axes.bar_label(drawn, fmt="%.4f", padding=4, fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="mean |p1 - p2| between retrains, 95% interval")
    axes.margins(x=0.15)
    figure.savefig(path, dpi=120)


def _sweeps(methods: Any) -> dict[tuple[str, str], list[tuple[str, str]]]:
    """Method and swept field to the values, each with its variant's name."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for variant in methods:
        match = _VARIANT.fullmatch(variant)
        if match:
            key = (match["method"], match["name"])
            found.setdefault(key, []).append((match["value"], variant))
    return found


def _in_order(values: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sorts numbers, which may have been swept in several calls."""
    try:
        return sorted(values, key=lambda pair: float(pair[0]))
    except ValueError:
        return values


def _sweep(
    title: str, values: list[tuple[str, str]], methods: Any, path: pathlib.Path
) -> None:
    figure, axes = _figure(6)
    values = _in_order(values)
    estimates = [
        methods[variant]["figures"]["log_loss"] for _, variant in values
    ]
    means = np.array([estimate["mean"] for estimate in estimates])
    bounds = np.array(
        [e["interval"] or (e["mean"], e["mean"]) for e in estimates]
    )
    places = range(len(values))
    axes.errorbar(
        places,
        means,
        yerr=[
            np.maximum(means - bounds[:, 0], 0),
            np.maximum(bounds[:, 1] - means, 0),
        ],
        marker="o",
        capsize=3,
    )
    axes.set_xticks(places, [value for value, _ in values])
    if "independent" in methods:
        mean = methods["independent"]["figures"]["log_loss"]["mean"]
        axes.axhline(mean, color="0.5", linestyle=":", label="independent")
        axes.legend(fontsize="small")
    axes.set(
        xlabel=title,
        ylabel="final validation log loss (nats)",
        title="mean and 95% interval over trials",
    )
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
