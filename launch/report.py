"""Sets runs of a recipe side by side: a table and a plot."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Self

import rich.box
import rich.table

from launch import run_outputs

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_METRICS = (("accuracy", "accuracy"), ("log_loss", "log loss"))
_AGREEMENT = (
    ("disagreement", "disagreement"),
    ("mean_absolute_churn", "mean abs. churn"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a finished run has left behind.

    Attributes:
        name: For the heading and the legend.
        workdir: Where it is.
        results: Its results.json.
    """

    name: str
    workdir: pathlib.Path
    results: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, workdir: str | os.PathLike[str]) -> Self:
        """Reads the results of a finished run.

        Raises:
            ValueError: If it has none.
        """
        try:
            results = run_outputs.read_results(workdir)
        except FileNotFoundError as error:
            raise ValueError(
                "`workdir` must hold a finished run; there is no "
                f"{error.filename}."
            ) from None
        return cls(name=name, workdir=pathlib.Path(workdir), results=results)

    @property
    def num_groups(self) -> int:
        """Number of groups of the run."""
        return len(self.results["groups"])

    @property
    def agreement(self) -> Mapping[str, float]:
        """How far the groups are apart; empty for one group."""
        return self.results["agreement"] or {}

    def curve(self, group: int, name: str) -> tuple[list[int], list[float]]:
        """Returns the steps of a group's evaluations and a log's values."""
        directory = run_outputs.group_dir(self.workdir, group)
        points = [
            (record["step"], record[name])
            for record in run_outputs.read_records(directory)
            if record.get("event") == "epoch_end"
            and record.get(name) is not None
        ]
        return [step for step, _ in points], [value for _, value in points]


def rows(runs: Sequence[Run]) -> list[tuple[str, list[float]]]:
    """Returns the figures to compare: their names and one value for each run.

    Args:
        runs: With the same number of groups.
    """
    found = []
    num_groups = runs[0].num_groups
    for key, label in _METRICS:
        if num_groups > 1:
            for group in range(num_groups):
                values = [r.results["groups"][group]["metrics"] for r in runs]
                name = f"{label}, group {group}"
                found.append((name, [value[key] for value in values]))
        name = f"{label}, mean" if num_groups > 1 else label
        found.append((name, [run.results["mean"][key] for run in runs]))
    for key, label in _AGREEMENT:
        if num_groups > 1:
            found.append((label, [run.agreement[key] for run in runs]))
    return found


def table(runs: Sequence[Run]) -> rich.table.Table:
    """Returns the comparison as a table.

    Args:
        runs: The first is what the others are compared with.
    """
    result = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    result.add_column("validation", no_wrap=True)
    for run in runs:
        result.add_column(run.name, justify="right")
    for run in runs[1:]:
        heading = "change" if len(runs) == 2 else f"change, {run.name}"
        result.add_column(heading, justify="right")
    for name, (first, *others) in rows(runs):
        values = [f"{value:.4f}" for value in (first, *others)]
        changes = [f"{value - first:+.4f}" for value in others]
        end_section = name.endswith(", mean")
        result.add_row(name, *values, *changes, end_section=end_section)
    return result


def plot(runs: Sequence[Run], path: str | os.PathLike[str]) -> None:
    """Draws validation loss over steps and, for several groups, disagreement.

    Args:
        runs: What to draw.
        path: PNG file to write.
    """
    # Imported here: it takes a second. Never `pyplot`, which may want a screen.
    from matplotlib import figure as figure_lib

    bars = [(key, label) for key, label in _AGREEMENT if runs[0].agreement]
    figure = figure_lib.Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots(
        1, 2 if bars else 1, squeeze=False, width_ratios=[3, 2] if bars else [1]
    )[0]
    styles = ("-", "--", ":", "-.")
    for index, run in enumerate(runs):
        colour = _COLOURS[index % len(_COLOURS)]
        for group in range(run.num_groups):
            steps, losses = run.curve(group, "val_loss")
            axes[0].plot(
                steps,
                losses,
                styles[group % len(styles)],
                color=colour,
                label=f"{run.name}, group {group}",
            )
        for place, (key, _) in enumerate(bars):
            width = 0.8 / len(runs)
            left = place + (index - (len(runs) - 1) / 2) * width
            drawn = axes[1].bar(
                left, run.agreement[key], width, color=colour, label=run.name
            )
            axes[1].bar_label(drawn, fmt="%.4f", padding=2)
    axes[0].set(
        xlabel="step", ylabel="validation log loss (nats)", yscale="log"
    )
    axes[0].legend()
    axes[0].grid(which="both", alpha=0.3)
    if bars:
        axes[1].set_xticks(range(len(bars)), [label for _, label in bars])
        axes[1].set_title("between the groups' predictions")
        axes[1].margins(y=0.15)
    figure.savefig(path, dpi=120)
