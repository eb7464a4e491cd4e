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
from matplotlib import figure as figure_lib

from launch import quickstart
from tfdistill.system import programs

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


def _add_options(options: programs.Flags) -> None:
    for name, default, text in (
        (
            "runs",
            None,
            "<DIR>: quickstarts whose figures replace the record",
        ),
        (
            "figures",
            "docs/results/quickstart/figures.json",
            "<FILE>: the record",
        ),
        ("output", "docs/images/quickstart.svg", "<FILE>: SVG to write"),
    ):
        options.add(name, text, default)


def _run(options: programs.Options) -> int:
    record = pathlib.Path(options.figures)
    if options.runs is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        found = collect(pathlib.Path(options.runs))
        record.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    figures = json.loads(record.read_text("utf-8"))
    for name, label in _PANELS:
        for method in _COLOURS:
            print(f"{label}, {method}: {_mean(figures, method, name):.2f}")
    draw(figures, pathlib.Path(options.output))
    print(options.output)
    return 0


PROGRAM = programs.Program(
    name="python -m benchmarks.readme_plot",
    about="Draws the plot of the README from several quickstarts, or from the "
    "figures that are recorded in the checkout.",
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
