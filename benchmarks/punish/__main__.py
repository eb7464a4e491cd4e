"""Injects faults into a run of launch.local and checks that it holds out.

python -m benchmarks.punish --workdir=DIR --seed=0 --minutes=30

The run must be at work, with --max_restarts and --on_group_failure=continue.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from benchmarks.punish import faults
from benchmarks.punish import round
from benchmarks.punish import run_view

_PROG = "python -m benchmarks.punish"
EXIT_VIOLATED, EXIT_OPTIONS = 1, 2


def _make_parser() -> argparse.ArgumentParser:
    lines = [f"  {name:10} {text}" for name, (_, text) in faults.FAULTS.items()]
    parser = argparse.ArgumentParser(
        prog=_PROG,
        description="Injects random faults into a run of launch.local on this "
        "machine and checks all along what must hold: versions are whole and "
        "never go backwards, teachers are versions that were whole, losses "
        "are finite, groups come back, others go on, nothing is left behind.",
        epilog="faults:\n" + "\n".join(lines) + "\n\nwrites DIR/punish: "
        "log.jsonl with each fault, report.json; prints the report as one "
        "line of JSON. Exit code: 0, or 1 where something did not hold, or 2 "
        "for wrong options or where no run is at work.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="of the run")
    add(
        "--faults",
        default=",".join(faults.FAULTS),
        metavar="NAME,...",
        help="default: all",
    )
    for name, kind, default, text in (
        ("--seed", int, 0, "the same seed gives the same faults"),
        ("--minutes", float, 5.0, "length of the time with faults"),
        ("--every_secs", float, 30.0, "mean time between two faults"),
        ("--calm_secs", float, 20.0, "time before, to measure the paces"),
    ):
        add(name, type=kind, default=default, help=f"{text}; default {default}")
    return parser


def _options(
    parser: argparse.ArgumentParser, parsed: argparse.Namespace
) -> round.Options:
    names = parsed.faults.split(",")
    unknown = sorted(set(names) - set(faults.FAULTS))
    if unknown:
        parser.error(
            f"--faults must be some of {', '.join(faults.FAULTS)}; "
            f"received {', '.join(unknown)}"
        )
    for name in ("minutes", "every_secs", "calm_secs"):
        if not 0 < getattr(parsed, name) < float("inf"):
            parser.error(
                f"--{name} must be > 0; received {getattr(parsed, name):g}"
            )
    return round.Options(
        faults=names,
        seed=parsed.seed,
        minutes=parsed.minutes,
        every_secs=parsed.every_secs,
        calm_secs=parsed.calm_secs,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    parsed = parser.parse_args(argv)
    options = _options(parser, parsed)
    if not sys.platform.startswith("linux"):
        parser.error("faults are injected on Linux only: it reads /proc")
    try:
        view = run_view.RunView(parsed.workdir)
        report = round.Round(view, options, _say).run()
    except run_view.NoRunError as error:
        parser.error(str(error))
    print(json.dumps(report), flush=True)
    for violation in report["violations"]:
        _say(f"VIOLATED: {violation}")
    return EXIT_VIOLATED if report["violations"] else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # A closed pipe must not end a round half way with a task still frozen.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(main())
