"""Hands a version of a run over to TensorFlow Serving.

tfdistill promote RUN --group=0 --to=DIR

The server watches DIR for subdirectories whose names are numbers, and loads
the largest. A version is therefore copied and checked under a name that isn't a
number, and gets its number by one rename, together with a model card.
"""

import os
import pathlib

from absl import logging

from tfdistill.exchange import versions
from tfdistill.exports import promotion
from tfdistill.status import directory
from tfdistill.system import programs

_NOTES = """\
DIR is the model_base_path of tensorflow_model_server. If DIR already has
another model with that version number, nothing is copied. docs/serving.md
describes the checks and the model card.

Exit code: 0 if DIR has the version, 1 if the version was refused or could not
be copied, 2 for wrong options.
"""


def _add_options(options: programs.Program) -> None:
    options.add_argument("run", help="workdir of the run")
    add = options.add
    add("to", "<DIR>: directory of the served model", required=True)
    add("group", "group whose student is served", 0)
    add("step", "step of the version; default: the newest", kind=int)
    add(
        "version_number",
        "version number on the server; default: the step",
        kind=int,
    )
    add(
        "exchange",
        "<DIR>: directory or URL of the exchange; default: the run's exchange",
    )
    add(
        "trust_graph",
        "load a graph even if it is neither signed nor known to be safe",
        False,
    )


def _place(options: programs.Options) -> str | None:
    """Returns where the run's exchange is, if not in the run."""
    run = pathlib.Path(options.run)
    if options.exchange or (run / "exchange").exists():
        return options.exchange
    record = directory.read_record(run / directory.RECORD)
    return record["topology"]["exchange"] if record else None


def _target(
    options: programs.Options, version: versions.Version
) -> pathlib.Path:
    number = options.version_number
    number = version.step if number is None else number
    if number < 0 or "://" in options.to:
        raise ValueError(
            "`version_number` must be >= 0 and `to` a local or mounted "
            f"directory; received {number} and {options.to!r}."
        )
    target = pathlib.Path(os.path.abspath(options.to), str(number))
    names = os.listdir(target.parent) if target.parent.is_dir() else []
    higher = max((int(n) for n in names if n.isdigit()), default=number)
    if higher > number:
        logging.warning(
            "%s has version %s, which is higher: unless its version policy "
            "says otherwise, a server keeps serving that one.",
            target.parent,
            higher,
        )
    return target


def _run(options: programs.Options) -> int:
    missing = versions.VersionNotFoundError
    with programs.usage_errors(OSError, ValueError, missing):
        exchange, version = promotion.choose(
            options.run,
            group=options.group,
            step=options.step,
            place=_place(options),
        )
        target = _target(options, version)
        run, name = pathlib.Path(options.run), target.parent.name
        card = promotion.card_text(run, version, name=name)
    is_new = promotion.promote(
        exchange,
        version,
        str(target),
        card=card,
        trust_graph=options.trust_graph,
    )
    print(f"{target}" + ("" if is_new else " (already there)"))
    return 0


PROGRAM = programs.Program(
    name="tfdistill promote",
    usage="RUN --to=DIR [--group=N] [--step=N] [options]",
    about="Copies a version of a run to TensorFlow Serving.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    reports=promotion.ERRORS,
)
main = PROGRAM.main
