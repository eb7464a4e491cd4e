"""Retrains a click model by three methods, and shows how far retrains differ.

bash launch/quickstart.sh
"""

import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import rich.box
import rich.console
import rich.table
from absl import logging

from launch import recipes
from models import click_log
from tfdistill.launcher import parent
from tfdistill.system import programs

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_EXIT_FAILURE, _EXIT_INTERRUPTED = 1, 130
_RECIPE = "clicks"
_BASELINE, _CODISTILLED = "independent", "codistill_shared"
# The methods of `tfdistill compare`, and what the table calls them.
METHODS = {
    _BASELINE: "independent",
    "ema_teacher": "its own past",
    _CODISTILLED: "codistilled, two groups",
}


def _range(found: tuple[float, float] | None, form: str) -> str:
    low_and_high = found and tuple(f"{x:{form}}" for x in found)
    return " ({} to {})".format(*low_and_high) if low_and_high else ""


def rows(report: Mapping[str, Any], truth: float) -> list[tuple[str, ...]]:
    """Returns the lines of the table, from the report of a comparison.

    Args:
        report: What `tfdistill compare` writes to report.json.
        truth: The log loss of the true probabilities.
    """
    found: list[tuple[str, ...]] = []
    for method, name in METHODS.items():
        figures = report["methods"].get(method)
        if figures is None:  # All its runs have failed.
            continue
        churn, versus = figures["churn"].get("churn"), ""
        if method != _BASELINE and "versus_independent" in figures:
            change = figures["versus_independent"].get("churn")
            if change and change["ratio"] is not None:
                ends = change["interval"]
                ends = ends and tuple(100 * (end - 1) for end in ends)
                percent = 100 * (change["ratio"] - 1)
                versus = f"{percent:+.0f}%{_range(ends, '+.0f')}"
        loss = figures["figures"]["log_loss"]["mean"]
        shown = f"{churn['mean']:.4f}" if churn else ""
        found.append((name, shown, versus, f"{loss:.4f}"))
    found.append(("the true probabilities", "0", "", f"{truth:.4f}"))
    return found


def sentence(report: Mapping[str, Any]) -> str:
    """Returns what codistillation changed; empty if its runs failed."""
    figures = report["methods"].get(_CODISTILLED, {})
    versus = figures.get("versus_independent", {}).get("log_loss")
    if not versus:
        return ""
    found = f"{versus['difference']:+.4f}{_range(versus['interval'], '+.4f')}"
    interval = versus["interval"]
    is_clear = interval and not interval[0] <= 0 <= interval[1]
    clear = "" if is_clear else ", no clear difference"
    return f"Codistillation changed the log loss by {found}{clear}."


def table(report: Mapping[str, Any], truth: float) -> rich.table.Table:
    """Returns the lines as a table."""
    result = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    result.add_column("trained", no_wrap=True)
    for name in ("churn", "against independent", "log loss"):
        result.add_column(name, justify="right", no_wrap=True)
    for row in rows(report, truth):
        result.add_row(*row)
    return result


def _add_options(options: programs.Program) -> None:
    add = options.add
    add(
        "workdir",
        "<DIR>: directory for a new numbered directory; default: "
        "runs/quickstart",
        str(_ROOT / "runs" / "quickstart"),
    )
    add(
        "trials",
        "<N>: retrains with each method; churn needs two, an interval three",
        4,
        kind=int,
    )
    # Groups that keep up with each other wait now and then.
    add("jobs", "<N>: runs at a time; default: two per core", _jobs())
    recipes.add_override(options, "the recipe clicks, such as log_seed=1")


def _jobs() -> int:
    return 2 * (os.cpu_count() or 1)


def run(options: programs.Options) -> int:
    """Trains by each method, and prints what came out."""
    from tfdistill.comparison import experiment
    from tfdistill.comparison import trials

    with programs.usage_errors():  # Before the first run starts.
        recipe = recipes.override(recipes.get(_RECIPE), options.override)
        if options.trials < 2:
            raise ValueError(
                f"`trials` must be >= 2; received {options.trials}."
            )
        directory = _new_directory(pathlib.Path(options.workdir))
    # TensorFlow's start-up messages would hide the results.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    compared = experiment.Experiment(
        directory,
        setup=trials.Setup(recipe=recipe),
        variants=trials.parse_methods(",".join(METHODS)),
        num_trials=options.trials,
    )
    start = time.monotonic()
    try:
        with parent.keep():  # One for all runs.
            failures = compared.run(options.jobs, say=_say)
        report = compared.report("final", failures, jobs=options.jobs)
    except KeyboardInterrupt:
        logging.warning("interrupted")
        return _EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        logging.error("%s", error)
        return _EXIT_FAILURE
    for key, why in failures.items():
        logging.error("the run %s failed: %s", key, why)
    truth = click_log.truth(
        **{
            name: recipe.arguments[name]
            for name in ("log_seed", "rows_per_day")
        }
    )
    _tell(report, truth, directory, secs=time.monotonic() - start)
    return _EXIT_FAILURE if failures else 0


def _say(text: str) -> None:
    print(text, flush=True)


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


def _tell(
    report: Mapping[str, Any],
    truth: float,
    directory: pathlib.Path,
    *,
    secs: float,
) -> None:
    """Prints the table, what it means, and where everything is."""
    console = rich.console.Console()
    trials = max(m["num_trials"] for m in report["methods"].values())
    console.print(
        f"\n{trials} retrains with each method, {secs:.0f} s in total",
        highlight=False,
    )
    console.print(table(report, truth), highlight=False)
    print(
        f"{sentence(report)}\n\n"
        "churn     mean absolute difference between the click probabilities of "
        "two\n          retrains on the held-out day\n"
        "(a to b)  95% bootstrap interval; if it contains 0, there is no clear "
        "difference\n"
        "log loss  on that day's labels; no model can beat the true "
        "probabilities\n"
    )
    program = pathlib.Path(sys.executable).with_name("tensorboard")
    # Not through rich, which would break long paths in two.
    print(f"report       {directory / 'report.md'}")
    print(f"TensorBoard  {program} --logdir {directory / 'runs'}")
    print("your model   docs/tutorial_clicks.md, docs/workload.md")


PROGRAM = programs.Program(
    name="launch/quickstart.sh",
    about="Retrains a model of generated clicks several times: independently, "
    "with its own\npast as a teacher, and in two groups that teach each other. "
    "Prints how far the\npredictions of two retrains differ, and log loss. "
    "Earlier runs are kept.",
    define=_add_options,
    run=run,
    needs=("matplotlib", "scipy"),
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
