"""Trains two groups apart, then codistilled, and sets the two side by side.

bash launch/quickstart.sh
"""

import os
import pathlib
import shlex
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import logging

from launch import local
from launch import recipes
from tfdistill.launcher import parent
from tfdistill.recipes import outputs
from tfdistill.system import programs

_METRICS = (("accuracy", "accuracy"), ("log_loss", "log loss"))
_AGREEMENT = (
    ("disagreement", "disagreement"),
    ("mean_distance", "mean distance"),
)


def rows(runs: Sequence[Any]) -> list[tuple[str, list[float]]]:
    """Returns the figures to compare: names, and one value for each run.

    A run is what its results.json says.
    """
    found = []
    for key, label in _METRICS:
        for group in range(_NUM_GROUPS):
            values = [run["groups"][group]["metrics"][key] for run in runs]
            found.append((f"{label}, group {group}", values))
        found.append((f"{label}, mean", [run["mean"][key] for run in runs]))
    for key, label in _AGREEMENT:
        found.append((label, [run["agreement"][key] for run in runs]))
    return found


def table(runs: Sequence[Any]) -> rich.table.Table:
    """Returns the comparison of the two runs as a table."""
    result = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    result.add_column("validation", no_wrap=True)
    for name in (*METHODS, "change"):
        result.add_column(name, justify="right")
    for name, (before, after) in rows(runs):
        values = f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"
        result.add_row(name, *values, end_section=name.endswith(", mean"))
    return result


_ROOT = pathlib.Path(__file__).resolve().parent.parent
_EXIT_INTERRUPTED = 130
_RECIPE, _NUM_GROUPS = "digits", 2
# By name, the method of `launch.methods`: the same in all else.
METHODS = {"independent": "independent", "codistilled": "codistill"}


def _add_options(options: programs.Flags) -> None:
    add = options.add
    add(
        "workdir",
        "<DIR>: in it a numbered directory is made; default runs/quickstart",
        str(_ROOT / "runs" / "quickstart"),
    )
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
        recipes.override(recipes.get(_RECIPE), options.override)
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
                f"--num-groups={_NUM_GROUPS}",
                f"--workers-per-group={options.workers_per_group}",
                f"--workdir={directory / name}",
                f"--recipe={_RECIPE}",
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
    runs = [outputs.read_results(directory / name) for name in METHODS]
    _tell(runs, directory, secs=time.monotonic() - start)
    return 0


def _new_directory(parent: pathlib.Path) -> pathlib.Path:
    """Makes the directory with the next number; earlier ones are kept."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(p.name) for p in parent.iterdir() if p.name.isdecimal()]
        directory = parent.absolute() / f"{max(taken, default=0) + 1:03}"
        directory.mkdir()
        return directory
    except OSError as cause:
        raise ValueError(
            "`workdir` must be a directory that can be written to; received "
            f"{str(parent)!r}: {cause.strerror}."
        ) from cause


def _tell(runs: Sequence[Any], directory: pathlib.Path, *, secs: float) -> None:
    """Prints the table and says where everything is."""
    console = rich.console.Console()
    groups = runs[0]["groups"]
    console.print(
        f"\n{_NUM_GROUPS} groups x {groups[0]['workers']} workers, "
        f"{groups[0]['steps']} steps each, {secs:.0f} s in all",
        highlight=False,
    )
    console.print(table(runs), highlight=False)
    program = pathlib.Path(sys.executable).with_name("tensorboard")
    exports = " ".join(
        str(outputs.last_export(directory / name, group).relative_to(directory))
        for name in METHODS
        for group in range(_NUM_GROUPS)
    )
    shown = shlex.quote(str(program)), shlex.quote(str(directory))
    before, after = (100 * run["agreement"]["disagreement"] for run in runs)
    # Not through rich, which would break long paths in two.
    print(f"results      {directory}")
    print("TensorBoard  {} --logdir {}".format(*shown))
    print(f"SavedModels  {exports}")
    print(f"Keras files  {{run}}/group_{{g}}/{outputs.STUDENT}")
    print(
        f"\nThe groups disagree on {after:.1f}% of the validation images when "
        f"codistilled, on {before:.1f}% when trained apart."
    )


PROGRAM = programs.Program(
    name="launch/quickstart.sh",
    about="Trains two groups of workers on handwritten digits, each on its "
    "own half of\nthe data: first apart, then codistilled, with the same seeds "
    "and steps. Prints a\ntable. Earlier runs are kept.",
    define=_add_options,
    run=run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
