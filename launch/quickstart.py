"""Trains two groups apart, then codistilled, and sets the two side by side.

bash launch/quickstart.sh
"""

import dataclasses
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Self

import rich.box
import rich.console
import rich.table
from absl import logging

from launch import local
from launch import outputs
from launch import recipes
from tfdistill.launcher import parent
from tfdistill.system import programs

# Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
_METRICS = (("accuracy", "accuracy"), ("log_loss", "log loss"))
_AGREEMENT = (
    ("disagreement", "disagreement"),
    ("mean_absolute_churn", "mean abs. churn"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a finished run has left behind."""

    name: str
    workdir: pathlib.Path
    results: Mapping[str, Any]

    @classmethod
    def read(cls, name: str, workdir: str | os.PathLike[str]) -> Self:
        """Reads the results of a finished run; ValueError if it has none."""
        try:
            results = outputs.read_results(workdir)
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
        directory = outputs.group_dir(self.workdir, group)
        points = [
            (record["step"], record[name])
            for record in outputs.read_records(directory)
            if record.get("event") == "epoch_end"
            and record.get(name) is not None
        ]
        return [step for step, _ in points], [value for _, value in points]


def rows(runs: Sequence[Run]) -> list[tuple[str, list[float]]]:
    """Returns the figures to compare: names, and one value for each run."""
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
    """Returns the comparison with the first run as a table."""
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
    """Draws validation loss over steps and, if several, how groups disagree."""
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


_ROOT = pathlib.Path(__file__).resolve().parent.parent
_EXIT_INTERRUPTED = 130
# By name, the method of `launch.methods`: the same in all else.
METHODS = {"independent": "independent", "codistilled": "codistill"}
PLOT = "comparison.png"


def _add_options(options: programs.Flags) -> None:
    add = options.add
    add(
        "workdir",
        "<DIR>: in it a numbered directory is made; default runs/quickstart",
        str(_ROOT / "runs" / "quickstart"),
    )
    add("recipe", "<NAME>: a recipe", "digits")
    add("num_groups", "groups of workers", 2)
    # The numbers are the same, and more tasks than cores only get in each
    # other's way.
    add(
        "workers_per_group",
        "workers in each group; default 2, or 1 on fewer than four cores",
        2 if (os.cpu_count() or 1) >= 4 else 1,
    )
    recipes.add_override(options, "the recipe for both runs, such as seed=1")


def run(
    options: programs.Options,
    *,
    launch: Callable[[Sequence[str]], int] = local.main,
) -> int:
    """Makes both runs by a launcher, and sets their results side by side."""
    try:  # Before the first run starts.
        recipes.override(recipes.get(options.recipe), options.override)
        directory = _new_directory(pathlib.Path(options.workdir))
    except ValueError as error:
        raise programs.UsageError(str(error)) from error
    # TensorFlow's start-up messages would hide the results.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with parent.keep():  # One for both runs.
            return _compare(options, directory, launch)
    except KeyboardInterrupt:
        logging.warning("interrupted")
        return _EXIT_INTERRUPTED


def _compare(
    options: programs.Options,
    directory: pathlib.Path,
    launch: Callable[[Sequence[str]], int],
) -> int:
    start = time.monotonic()
    for number, (name, method) in enumerate(METHODS.items(), start=1):
        print(f"\n== {number} of {len(METHODS)}: {name}", flush=True)
        code = launch(
            [
                f"--num_groups={options.num_groups}",
                f"--workers_per_group={options.workers_per_group}",
                f"--workdir={directory / name}",
                f"--recipe={options.recipe}",
                *(f"--override={change}" for change in options.override),
                f"--method={method}",
            ]
        )
        if code:
            logging.error(
                "the %s run ended with exit code %d; its logs are in %s",
                name,
                code,
                directory / name / "logs",
            )
            return code
    runs = [Run.read(name, directory / name) for name in METHODS]
    plot(runs, directory / PLOT)
    _tell(runs, directory, secs=time.monotonic() - start)
    return 0


def _new_directory(parent: pathlib.Path) -> pathlib.Path:
    """Makes the directory with the next number; earlier ones are kept."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name) for p in parent.iterdir() if p.name.isdecimal()]
        number = max(taken, default=0) + 1
        while True:
            directory = parent.absolute() / f"{number:03}"
            try:
                directory.mkdir()
                return directory
            except FileExistsError:  # Of another quickstart, just now.
                number += 1
    except OSError as cause:
        raise ValueError(
            "`workdir` must be a directory that can be written to; received "
            f"{str(parent)!r}: {cause.strerror}."
        ) from cause


def _tell(runs: Sequence[Run], directory: pathlib.Path, *, secs: float) -> None:
    """Prints the table and says where everything is."""
    console = rich.console.Console()
    first = runs[0]
    console.print(
        f"\n{first.num_groups} groups x "
        f"{first.results['groups'][0]['workers']} workers, "
        f"{first.results['groups'][0]['steps']} steps each, "
        f"{secs:.0f} s in all",
        highlight=False,
    )
    console.print(table(runs), highlight=False)
    program = pathlib.Path(sys.executable).with_name("tensorboard")
    exports = " ".join(
        str(outputs.last_export(run.workdir, group).relative_to(directory))
        for run in runs
        for group in range(run.num_groups)
    )
    # Not through rich, which would break long paths in two.
    print(f"results      {directory}")
    print(f"plot         {directory / PLOT}")
    print(f"TensorBoard  {_shown(program)} --logdir {_shown(directory)}")
    print(f"SavedModels  {exports}")
    print(f"Keras files  {{run}}/group_{{g}}/{outputs.STUDENT}")
    if len(runs) == 2 and first.agreement:
        print(_conclusion(*runs))


def _shown(path: pathlib.Path) -> str:
    return shlex.quote(str(path))


def _conclusion(independent: Run, codistilled: Run) -> str:
    before = independent.agreement["disagreement"]
    after = codistilled.agreement["disagreement"]
    return (
        f"\nThe groups disagree on {100 * after:.1f}% of the validation "
        f"images when codistilled, on {100 * before:.1f}% when trained apart."
    )


PROGRAM = programs.Program(
    name="launch/quickstart.sh",
    about="Trains two groups of workers on handwritten digits, each on its "
    "own half of the data: first apart, then codistilled, with the same seeds "
    "and steps. Prints a table. Earlier runs are kept.",
    define=_add_options,
    run=run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
