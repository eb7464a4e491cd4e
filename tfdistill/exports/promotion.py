"""How a version of a run is put where it is served: whole, checked, described.

It is copied and checked aside, and appears by one rename. In an object store,
whose files appear one by one, its manifest comes last.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from typing import Any

from tfdistill.exchange import filesystem
from tfdistill.exchange import manifest
from tfdistill.exchange import publisher
from tfdistill.exchange import signing
from tfdistill.exchange import versions
from tfdistill.system import fits
from tfdistill.system import run_files
from tfdistill.system import untrusted

CARD = "README.md"
# Begins the names of directories that a killed promotion leaves.
ASIDE = ".promoting-"
_MAX_BYTES = 16 * 1024 * 1024
_DISK = filesystem.LocalFileSystem()


class RefusedError(RuntimeError):
    """A version that must not be served, and why."""


# What promoting raises, besides: the version, the storage or the disk is bad.
ERRORS = (
    RefusedError,
    OSError,
    versions.CorruptVersionError,
    versions.VersionNotFoundError,
)


def choose(
    run: str | os.PathLike[str],
    *,
    group: int = 0,
    step: int | None = None,
    place: str | None = None,
) -> tuple[publisher.Exchange, versions.Version]:
    """Returns a version of a run, and a reader with the run's key, if any.

    The key is the environment's, or what `tfdistill run` left in the run.
    `step` is by default the newest of the last training, `place` the exchange
    in the run.
    """
    path = pathlib.Path(run, run_files.KEY)
    key: signing.KeyOption = "environment"
    if not signing.has_key(os.environ) and path.exists():
        key = path.read_bytes().strip()
    place = place or os.path.join(run, "exchange")
    exchange = publisher.Exchange(place, key=key)
    if step is not None:
        return exchange, exchange.open(group, step)
    exchange.turn_to_newest()
    newest = exchange.latest(group)
    if newest is None:
        raise ValueError(
            f"There is no version in {exchange.group_path(group)} that "
            "this process can read. Check the run, --group and --exchange."
        )
    return exchange, newest


def promote(
    exchange: publisher.Exchange,
    version: versions.Version,
    target: str,
    *,
    card: str,
    extra: Mapping[str, bytes | os.PathLike[str]] | None = None,
    trust_graph: bool = False,
) -> bool:
    """Copies a version to `target`, a path or URL, where it appears whole.

    Args:
        exchange: Where it is.
        version: The version.
        target: Its new directory.
        card: The text of its README.md.
        extra: By name: other files, as their content, or as the path of a
            file or directory to copy.
        trust_graph: Whether to take a graph that is not signed, and not known
            to be harmless.

    Returns:
        False if it was there already.

    Raises:
        RefusedError: If it must not be served, or another is in its place.
        CorruptVersionError: If a file differs from the manifest.
        OSError: If the storage or the disk fails.
    """
    is_signed = signing.is_signed(version.manifest)
    if is_signed and exchange.signer is None:
        raise RefusedError(
            f"{version.path} is signed, and this process has no key to check "
            f"the signature. Set {signing.FILE_VARIABLE} to the file of the "
            "run's key."
        )
    files, target = filesystem.for_root(target)
    if is_there(files, target):
        there = dataclasses.replace(version, path=target)
        try:
            versions.check_content(files, there)
        except (versions.CorruptVersionError, OSError) as error:
            raise RefusedError(
                f"{target} already exists and differs from {version.path}: "
                f"{error} A server may have loaded it. Choose another "
                f"--version-number, or remove {target}."
            ) from error
        return False
    parent, _, name = target.rpartition("/")
    is_local = isinstance(files, filesystem.LocalFileSystem)
    files.make_dirs(parent)
    aside = tempfile.mkdtemp(prefix=ASIDE, dir=parent if is_local else None)
    try:
        copy = pathlib.Path(aside, name)
        copy.mkdir()
        exchange.fetch(version, str(copy))
        if not is_signed and not trust_graph:
            _check_graph(copy)
        for path, content in {CARD: card.encode(), **(extra or {})}.items():
            _put(copy / path, content)
        # The exchange's own file, so that the copy can be checked again.
        text = version.manifest.to_json().encode()
        (copy / manifest.FILE_NAME).write_bytes(text)
        if is_local:
            for found in [*copy.rglob("*"), copy]:
                _DISK.sync(str(found))
            copy.rename(target)
            _DISK.sync(parent)
        else:
            _copy_files(_DISK, str(copy), files, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return True


def is_there(files: filesystem.FileSystem, target: str) -> bool:
    """Whether a version was copied there to its end."""
    # In a store its manifest comes last.
    own = "" if files.renames_atomically else f"/{manifest.FILE_NAME}"
    try:
        files.stat(target + own)
    except FileNotFoundError:
        return False
    return True


def _put(path: pathlib.Path, content: bytes | os.PathLike[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif os.path.isdir(content):
        shutil.copytree(content, path)
    else:
        shutil.copyfile(content, path)


def fetch(files: filesystem.FileSystem, path: str, target: str) -> None:
    """Copies a promoted version to a local directory, which appears whole.

    FileNotFoundError if there is none; CorruptVersionError if a file differs
    from its manifest.
    """
    parent, name = os.path.split(target)
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=parent) as aside:
        draft = f"{aside}/{name}"
        _copy_files(files, path, _DISK, draft)
        text = pathlib.Path(draft, manifest.FILE_NAME).read_bytes()
        said = manifest.Manifest.from_json(text)
        copy = versions.Version(said.group, said.step, draft, said)
        versions.check_content(_DISK, copy)
        os.rename(draft, target)


def _copy_files(
    source: filesystem.FileSystem,
    directory: str,
    target: filesystem.FileSystem,
    place: str,
) -> None:
    """Copies all files below a directory, the version's own manifest last."""
    found = filesystem.walk(source, directory)
    names = {name for name, seen in found if seen.is_file}
    for name in sorted(names, key=lambda name: name == manifest.FILE_NAME):
        blocks = source.blocks(f"{directory}/{name}")
        target.write(f"{place}/{name}", blocks)


def _check_graph(copy: pathlib.Path) -> None:
    """Checks an unsigned graph before any of it runs."""
    from tfdistill.exports import graph_check

    try:
        graph_check.check_directory(str(copy))
    except ValueError as error:
        raise RefusedError(
            f"The version has no signature, and {error} If you trust it as "
            "you would trust a program, pass --trust-graph."
        ) from error


def card_text(
    run: str | os.PathLike[str], version: versions.Version, *, name: str
) -> str:
    """Returns the model card: facts of the version and its run, verbatim."""
    found, run = version.manifest, pathlib.Path(run)
    created = datetime.datetime.fromtimestamp(found.created, datetime.UTC)
    signed = "the run's key has signed its manifest"
    if not signing.is_signed(found):
        signed = "the run signs nothing: anyone who could write to its "
        signed += "exchange may have created this version"
    group = run / run_files.group_name(version.group)
    log = untrusted.Tail(group / run_files.METRICS, last_bytes=_MAX_BYTES)
    room = pathlib.PurePath(version.path).parent.parent.name
    records = [
        one
        for one in log.read()
        if isinstance(one.get("step"), int)
        and one["step"] <= version.step
        # Only records of the training that published the version.
        and one.get("exchange", "") == (room if fits.is_name(room) else "")
    ]
    sections = {
        "Inputs": found.inputs,
        "Outputs": found.outputs,
        "Libraries": found.libraries,
        "Last record up to this step": records[-1:] and records[-1],
        "Results of the training": _json_object(group / run_files.RESULTS),
        "Configuration": _json_object(run / run_files.CONFIG),
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
