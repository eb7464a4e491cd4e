"""Prints the figures of the README's quickstart, and draws its plot.

bash launch/quickstart.sh --trials=6 --workdir=runs/readme
python -m benchmarks.readme_plot --report=runs/readme/001/report.json

Without --report it shows the figures that are recorded in the checkout, and
without --output=docs/images/quickstart.svg it draws nothing.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib import figure as figure_lib

from launch import quickstart
from models import click_log
from tfdistill.system import programs

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a
# grey for text: all are legible on white and on black.
_COLOURS = ("#0072B2", "#CC79A7", "#D55E00")
_GREY = "#808080"


def collect(report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is drawn of a quickstart's report.json."""
    arguments = report["config"]["arguments"]
    truth = click_log.truth(arguments["log_seed"], arguments["rows_per_day"])
    found: dict[str, Any] = {"truth": truth, "methods": {}}
    for method, name in quickstart.METHODS.items():
        figures = report["methods"][method]
        found["methods"][name] = {
            "churn": figures["churn"]["churn"],
            "log_loss": figures["figures"]["log_loss"],
            "versus_independent": figures.get("versus_independent", {}).get(
                "churn"
            ),
        }
    return found


def draw(found: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draws a point for each pair of retrains, or each retrain; and the means.

    Args:
        found: As `collect` returns it.
        path: SVG file to write.
    """
    # The same figures give the same bytes, and text stays text.
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "tfdistill",
        **dict.fromkeys(
            (
                *("text.color", "axes.labelcolor", "axes.edgecolor"),
                *("xtick.color", "ytick.color", "grid.color"),
            ),
            _GREY,
        ),
    }
    with matplotlib.rc_context(settings):
        figure = figure_lib.Figure(figsize=(9, 2.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        _panel(left, found["methods"], "churn", "churn: |p1 - p2| of retrains")
        _panel(right, found["methods"], "log_loss", "log loss of the next day")
        most = max(max(m["churn"]["values"]) for m in found["methods"].values())
        left.set_xlim(0, 1.1 * most)
        right.axvline(found["truth"], color=_GREY, linestyle=":")
        right.annotate(
            "true probabilities",
            (found["truth"], 1),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
        )
        figure.savefig(path, metadata={"Date": None}, transparent=True)


def _panel(axes: Any, methods: Mapping[str, Any], key: str, label: str) -> None:
    for place, (name, colour) in enumerate(zip(methods, _COLOURS, strict=True)):
        figures = methods[name][key]
        mean, values = figures["mean"], figures["values"]
        axes.scatter(values, [place] * len(values), color=colour, alpha=0.4)
        if figures["interval"]:
            axes.plot(figures["interval"], [place] * 2, color=colour)
        axes.plot([mean, mean], [place - 0.25, place + 0.25], color=colour)
        axes.annotate(
            f"{mean:.4f}",
            (mean, place - 0.25),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="center",
        )
    axes.set_xlabel(label)
    axes.set_yticks(range(len(methods)), list(methods))
    axes.set_ylim(len(methods) - 0.5, -0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _add_options(options: programs.Program) -> None:
    for name, default, text in (
        (
            "report",
            None,
            "<FILE>: report.json of a quickstart; its figures replace the "
            "record",
        ),
        (
            "figures",
            "docs/results/quickstart/figures.json",
            "<FILE>: the record",
        ),
        ("output", None, "<FILE>: SVG to write; default: none"),
    ):
        options.add(name, text, default)


def _versus(found: Mapping[str, Any] | None) -> str:
    """The change of the churn against independent groups, with its interval."""
    if not found:
        return ""
    change, *ends = (
        f"{100 * (ratio - 1):+.0f}%"
        for ratio in (found["ratio"], *(found["interval"] or ()))
    )
    interval = f", 95% interval {' to '.join(ends)}" if ends else ""
    return f" ({change}{interval})"


def _run(options: programs.Options) -> int:
    record = pathlib.Path(options.figures)
    if options.report is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        report = json.loads(pathlib.Path(options.report).read_text("utf-8"))
        record.write_text(json.dumps(collect(report), indent=1) + "\n", "utf-8")
    found = json.loads(record.read_text("utf-8"))
    for name, figures in found["methods"].items():
        churn, loss = figures["churn"]["mean"], figures["log_loss"]["mean"]
        versus = _versus(figures["versus_independent"])
        print(f"{name}: churn {churn:.4f}{versus}, log loss {loss:.4f}")
    print(f"log loss of the true probabilities: {found['truth']:.4f}")
    if options.output is not None:
        draw(found, pathlib.Path(options.output))
        print(options.output)
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.readme_plot",
    about="Prints the figures of the README's quickstart, from a report or as "
    "recorded in the checkout, and draws its plot.",
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
