"""Draws the plot of the README from several quickstarts.

for seed in 101 102 103 104 105 106; do
  bash launch/quickstart.sh --workdir=runs/readme --override=seed=$seed \
      --override=data.seed=$seed
done
python -m benchmarks.readme_plot --runs=runs/readme

Without --runs it draws the figures that are recorded in the checkout.
"""

import json
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import matplotlib
from absl import app
from absl import flags
from matplotlib import figure as figure_lib

from launch import quickstart

_RUNS = flags.DEFINE_string(
    "runs", None, "directory of quickstarts whose figures replace the record"
)
_FIGURES = flags.DEFINE_string(
    "figures", "docs/results/quickstart/figures.json", "the record"
)
_OUTPUT = flags.DEFINE_string(
    "output", "docs/images/quickstart.svg", "SVG file to write"
)
_LIMITS = {"disagreement": (0, 5), "accuracy": (95, 99)}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {"independent": "#0072B2", "codistilled": "#D55E00"}
_PANELS = (
    ("disagreement", "images on which the two groups disagree (%)"),
    ("accuracy", "accuracy, mean of the groups (%)"),
)


def collect(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the figures of each quickstart in a directory.

    Args:
        directory: The quickstarts' `--workdir`.
    """
    found = []
    for path in sorted(directory.iterdir()):
        figures: dict[str, Any] = {}
        for method in quickstart.METHODS:
            run = path / method
            config = json.loads((run / "config.json").read_text("utf-8"))
            results = json.loads((run / "results.json").read_text("utf-8"))
            figures["seed"] = config["seed"]
            figures[method] = results["mean"] | results["agreement"]
        found.append(figures)
    return found


def draw(figures: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draws one point for each quickstart, and the mean of all.

    Args:
        figures: As `collect` returns them.
        path: SVG file to write.
    """
    # The same figures give the same bytes, and text stays text.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "tfdistill"}
    with matplotlib.rc_context(settings):
        figure = figure_lib.Figure(figsize=(9, 2.2), layout="constrained")
        panels = figure.subplots(1, len(_PANELS), sharey=True)
        for axes, (name, label) in zip(panels, _PANELS, strict=True):
            _panel(axes, figures, name=name, label=label)
        figure.savefig(path, metadata={"Date": None})


def _mean(
    figures: Sequence[Mapping[str, Any]], method: str, name: str
) -> float:
    return 100 * sum(found[method][name] for found in figures) / len(figures)


def _panel(
    axes: Any, figures: Sequence[Mapping[str, Any]], *, name: str, label: str
) -> None:
    for place, (method, colour) in enumerate(_COLOURS.items()):
        values = [100 * found[method][name] for found in figures]
        mean = _mean(figures, method, name)
        axes.scatter(values, [place] * len(values), color=colour, alpha=0.5)
        axes.plot([mean, mean], [place - 0.25, place + 0.25], color=colour)
        axes.annotate(
            f"mean {mean:.2f}",
            (mean, place - 0.25),
            xytext=(0, 3),
            textcoords="offset points",
            horizontalalignment="center",
            color=colour,
        )
    axes.set_xlabel(label)
    axes.set_yticks(range(len(_COLOURS)), list(_COLOURS))
    axes.set_ylim(len(_COLOURS) - 0.5, -0.7)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(_LIMITS[name])


def main(argv: Sequence[str]) -> None:
    """Runs the command line.

    Args:
        argv: The program's name; nothing else is expected.

    Raises:
        app.UsageError: There are arguments that are not flags.
    """
    if len(argv) > 1:
        raise app.UsageError(f"expected flags only; received {argv[1:]}")
    record = pathlib.Path(_FIGURES.value)
    if _RUNS.value is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        found = collect(pathlib.Path(_RUNS.value))
        record.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    figures = json.loads(record.read_text("utf-8"))
    for name, label in _PANELS:
        for method in _COLOURS:
            print(f"{label}, {method}: {_mean(figures, method, name):.2f}")
    draw(figures, pathlib.Path(_OUTPUT.value))
    print(_OUTPUT.value)


if __name__ == "__main__":
    app.run(main)
