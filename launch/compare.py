"""Does codistillation help this model? Runs it against its controls.

python -m launch.compare --recipe=digits --methods=independent,codistill \
    --trials=6 --workdir=DIR

The same command goes on where it was stopped, and takes more methods and
trials into the same report.
"""

import argparse
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any

from launch import recipes
from launch.comparison import bootstrap
from launch.comparison import collect
from launch.comparison import experiment
from launch.comparison import methods

_PROG = "python -m launch.compare"
_METHODS = "independent,codistill"
EXIT_FAILURE, EXIT_OPTIONS, EXIT_INTERRUPTED = 1, 2, 130


def _make_parser() -> argparse.ArgumentParser:
    width = max(map(len, methods.METHODS))
    lines = [
        f"  {name:{width}}  {method.describe}"
        for name, method in methods.METHODS.items()
    ]
    swept = ", ".join([*methods.ALIASES, methods.NUM_GROUPS])
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Trains a recipe by several methods, each several times "
        "with other seeds, and reports quality, steps to a target, churn and "
        "cost in report.md, report.json and plots.",
        epilog="methods:\n"
        + "\n".join(lines)
        + f"\n\nsweeps by name: {swept}; or any field of the recipe",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_what(parser)
    _add_how(parser)
    return parser


def _add_what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--recipe",
        metavar="NAME",
        required=True,
        help="a recipe, or the config.json of an earlier run",
    )
    add("--workdir", metavar="DIR", required=True, help="where everything goes")
    add(
        "--methods",
        metavar="NAME,...",
        help=f"default {_METHODS}",
    )
    add(
        "--sweep",
        action="append",
        default=[],
        metavar="[METHOD:]FIELD=V,V,...",
        help="a method (default codistill) once for each value of a field, "
        "such as exchange_interval=50,250,1000; may be repeated",
    )
    add(
        "--trials",
        type=int,
        default=bootstrap.LEAST_TRIALS,
        metavar="N",
        help="retrains of each method, with other seeds; default "
        f"{bootstrap.LEAST_TRIALS}, the least from which a verdict is made",
    )
    add(
        "--override",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change one field of the recipe for all methods; may be repeated",
    )
    add(
        "--target",
        default="final",
        metavar="LOSS",
        help="validation log loss that steps are counted to: a number, or the "
        "mean final (default) or best of independent",
    )


# Field of `methods.Setup` to what it is.
_SETUP = {
    "num_groups": "groups of a codistilled run",
    "workers_per_group": "workers in each group",
    "ps_per_group": "parameter servers in each group",
    "ensemble_size": "members of an ensemble",
    "learning_rate_scale": "of large_group, whose batches are larger",
    "smoothing_weight": "of the smoothed methods, in (0, 1)",
}


def _add_how(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, text in _SETUP.items():
        value = getattr(methods.Setup, name)
        add(
            f"--{name}",
            type=type(value),
            default=value,
            metavar="N" if isinstance(value, int) else "X",
            help=f"{text}; default {value}",
        )
    add(
        "--budget",
        choices=methods.BUDGETS,
        default="per_group",
        help="per_group (default): each group takes the recipe's steps, so "
        "methods of several groups train on more examples in all; total: all "
        "methods train on as many examples in all as independent does",
    )
    add(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="runs at a time; default 1. More of them distort wall times",
    )
    add(
        "--report_only",
        action="store_true",
        help="train nothing; report what is done",
    )


def _setup(options: argparse.Namespace) -> methods.Setup:
    config = recipes.override(recipes.get(options.recipe), options.override)
    for name in ("trials", "jobs"):
        if getattr(options, name) < 1:
            raise ValueError(
                f"--{name} must be >= 1; received {getattr(options, name)}."
            )
    collect.check(options.target)
    return methods.Setup(
        config=config,
        budget=options.budget,
        **{name: getattr(options, name) for name in _SETUP},
    )


def _variants(options: argparse.Namespace) -> list[methods.Variant]:
    named: list[methods.Variant] = []
    # A report alone adds no method that was not asked for.
    if options.methods is not None:
        named = methods.parse_methods(options.methods)
    elif not options.report_only:
        named = methods.parse_methods(_METHODS)
    swept = [v for text in options.sweep for v in methods.parse_sweep(text)]
    return methods.unique([*named, *swept])


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code: 0 if all runs are done and reported, 1 if some failed.
    """
    parser = _make_parser()
    options = parser.parse_args(argv)
    try:
        compared = experiment.Experiment(
            pathlib.Path(options.workdir).absolute(),
            setup=_setup(options),
            variants=_variants(options),
            num_trials=0 if options.report_only else options.trials,
        )
    except (OSError, ValueError) as error:
        parser.error(str(error))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    failures: dict[str, str] = {}
    earlier = signal.signal(signal.SIGTERM, _interrupt)
    try:
        if not options.report_only:
            failures = compared.run(options.jobs, say=_say)
        report = compared.report(options.target, failures, jobs=options.jobs)
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on from here")
        return EXIT_INTERRUPTED
    except (OSError, ValueError) as error:
        _say(f"error: {error}")
        return EXIT_FAILURE
    finally:
        signal.signal(signal.SIGTERM, earlier)
    _tell(report, compared.workdir)
    return EXIT_FAILURE if failures else 0


def _tell(report: dict[str, Any], workdir: pathlib.Path) -> None:
    for note in report["notes"]:
        _say(f"note: {note}")
    for method in report["methods"].values():
        if "verdict" in method:
            print(method["verdict"])
    print(f"report  {workdir / experiment.MARKDOWN}")


def _say(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
