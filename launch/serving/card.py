"""The model card of a version: what its run recorded, as Markdown.

Everything comes from files that others may have written, so all of it is made
plain text before it goes into the page.
"""

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch.config import config as config_lib
from launch.serving import handover
from launch.task import outputs
from tfdistill.exchange import versions
from tfdistill.system import run_files
from tfdistill.system import untrusted

_MAX_BYTES = 16 * 1024 * 1024
# Of metrics.jsonl, beside the metrics: where, when and how fast.
_NOT_METRICS = {"step", "epoch", "time", "total_steps", "examples_per_second"}
_NONE = "Not recorded by the run.\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What the files of a run say about one of its groups.

    Attributes:
        config: Of a recipe; None for a script of the user's own.
        results: Of the group at the end of its training, or nothing.
        progress: The group's records in metrics.jsonl.
    """

    config: config_lib.Config | None
    results: Mapping[str, Any]
    progress: Sequence[Mapping[str, Any]]


def read(run: pathlib.Path, group: int) -> RunRecord:
    """Reads what there is; ValueError if the configuration is malformed."""
    directory = outputs.group_dir(run, group)
    path = run / outputs.CONFIG
    return RunRecord(
        config=config_lib.Config.read(path) if path.exists() else None,
        results=_object(directory / outputs.RESULTS),
        progress=untrusted.Tail(
            directory / run_files.METRICS, last_bytes=_MAX_BYTES
        ).read(),
    )


def _object(path: pathlib.Path) -> Mapping[str, Any]:
    try:
        return untrusted.json_object(path.read_bytes()) or {}
    except OSError:
        return {}


def text(
    name: str,
    version: versions.Version,
    record: RunRecord,
    checks: handover.Checks,
    *,
    notes: str = "",
) -> str:
    """Returns the card of a version that is served under a name."""
    sections = {
        "Use": _use(version),
        "Recipe": _recipe(version, record),
        "Data": _data(record.config),
        "Metrics": _metrics(version, record),
        "Teachers": _teachers(version, record),
        "Library versions": _table(
            ("library", "version"), version.manifest.libraries.items()
        ),
        "Checks": _checks(version, checks),
    }
    parts = [f"# {_plain(name)}\n", _summary(version)]
    if notes:
        parts.append(f"{notes.strip()}\n")
    parts += [f"## {title}\n\n{body}" for title, body in sections.items()]
    if record.config is not None:
        # Indented: no line of it can end the block.
        lines = record.config.to_json().splitlines()
        code = "\n".join(f"    {line}" for line in lines)
        parts.append(f"## Configuration\n\n{code}\n")
    return "\n".join(parts)


def _summary(version: versions.Version) -> str:
    created = datetime.datetime.fromtimestamp(
        version.manifest.created, datetime.UTC
    )
    return (
        f"A student of group {version.group} after {version.step} steps, "
        f"published at {created:%Y-%m-%d %H:%M} UTC and trained with "
        "tfdistill.\n"
    )


def _use(version: versions.Version) -> str:
    rows = [
        (kind, name, spec.get("dtype"), spec.get("shape"))
        for kind, specs in (
            ("input", version.manifest.inputs),
            ("output", version.manifest.outputs),
        )
        for name, spec in (specs or {}).items()
    ]
    return (
        f"A SavedModel with the tag `{handover.TAG}` and the signature "
        f"`{handover.SIGNATURE_NAME}`.\n\n"
        + _table(("", "name", "dtype", "shape"), rows)
    )


def _recipe(version: versions.Version, record: RunRecord) -> str:
    config = record.config
    steps = record.results.get("steps")
    rows: list[tuple[str, Any]] = [("step of this version", version.step)]
    if steps is not None:
        rows.append(("steps of the whole training", steps))
    if config is None:
        return _table(("", ""), rows) + "\nThe run is not one of a recipe.\n"
    learn = config.codistillation
    rows = [
        ("recipe", config.recipe),
        ("model", config.model.name),
        ("arguments", json.dumps(config.model.arguments_of(version.group))),
        *rows,
        ("optimizer", config.optimizer.name),
        ("learning rate", config.optimizer.learning_rate),
        ("dtype policy", config.dtype_policy),
        ("seed", config.seed),
    ]
    if learn.enabled:
        rows += [
            ("distillation loss", learn.loss),
            ("distillation weight", learn.weight),
            ("burn-in steps", learn.burn_in_steps),
        ]
    return _table(("", ""), rows)


def _data(config: config_lib.Config | None) -> str:
    if config is None:
        return _NONE
    data = config.data
    rows = [
        ("data", data.name),
        ("path", data.path or data.tfds or "default"),
        ("groups", f"{data.mode} data"),
        ("global batch size", data.global_batch_size),
        ("seed of the order", data.seed),
        ("arguments", json.dumps(dict(data.arguments))),
    ]
    return _table(("", ""), rows)


def _metrics(version: versions.Version, record: RunRecord) -> str:
    parts = []
    logged = _last(record.progress, version.step)
    if logged:
        rows = [
            (name, value)
            for name, found in logged.items()
            if name not in _NOT_METRICS
            and (value := untrusted.number(found)) is not None
        ]
        parts.append(
            f"Logged at step {logged['step']}, the last record up to this "
            "version (`val_`: validation data):\n\n"
            + _table(("metric", "value"), rows)
        )
    final = record.results.get("metrics")
    if isinstance(final, Mapping):
        parts.append(
            "Validation data, at the end of training (step "
            f"{_plain(record.results.get('steps'))}):\n\n"
            + _table(("metric", "value"), final.items())
        )
    return "\n".join(parts) or _NONE


def _last(
    progress: Sequence[Mapping[str, Any]], step: int
) -> Mapping[str, Any]:
    """Returns the last record up to a step: of an epoch, if there is one."""
    upto = [
        record
        for record in progress
        if (found := untrusted.whole(record.get("step"))) is not None
        and found <= step
        and record.get("event") in (None, "epoch_end")
    ]
    epochs = [record for record in upto if "event" in record]
    return (epochs or upto or [{}])[-1]


def _teachers(version: versions.Version, record: RunRecord) -> str:
    logged = _last(record.progress, version.step)
    found = logged.get("teachers", record.results.get("teachers"))
    rows = [
        tuple(
            teacher.get(key)
            for key in ("name", "step", "age_steps", "health", "reason")
        )
        for teacher in (found if isinstance(found, list) else [])
        if isinstance(teacher, Mapping)
    ]
    if not rows:
        return "None: the student learned from its labels only.\n"
    when = f" at step {logged['step']}" if logged else ""
    return (
        f"As the group knew them{when}; a version of -1 is none.\n\n"
        + _table(("teacher", "version", "age (steps)", "health", ""), rows)
    )


def _checks(version: versions.Version, checks: handover.Checks) -> str:
    signed = "its signature agrees with the run's key"
    if not checks.is_signed:
        signed = "the run signs nothing: anybody who could write to its "
        signed += "exchange may have made it"
    return "".join(
        f"- {line}.\n"
        for line in (
            f"{len(version.manifest.files)} files agree with the SHA-256 "
            "checksums of `manifest.json`",
            f"Of the manifest, {signed}",
            "The copy was loaded by tag and signature, and answered "
            f"{checks.batch} as the version in the exchange did",
        )
    )


def _table(head: Sequence[str], rows: Any) -> str:
    def lines() -> Iterator[str]:
        for cells in (head, ["---"] * len(head), *rows):
            yield f"| {' | '.join(map(_plain, cells))} |\n"

    return "".join(lines())


def _plain(value: Any) -> str:
    """Returns one line that Markdown shows as it is."""
    if isinstance(value, float):
        value = f"{value:.6g}"
    shown = "" if value is None else str(value)
    line = untrusted.one_line(shown)
    for character in "\\`|<[*":
        line = line.replace(character, f"\\{character}")
    return line
