"""The command `tfdistill-local`: any script as groups of tasks."""

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from tfdistill.system import programs

if TYPE_CHECKING:
    from tfdistill.launcher import local_cluster
    from tfdistill.launcher import local_run

NOTES = """\
The command after -- is found through PATH and started once for each task,
with TF_CONFIG and TFDISTILL_* set; its output goes to DIR/logs. Logs of an
earlier run in DIR are kept under new names. The first task that fails ends its
group. With --max_restarts=N, the whole group is then restarted, up to N times.
With parameter servers, a failed worker is restarted by itself, and only the
loss of the chief, of a ps or of the last worker ends the group. Tasks that are
frozen or stuck are killed. DIR/logs/events.jsonl lists what happened. Ctrl-C
stops all tasks, and a second Ctrl-C kills them. Exit code: 0 if all groups are
done; else that of the task that failed first (128 + n for signal n), 75 if a
task did not start in time or a group was stuck, 2 for wrong options, 130 or 143
after Ctrl-C or SIGTERM.

example:
  tfdistill-local --num_groups=2 --workers_per_group=2 --workdir=/tmp/run \\
      -- python my_train.py --epochs=3
"""


def add_options(options: programs.Flags) -> None:
    """Adds the options that come before `--`."""
    add_topology(options)
    options.section("failures")
    options.add(
        "on_group_failure",
        "what the other groups do when one has failed for good",
        "stop",
        enum_values=("stop", "continue"),
    )
    options.add(
        "max_restarts",
        "how often a failed group is restarted as a whole before "
        "--on_group_failure applies; never after exit code 2 or 65",
        0,
    )
    options.add(
        "worker_restarts",
        "with parameter servers: how often each worker is restarted after it "
        "has ended; default 10",
        kind=int,
    )
    add_start(options)
    options.section("time limits")
    for name, default, text in _LIMITS:
        options.add(name, text, default)
    options.section("output")
    options.add(
        "plain",
        "print lines, not a live table; always so without a terminal",
        False,
    )


_LIMITS = (
    (
        "start_timeout_secs",
        300.0,
        "longest wait until a group's first task has started, and again until "
        "all its tasks are connected; 0 for scripts that do not call "
        "tfdistill.make_strategy",
    ),
    ("grace_secs", 5.0, "time between SIGTERM and SIGKILL"),
    (
        "frozen_secs",
        3.0,
        "kill a task that a signal has stopped for this long; 0 for never, as "
        "under a debugger",
    ),
    (
        "stuck_secs",
        8.0,
        "kill a group that makes no step for this long, or for ten times its "
        "longest recent step if that is longer; 0 for never",
    ),
)


def add_topology(options: programs.Flags) -> None:
    """Adds the options that say which groups there are, and where they meet."""
    options.section("groups")
    options.add("workdir", "<DIR>: directory of the run", required=True)
    for name, default, text in (
        ("num_groups", 1, "number of groups; each trains its own student"),
        ("workers_per_group", 1, "workers in each group"),
        (
            "ps_per_group",
            0,
            "parameter servers in each group, which then has a chief too",
        ),
    ):
        options.add(name, text, default)
    options.add(
        "exchange",
        "<URL>: directory or URL the groups share; default DIR/exchange",
    )


def add_start(options: programs.Flags) -> None:
    """Adds the options that say how tasks are started."""
    options.section("start")
    options.add(
        "start",
        "fork: tasks that run a Python command are forks of one parent that "
        "has imported --preload, where that can be; spawn: each task is a new "
        "program",
        "fork",
        enum_values=("fork", "spawn"),
    )
    options.add(
        "preload",
        "<NAME,...>: modules that the parent imports; they must neither start "
        "a thread nor run an operation of TensorFlow",
        "tensorflow,keras,tfdistill",
    )


def run(
    options: programs.Options,
    *,
    beside: Callable[
        ["local_cluster.LocalCluster"], contextlib.AbstractContextManager[Any]
    ] = contextlib.nullcontext,
) -> "local_run.RunResult":
    """Runs a command as the options say, to the end of all groups.

    `beside` is entered before the first task starts, once the workdir is
    taken and has its key, and left after the last one has ended.
    """
    # Only here: --help and wrong options are answered at once.
    from tfdistill.launcher import files
    from tfdistill.launcher import local_cluster
    from tfdistill.launcher import local_run
    from tfdistill.status import tables

    fields = dict(vars(options))
    plain = True if fields.pop("plain") else None
    fields["preload"] = [name for name in fields["preload"].split(",") if name]
    display = tables.Display(plain=plain)
    try:
        topology = local_cluster.LocalCluster(**fields)
        started = local_run.LocalRun(topology, display=display)
    except ValueError as cause:
        display.close()
        raise programs.UsageError(str(cause)) from cause
    try:
        with beside(topology):
            result = started.supervise()
    except files.WorkdirError as cause:
        raise programs.UsageError(str(cause)) from cause
    finally:
        display.close()
    try:
        _tell(result)
    except OSError:  # Neither a full disk nor a closed pipe fails a run.
        programs.forget_output()
    return result


def _tell(result: "local_run.RunResult") -> None:
    for group in result.groups:
        suffix = f": {group.reason}" if group.reason else ""
        restarted = [f"{n} {name}" for name, n in group.restarts.items() if n]
        if restarted:
            suffix += f" (worker restarts: {', '.join(restarted)})"
        if group.group_restarts:
            suffix += f" (restarts: {group.group_restarts})"
        print(f"group {group.group} {group.state}{suffix}", flush=True)
    sys.stdout.flush()


def _run(options: programs.Options) -> int:
    if not options.command:
        raise programs.UsageError(NO_COMMAND)
    return run(options).exit_code


EITHER = (
    "--workdir=DIR [options] -- COMMAND [ARGUMENT ...]\n"
    "--workdir=DIR [options] --recipe=NAME"
)
NO_COMMAND = "expected a command after --, such as: -- python train.py"
PROGRAM = programs.Program(
    name="tfdistill-local",
    usage="--workdir=DIR [options] -- COMMAND [ARGUMENT ...]",
    about="Runs a command as groups of tasks on this machine.",
    notes=NOTES,
    define=add_options,
    run=_run,
    takes_command=True,
)
main, start = PROGRAM.main, PROGRAM.start

if __name__ == "__main__":
    start()
