"""The command `tfdistill line`: a served model that is retrained again.

`commands.main` makes programs of what is listed here.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

from absl import app

from tfdistill.contrib.line import status
from tfdistill.contrib.line import store
from tfdistill.recipes import recipes
from tfdistill.system import untrusted

ABOUT = "Retrains a served model on new data, again and again."
NOTES = """\
example:
  tfdistill line init /models/clicks my_workload.py
  tfdistill line retrain /models/clicks --span=day_07
  tfdistill line judge /models/clicks
  tfdistill line promote /models/clicks
"""
_WHY = "<TEXT>: reason for the log"
EXITS = {"promote": 0, "hold": 3, "worse": 3, "roll back": 4}
_NOTES = """\
A command that was killed can be run again: it completes the work that it began.

Exit code: 0 if it is done, now or by an earlier call; 1 if it was refused or
failed; 2 for wrong options; 130 after Ctrl-C{more}.
"""


_Run = Callable[[argparse.Namespace], int]


class Command(NamedTuple):
    """A command: what it does, its options, and what `--help` says."""

    about: str
    usage: str
    notes: str
    # Adds the options to a parser, by `add_argument` and `add`.
    define: Callable[[Any], None]
    # Returns the exit code. An `app.UsageError` is about the options.
    run: _Run
    # Packages of an extra, without which it doesn't begin.
    needs: Sequence[str] = ()


COMMANDS: dict[str, Command] = {}


def _command(
    about: str,
    define: Callable[[Any], None] = lambda flags: None,
    *,
    exits: str = "",
    needs: Sequence[str] = (),
) -> Callable[[_Run], _Run]:
    """Makes a function the command of its name."""

    def add(run: _Run) -> _Run:
        name = run.__name__[1:]

        def define_all(flags: Any) -> None:
            flags.add_argument("place", metavar="DIR")
            flags.add_argument("file", nargs="?", metavar="my_workload.py")
            define(flags)
            if name != "init":
                flags.add(
                    "workdir",
                    "<DIR>: local directory for candidates, if the line is in "
                    "an object store",
                )

        file = "my_workload.py" if name == "init" else "[my_workload.py]"
        COMMANDS[name] = Command(
            about=about,
            usage=f"DIR {file} [options]",
            notes=_NOTES.format(more=exits),
            define=define_all,
            run=run,
            needs=needs,
        )
        return run

    return add


def _open(options: argparse.Namespace) -> store.Line:
    """Returns the line; a UsageError if it is of another recipe."""
    try:
        line = store.Line(options.place, workdir=options.workdir)
        own = line.journal.settings()["workload"]
        if options.file and recipes.place(options.file) != own:
            raise ValueError(
                f"{line.root} is a line of {own}; received {options.file}. "
                "Leave the file out, or create another line for it."
            )
    except (ValueError, OSError) as error:
        raise app.UsageError(str(error)) from error
    return line


def _init_options(flags: Any) -> None:
    flags.add(
        "name", "<NAME>: name of the served model; default: the name of DIR"
    )
    recipes.add_override(flags, "the recipe")
    flags.add("served_from", "<DIR>: path of DIR/versions on the server")


@_command("create a line in a directory or bucket", _init_options)
def _init(options: argparse.Namespace) -> int:
    from tfdistill.contrib.line import settings

    try:
        own = recipes.get(options.file or "")
        recipes.override(own, options.override)  # They are known, and fit.
        settings.check_takes_spans(own)
        line = store.Line.init(
            options.place,
            workload=recipes.place(options.file),
            overrides=recipes.values(options.override),
            name=options.name,
            served_from=options.served_from,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    print(
        f"{line.root}\nServe it by: tensorflow_model_server "
        f"--model_config_file={line.root}/{store.POINTER} "
        "--model_config_file_poll_wait_seconds=1"
    )
    return 0


def _retrain_options(flags: Any) -> None:
    add = flags.add
    add("span", "<NAME>: new data to train on", required=True)
    add("again", "train another candidate on the same span", False)
    add("replay", "number of earlier spans to train on again", 0)
    recipes.add_override(flags, "the recipe")
    add("num_groups", "groups that teach each other", 1)
    add("workers_per_group", "workers in each group", 1)
    add("ps_per_group", "parameter servers in each group", 0)
    add("own_past", "learn from its own past, too", False)
    add(
        "new_weights",
        "start from new weights, possibly of another architecture, and "
        "learn from the promoted version's predictions only",
        False,
    )
    add(
        "controls",
        "also train the controls that the report compares it with",
        False,
    )


@_command(
    "train a candidate on new data, from the promoted version",
    _retrain_options,
)
def _retrain(options: argparse.Namespace) -> int:
    line = _open(options)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tfdistill.contrib.line import retrain

    began = time.time()
    same = ("span", "replay", "again", "controls")
    shape = ("num_groups", "workers_per_group", "ps_per_group")
    number = retrain.run(
        line,
        warm_start=not options.new_weights,
        with_own_past=options.own_past,
        overrides=recipes.values(options.override),
        **{name: getattr(options, name) for name in (*same, *shape)},
    )
    is_old = line.lineage(number)["trained"] < began
    hint = f" (already trained on {options.span}; see --again)"
    print(line.candidate_path(number) + hint * is_old)
    return 0


def _newest(line: store.Line, number: int | None) -> int:
    """Returns a number, or the newest candidate's number."""
    if number is None:
        begun = line.journal.events("retrain")
        if not begun:
            raise ValueError(
                f"{line.root} has no candidate. Train one: tfdistill line "
                f"retrain {line.root} --span=NAME"
            )
        number = begun[-1]["number"]
    return number


def _judge_options(flags: Any) -> None:
    flags.add("number", "candidate; default: the newest", kind=int)


@_command(
    "compare the newest candidate with the promoted version",
    _judge_options,
    exits="; 3 if the verdict is to hold it",
    needs=("matplotlib", "scipy"),
)
def _judge(options: argparse.Namespace) -> int:
    line = _open(options)
    number = _newest(line, options.number)
    with line.locked("judge"):
        lineage = line.lineage(number)  # It is trained to its end.
        from tfdistill.contrib.line import gate

        report = gate.judge(line, number)
        line.journal.note(
            "judge",
            number=number,
            against=line.promoted(),
            verdict=report["verdict"],
            reasons=report["reasons"],
            figures=status.figures(report, lineage),
            # Live examples are compared with this.
            expected=report["expected"],
        )
        status.write_points(line, number, "candidates")
    print(f"{line.candidate_path(number)}/report.md")
    return _verdict(report["verdict"], report["reasons"])


def _verdict(verdict: str, reasons: list[str]) -> int:
    """Prints a verdict, and returns its exit code."""
    texts = [untrusted.one_line(why, max_chars=2000) for why in reasons]
    print("\n  ".join([f"{verdict}:", *texts]))
    return EXITS[verdict]


def _reasons(line: store.Line, number: int) -> str:
    """Returns why a candidate may be promoted; RefusedError if it may not."""
    judged = [e for e in line.journal.events("judge") if e["number"] == number]
    newest = judged[-1] if judged else {}
    said = " ".join(newest.get("reasons", []))
    if newest.get("verdict") != "promote":
        verdict = f"was held: {said}" if newest else "was not judged."
        raise store.RefusedError(
            f"Candidate {number} {verdict} Run tfdistill line judge "
            f"{line.root}, or promote it anyway: --force."
        )
    return said


def _promote_options(flags: Any) -> None:
    _judge_options(flags)
    flags.add("why", _WHY)
    flags.add("force", "promote it even if it was held or rolled back", False)


@_command(
    "make the newest candidate the version that is served", _promote_options
)
def _promote(options: argparse.Namespace) -> int:
    line = _open(options)
    number = _newest(line, options.number)
    with line.locked("promote"):
        is_new = number != line.promoted()
        if is_new:
            from tfdistill.contrib.line import retrain

            why = "forced" if options.force else _reasons(line, number)
            source, extra = retrain.files_of(line, number)
            line.promote(
                number,
                source,
                why=options.why or why,
                extra=extra,
                force=options.force,
            )
        status.write_points(line, number, "promoted")
    print(line.version_path(number) + " (already promoted)" * (not is_new))
    return 0


def _rollback_options(flags: Any) -> None:
    text = "an earlier promoted version; default: the previous one"
    flags.add("to", text, kind=int)
    flags.add("why", _WHY)


@_command(
    "undo the last promotion and serve the previous version",
    _rollback_options,
)
def _rollback(options: argparse.Namespace) -> int:
    line = _open(options)
    is_new = line.rollback(options.to, why=options.why or "")
    now = line.journal.pointer()
    hint = f" (already, by `{now['what']}` at {status.moment(now)}; see --to)"
    print(line.version_path(now["version"]) + hint * (not is_new))
    return 0


def _report_options(flags: Any) -> None:
    add = flags.add
    add("version", "version that was served", kind=int, required=True)
    add(
        "log_loss",
        "the version's mean live log loss",
        kind=float,
        required=True,
    )
    add(
        "examples",
        "number of live examples in that mean",
        kind=int,
        required=True,
    )
    add(
        "since",
        "<TEXT>: start of these examples; a repeated report is noted once",
    )
    add("dry_run", "print the verdict, change nothing", False)


@_command(
    "note a version's live loss, and roll back if it is worse",
    _report_options,
    exits="; 3 if it is worse and no version was promoted before it; 4 if it "
    "is or was rolled back",
)
def _report(options: argparse.Namespace) -> int:
    line = _open(options)
    from tfdistill.contrib.line import gate

    if options.examples < 1:
        raise ValueError(
            f"`examples` must be >= 1; received {options.examples}."
        )
    pointer, gone = line.journal.pointer(), line.journal.events("rollback")
    undone = [number for event in gone for number in event["undone"]]
    served = pointer.get("version") or 0
    if options.version not in (*pointer.get("before", []), served, *undone):
        raise ValueError(
            "`version` must be a version that was promoted; received "
            f"{options.version}. See tfdistill line status {line.root}."
        )
    names = ("version", "log_loss", "examples", "since")
    said = {name: getattr(options, name) for name in names}
    known = [{n: e[n] for n in names} for e in line.journal.events("report")]
    is_noted = options.since and said in known
    if not is_noted and not options.dry_run:
        line.journal.note("report", **said)
        is_noted = True
    if options.version in undone and options.version > served:
        print(f"{served} is promoted; {options.version} was rolled back")
        return EXITS["roll back"]
    more = [] if is_noted else [said]
    verdict, reasons = gate.live_verdict(line, more=more)
    code = _verdict(verdict, reasons)
    if code != EXITS["roll back"]:
        # A version that is held is in its canary period.
        return 0 if verdict == gate.HOLD else code
    if not options.dry_run:
        line.rollback(
            pointer.get("previous"), why=" ".join(reasons), only=served
        )
        print(line.version_path(line.promoted() or 0))
    return code


def _log_options(flags: Any) -> None:
    flags.add("json", "print one JSON object per line", False)


@_command("print what happened, oldest first", _log_options)
def _log(options: argparse.Namespace) -> int:
    for event in _open(options).journal.events():
        print(json.dumps(event) if options.json else status.event_line(event))
    return 0


@_command("show candidates over time, and what is promoted")
def _status(options: argparse.Namespace) -> int:
    status.show(_open(options))
    return 0
