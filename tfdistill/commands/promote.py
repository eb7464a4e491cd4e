"""Hands a version of a run over to TensorFlow Serving.

tfdistill promote RUN --group=0 --to=DIR

The server watches DIR for subdirectories whose names are numbers, and loads
the largest. A version is therefore copied and checked under a name that is no
number, and gets its number by one rename, together with a model card.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import tempfile
import textwrap
from typing import Any

from absl import logging

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.recipes import outputs
from tfdistill.status import directory
from tfdistill.system import programs
from tfdistill.system import run_files
from tfdistill.system import untrusted

EXIT_REFUSED = 1
CARD = "README.md"
_MAX_BYTES = 16 * 1024 * 1024
_DISK = filesystem.LocalFileSystem()
_NOTES = """\
DIR is the model_base_path of tensorflow_model_server. If the version number
already exists there with another model, nothing is copied. docs/serving.md
describes the checks and the model card.

Exit code: 0 if DIR has the version, 1 if the version was refused or could not
be copied, 2 for wrong options.
"""


class RefusedError(RuntimeError):
    """A version that must not be served, and why."""


def _add_options(options: programs.Flags) -> None:
    options.add_argument("run")
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
        "<DIR>: directory or URL of the exchange; default: that of the run",
    )
    add(
        "trust_graph",
        "load a graph that is neither signed nor known to be safe",
        False,
    )


def _choose(
    options: programs.Options,
) -> tuple[publisher.Exchange, versions.Version]:
    """Returns the version, and a reader with the run's key, if it has one.

    That is the environment's, or what `tfdistill run` left in the run.
    """
    run = pathlib.Path(options.run)
    own, path = run / "exchange", run / run_files.KEY
    place = options.exchange
    if not place and not own.exists():
        record = directory.read_record(run / directory.RECORD)
        place = record["topology"]["exchange"] if record else None
    key: signing.KeyOption = "environment"
    if not signing.has_key(os.environ) and path.exists():
        key = path.read_bytes().strip()
    exchange = publisher.Exchange(place or str(own), key=key)
    if options.step is not None:
        return exchange, exchange.open(options.group, options.step)
    newest = exchange.latest(options.group)
    if newest is None:
        raise ValueError(
            f"There is no version in {exchange.group_path(options.group)} that "
            "this process can read. Check the run, --group and --exchange."
        )
    return exchange, newest


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


def promote(
    exchange: publisher.Exchange,
    version: versions.Version,
    target: pathlib.Path,
    *,
    card: str,
    trust_graph: bool = False,
) -> bool:
    """Copies a version to `target`, which appears with all that is in it.

    Returns False if it was there already.

    Raises:
        RefusedError: If it must not be served, or another is in its place.
        CorruptVersionError: If a file differs from the manifest.
        OSError: If the storage or the disk fails.
    """
    is_signed = signing.is_signed(version.manifest)
    if is_signed and exchange.signer is None:
        raise RefusedError(
            f"{version.path} is signed, and this process has no key to check "
            f"it with. Set {signing.FILE_VARIABLE} to the file of the run's "
            "key."
        )
    if target.exists():
        there = dataclasses.replace(version, path=str(target))
        try:
            versions.check_content(_DISK, there)
        except (versions.CorruptVersionError, OSError) as error:
            raise RefusedError(
                f"{target} must be absent, or the same version as "
                f"{version.path}: {error} A server may have loaded it. Choose "
                "another --version-number, or remove it."
            ) from error
        return False
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = tempfile.mkdtemp(prefix=".promoting-", dir=target.parent)
    try:
        copy = pathlib.Path(aside, target.name)
        copy.mkdir()
        exchange.fetch(version, str(copy))
        if not is_signed and not trust_graph:
            _check_graph(copy)
        # The exchange's own file, so that the copy can be checked again.
        text = version.manifest.to_json().encode()
        (copy / manifest.FILE_NAME).write_bytes(text)
        (copy / CARD).write_text(card, "utf-8")
        for path in [*copy.rglob("*"), copy]:
            _DISK.sync(str(path))
        copy.rename(target)
        _DISK.sync(str(target.parent))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def _check_graph(copy: pathlib.Path) -> None:
    """Checks what nobody has signed before any of it runs."""
    from tfdistill.exports import graph_check

    try:
        graph_check.check_directory(str(copy))
    except ValueError as error:
        raise RefusedError(
            f"The version has no signature, and {error} If you trust it as "
            "you would trust a program, pass --trust-graph."
        ) from error


def card_text(
    run: pathlib.Path, version: versions.Version, *, name: str
) -> str:
    """Returns the model card: what the version and its run say, as they do."""
    found = version.manifest
    created = datetime.datetime.fromtimestamp(found.created, datetime.UTC)
    signed = "the run's key has signed its manifest"
    if not signing.is_signed(found):
        signed = "the run signs nothing: anybody who could write to its "
        signed += "exchange may have made it"
    group = outputs.group_dir(run, version.group)
    log = untrusted.Tail(group / run_files.METRICS, last_bytes=_MAX_BYTES)
    records = [
        one
        for one in log.read()
        if isinstance(one.get("step"), int) and one["step"] <= version.step
    ]
    sections = {
        "Inputs": found.inputs,
        "Outputs": found.outputs,
        "Libraries": found.libraries,
        "Last record up to this step": records[-1:] and records[-1],
        "Results of the training": _json_object(group / outputs.RESULTS),
        "Configuration": _json_object(run / outputs.CONFIG),
    }
    parts = [
        f"# {untrusted.one_line(name)}\n",
        f"A student of group {version.group} after {version.step} steps, "
        f"published at {created:%Y-%m-%d %H:%M} UTC and trained with "
        f"tfdistill. Its {len(found.files)} files agree with the SHA-256 "
        f"checksums of `manifest.json`, and {signed}.\n",
    ]
    for title, said in sections.items():
        if said:
            # Indented: no text in it can end the block.
            block = textwrap.indent(json.dumps(said, indent=1), " " * 4)
            parts.append(f"## {title}\n\n{block}\n")
    return "\n".join(parts)


def _json_object(path: pathlib.Path) -> Any:
    try:
        return untrusted.json_object(path.read_bytes())
    except OSError:
        return None


def _run(options: programs.Options) -> int:
    try:
        exchange, version = _choose(options)
        target = _target(options, version)
        run, name = pathlib.Path(options.run), target.parent.name
        card = card_text(run, version, name=name)
    except (ValueError, OSError, versions.VersionNotFoundError) as error:
        raise programs.UsageError(str(error)) from error
    except versions.CorruptVersionError as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    try:
        is_new = promote(
            exchange,
            version,
            target,
            card=card,
            trust_graph=options.trust_graph,
        )
    except (
        RefusedError,
        OSError,
        versions.CorruptVersionError,
        versions.VersionNotFoundError,
    ) as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    print(f"{target}" + ("" if is_new else " (already there)"))
    return 0


PROGRAM = programs.Program(
    name="tfdistill promote",
    usage="RUN --to=DIR [--group=N] [--step=N] [options]",
    about="Copies a version of a run to TensorFlow Serving.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
)
main = PROGRAM.main
