"""Hands a version of a run over to TensorFlow Serving.

python -m launch.promote RUN --group=0 --to=DIR

Copies it to DIR/<number>/, checks every byte and its answers, and writes a
model card. The server sees the version once it is complete.
"""

import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from absl import logging

from launch.serving import card
from launch.serving import handover
from tfdistill.exchange import versions
from tfdistill.status import directory
from tfdistill.system import programs

EXIT_REFUSED = 1
_NOTES = """\
DIR is the model_base_path of tensorflow_model_server. Nothing is copied if the
number is taken, unless by the same version. docs/guide_serving.md describes
the checks, the model card and signatures.
Exit codes: 0 done, 1 the version was refused or could not be copied, 2 wrong
options.
"""


def _add_options(options: programs.Flags) -> None:
    add = options.add
    add("to", "<DIR>: directory of the served model", required=True)
    add("group", "group whose student is served", 0)
    for name, text in (
        ("step", "step of the version; default the newest"),
        ("version_number", "number for the server; default the step"),
    ):
        add(name, text, kind=int)
    for name, text in (
        (
            "exchange",
            "<DIR>: exchange of the run, or its URL; default the one "
            "in RUN, or that of its launch",
        ),
        (
            "examples",
            "<FILE>: .npz of inputs by name, to compare the answers; "
            "default made-up ones",
        ),
        ("notes", "<FILE>: Markdown for the model card, such as intended use"),
        ("sign_key", "<FILE>: private key (PEM) for OpenSSF model-signing"),
    ):
        add(name, text)
    add(
        "trust_graph", "load a graph that is neither signed nor harmless", False
    )


def _exchange(run: pathlib.Path, given: str | None) -> str:
    own = run / "exchange"
    if given or own.exists():
        return given or str(own)
    record = directory.read_record(run / directory.RECORD)
    return (record and record.exchange) or str(own)


def _examples(path: str | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    import numpy as np

    with np.load(path, allow_pickle=False) as found:
        return dict(found)


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
    higher = [name for name in names if name.isdigit() and int(name) > number]
    if higher:
        logging.warning(
            "%s has version %s, which is higher: unless its version policy "
            "says otherwise, a server keeps serving that one.",
            target.parent,
            max(higher, key=int),
        )
    return target


def _run(options: programs.Options) -> int:
    run = pathlib.Path(options.run)
    try:
        exchange = handover.open_exchange(run, _exchange(run, options.exchange))
        version = handover.choose(exchange, options.group, options.step)
        target = _target(options, version)
        record = card.read(run, options.group)
        examples = _examples(options.examples)
        notes = ""
        if options.notes is not None:
            notes = pathlib.Path(options.notes).read_text("utf-8")
        sign = options.sign_key and handover.signer(options.sign_key)
    except (ValueError, OSError, versions.VersionNotFoundError) as error:
        raise programs.UsageError(str(error)) from error
    except versions.CorruptVersionError as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    try:
        is_new = handover.promote(
            exchange,
            version,
            target,
            trust_graph=options.trust_graph,
            examples=examples,
            card=functools.partial(
                card.text, target.parent.name, version, record, notes=notes
            ),
            sign=sign or None,
        )
    except (
        handover.RefusedError,
        versions.CorruptVersionError,
        versions.VersionNotFoundError,
        OSError,
    ) as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    print(f"{target}" + ("" if is_new else " (already there)"))
    return 0


PROGRAM = programs.Program(
    name="python -m launch.promote",
    usage="RUN --to=DIR [--group=N] [--step=N] [options]",
    about="Hands a version of a run over to TensorFlow Serving.",
    notes=_NOTES,
    words=("run",),
    define=_add_options,
    run=_run,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
