"""Trains two groups apart, then codistilled, and sets the two side by side.

bash launch/quickstart.sh
"""

import argparse
import os
import pathlib
import shlex
import sys
import time
from collections.abc import Sequence

import rich.console

from launch import local
from launch import recipes
from launch import report

_PROG = "launch/quickstart.sh"
_ROOT = pathlib.Path(__file__).resolve().parent.parent
_EXIT_OPTIONS, _EXIT_INTERRUPTED = 2, 130
# The same in all but this one field.
METHODS = {
    "independent": "codistillation.enabled=false",
    "codistilled": "codistillation.enabled=true",
}
PLOT = "comparison.png"


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Trains two groups of workers on handwritten digits, each "
        "on its own half of the data: first apart, then codistilled, with the "
        "same seeds and steps. Prints a table. Earlier runs are kept.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--workdir",
        metavar="DIR",
        default=str(_ROOT / "runs" / "quickstart"),
        help="in it a numbered directory is made; default runs/quickstart",
    )
    add("--recipe", metavar="NAME", default="digits", help="default digits")
    add("--num_groups", type=int, metavar="N", default=2, help="default 2")
    add(
        "--workers_per_group",
        type=int,
        metavar="N",
        default=2,
        help="default 2",
    )
    add(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field of the recipe for both runs, such as seed=1; "
        "may be repeated",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    options = parser.parse_args(argv)
    try:  # Both runs' options, before the first of them starts.
        for field in METHODS.values():
            changes = [*options.override, field]
            config = recipes.override(recipes.get(options.recipe), changes)
            config.check_num_groups(options.num_groups)
        directory = _new_directory(pathlib.Path(options.workdir))
    except ValueError as error:
        parser.error(str(error))
    # What TensorFlow says at its start belongs to nobody's question here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        return _compare(options, directory)
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED


def _compare(options: argparse.Namespace, directory: pathlib.Path) -> int:
    start = time.monotonic()
    for number, (name, field) in enumerate(METHODS.items(), start=1):
        print(f"\n== {number} of {len(METHODS)}: {name}", flush=True)
        code = local.main(
            [
                f"--num_groups={options.num_groups}",
                f"--workers_per_group={options.workers_per_group}",
                f"--workdir={directory / name}",
                f"--recipe={options.recipe}",
                *(f"--override={change}" for change in options.override),
                f"--override={field}",
            ]
        )
        if code:
            print(
                f"quickstart: the {name} run ended with exit code {code}; "
                f"its logs are in {directory / name / 'logs'}",
                file=sys.stderr,
            )
            return code
    runs = [report.Run.read(name, directory / name) for name in METHODS]
    report.plot(runs, directory / PLOT)
    _tell(runs, directory, secs=time.monotonic() - start)
    return 0


def _new_directory(parent: pathlib.Path) -> pathlib.Path:
    """Makes the directory with the next number; earlier ones are kept.

    Raises:
        ValueError: If it cannot be made.
    """
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


def _tell(
    runs: Sequence[report.Run], directory: pathlib.Path, *, secs: float
) -> None:
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
    console.print(report.table(runs), highlight=False)
    program = pathlib.Path(sys.executable).with_name("tensorboard")
    exports = " ".join(
        str(path.relative_to(directory)) for path in last_exports(runs)
    )
    # Not through rich, which would break long paths in two.
    print(f"results      {directory}")
    print(f"plot         {directory / PLOT}")
    print(f"TensorBoard  {_shown(program)} --logdir {_shown(directory)}")
    print(f"SavedModels  {exports}")
    print("Keras files  {run}/group_{g}/student.keras")
    if len(runs) == 2 and first.agreement:
        print(_conclusion(*runs))


def _shown(path: pathlib.Path) -> str:
    return shlex.quote(str(path))


def last_exports(runs: Sequence[report.Run]) -> list[pathlib.Path]:
    """Returns the SavedModel that each group of each run published last."""
    found = []
    for run in runs:
        for group in run.results["groups"]:
            versions = run.workdir / "exchange" / f"group_{group['group']}"
            found.append(versions / str(group["steps"]))
    return found


def _conclusion(independent: report.Run, codistilled: report.Run) -> str:
    before = independent.agreement["disagreement"]
    after = codistilled.agreement["disagreement"]
    return (
        f"\nThe groups disagree on {100 * after:.1f}% of the validation "
        f"images when codistilled, on {100 * before:.1f}% when trained apart."
    )


if __name__ == "__main__":
    sys.exit(main())
