"""`tfdistill.launch`: what `tfdistill-local` does, from Python."""

import dataclasses
import json
import os
import pathlib
import signal
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.launcher import group as supervised_group
from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.status import directory
from tfdistill.status import tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launched:
    """A run that has ended, and where its files are.

    Attributes:
        workdir: The directory of the run.
        exchange: The directory or URL that the groups shared.
        groups: How each group ended: its `state` is `"done"`, `"failed"` or
            `"stopped"`.
    """

    workdir: pathlib.Path
    exchange: str
    groups: tuple[supervised_group.GroupResult, ...]

    def metrics(self, group: int) -> list[dict[str, Any]]:
        """Returns the records of a group's `metrics.jsonl`, in order."""
        path = directory.RunDirectory(self.workdir).metrics(group)
        return list(map(json.loads, path.read_text("utf-8").splitlines()))


class LaunchError(RuntimeError):
    """A group has failed; the message has the last lines of its log.

    Attributes:
        launched: The run, with the files and states of all groups.
        exit_code: What `tfdistill-local` would have returned.
    """

    def __init__(
        self, message: str, *, launched: Launched, exit_code: int
    ) -> None:
        super().__init__(message)
        self.launched = launched
        self.exit_code = exit_code


def launch(
    command: Sequence[str],
    *,
    workdir: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> Launched:
    """Runs a command as groups of tasks on this machine, to their end.

    While it runs, it prints lines about the groups. Ctrl-C, or a notebook's
    "interrupt", stops all tasks. TensorFlow is not loaded.

    Args:
        command: A program and its arguments, started once for each task.
        workdir: Directory of the run, for logs and results.
        env: Variables to set for each task. Default none.
        **options: The options of `tfdistill-local`, by the same names, with
            the same defaults and in the same form, such as `num_groups=2`,
            `workers_per_group=2` and `max_restarts=3`.

    Returns:
        The run, if all groups are done.

    Raises:
        TypeError: There is no such option.
        ValueError: An argument is of the wrong type or out of range, the
            command is no program, or the workdir is in use.
        RuntimeError: A group has failed. `error.launched` is the run, and
            `error.exit_code` what `tfdistill-local` would have returned.
        KeyboardInterrupt: All tasks were stopped by Ctrl-C.

    Example:
        run = tfdistill.launch(
            ["python", "train.py"], num_groups=2, workdir="/tmp/run"
        )
    """
    if isinstance(command, list | tuple):  # `LocalCluster` refuses others.
        command = [_text(part) for part in command]
    topology = local_cluster.LocalCluster(
        command=command,
        workdir=_text(workdir),
        env=dict(env or {}),
        **options,
    )
    run = local_run.LocalRun(topology, display=tables.Lines())
    ended = run.supervise()
    launched = Launched(
        workdir=pathlib.Path(topology.workdir),
        exchange=topology.exchange or f"{topology.workdir}/exchange",
        groups=ended.groups,
    )
    if run.received is not None:
        if run.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(ended.exit_code)
    if ended.exit_code:
        raise LaunchError(
            _explain(launched), launched=launched, exit_code=ended.exit_code
        )
    return launched


def _text(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


def _explain(launched: Launched) -> str:
    """Says which groups failed, why, and what their tasks said last."""
    found = []
    for group in launched.groups:
        if group.state == "failed":
            found.append(f"Group {group.group} failed: {group.reason}.")
            found += [f"  {line}" for line in group.last_lines]
    return "\n".join([*found, f"All logs: {launched.workdir}/logs"])
