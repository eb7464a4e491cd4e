"""`tfdistill.launch`: what `tfdistill-local` does, from Python."""

import os
import signal
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run


class LaunchError(RuntimeError):
    """A group has failed; the message has the last lines of its log.

    Attributes:
        launched: The run, with the files and states of all groups.
        exit_code: What `tfdistill-local` would have returned.
    """

    def __init__(self, launched: local_run.RunResult) -> None:
        found = []
        for group in launched.groups:
            if group.state == "failed":
                found.append(f"Group {group.group} failed: {group.reason}.")
                found += [f"  {line}" for line in group.last_lines]
        logs = f"All logs: {launched.workdir}/logs"
        super().__init__("\n".join([*found, logs]))
        self.launched = launched
        self.exit_code = launched.exit_code


def launch(
    command: Sequence[str],
    *,
    workdir: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    **options: Any,
) -> local_run.RunResult:
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
        The run, if all groups are done: its `groups`, `workdir`, `exchange`
        and `metrics(group)`.

    Raises:
        TypeError: There is no such option, or an argument is of a wrong type.
        ValueError: An argument is out of range, the command is no program, or
            the workdir is in use.
        RuntimeError: A group has failed. `error.launched` is the run, and
            `error.exit_code` what `tfdistill-local` would have returned.
        KeyboardInterrupt: All tasks were stopped by Ctrl-C.

    Example:
        run = tfdistill.launch(
            ["python", "train.py"], num_groups=2, workdir="/tmp/run"
        )
    """
    topology = local_cluster.LocalCluster(
        command=command,
        workdir=os.fspath(workdir),
        env={name: str(value) for name, value in (env or {}).items()},
        **options,
    )
    launched = local_run.LocalRun(topology).supervise()
    if launched.received == signal.SIGINT:
        raise KeyboardInterrupt
    if launched.received:
        raise SystemExit(launched.exit_code)
    if launched.exit_code:
        raise LaunchError(launched)
    return launched
