"""Injects faults into a run of launch.local and checks that it holds out.

python -m benchmarks.punish --workdir=DIR --seed=0 --minutes=30

The run must be at work, with --max_restarts and --on_group_failure=continue.
"""

import json
import signal
import sys

from benchmarks import measure
from benchmarks.punish import faults
from benchmarks.punish import round
from benchmarks.punish import run_view
from tfdistill.commands import recipe_options
from tfdistill.system import programs

EXIT_VIOLATED = 1


def _notes() -> str:
    described = {name: text for name, (_, text) in faults.FAULTS.items()}
    return (
        recipe_options.listing("faults", described)
        + "\n\nWrites each fault to DIR/punish/log.jsonl, and the report to "
        "report.json beside\nit; prints the report as one line of JSON. Exit "
        "code: 0; 1 if a check failed; 2\nfor wrong options or if no run is "
        "active."
    )


def _add_options(options: programs.Flags) -> None:
    add = options.add
    add("workdir", "<DIR>: directory of the run", required=True)
    add(
        "faults",
        "<NAME,...>: kinds of faults; default: all",
        ",".join(faults.FAULTS),
    )
    add("seed", "the same seed gives the same faults", 0)
    for name, default, text, quick in (
        ("minutes", 5.0, "length of the time with faults", 1.0),
        ("mtbf_secs", 30.0, "mean time between two faults", 15.0),
    ):
        add(name, text, default, kind=programs.positive, quick=quick)


def _options(parsed: programs.Options) -> round.Options:
    names = parsed.faults.split(",")
    unknown = sorted(set(names) - set(faults.FAULTS))
    if unknown:
        raise programs.UsageError(
            f"--faults must be some of {', '.join(faults.FAULTS)}; "
            f"received {', '.join(unknown)}"
        )
    return round.Options(
        faults=names,
        seed=parsed.seed,
        minutes=parsed.minutes,
        mtbf_secs=parsed.mtbf_secs,
    )


def _run(parsed: programs.Options) -> int:
    options = _options(parsed)
    if not sys.platform.startswith("linux"):
        raise programs.UsageError("faults are injected on Linux only")
    try:
        view = run_view.RunView(parsed.workdir)
        report = round.Round(view, options, measure.log).run()
    except run_view.NoRunError as error:
        raise programs.UsageError(str(error)) from error
    print(json.dumps(report), flush=True)
    for violation in report["violations"]:
        measure.log(f"VIOLATED: {violation}")
    return EXIT_VIOLATED if report["violations"] else 0


PROGRAM = programs.Program(
    name="python -m benchmarks.punish",
    about="Injects random faults into a run of launch.local on this machine. "
    "Throughout, it checks that versions are complete and never go backwards, "
    "that teachers are complete versions, that losses are finite, that groups "
    "recover while others continue, and that no process is left behind.",
    notes=_notes(),
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    # A closed pipe must not end a round half way with a task still frozen.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    PROGRAM.start()
