"""The command `tfdistill-local`: any script as groups of tasks."""

from typing import TYPE_CHECKING

from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster
from tfdistill.system import programs

if TYPE_CHECKING:
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
    fields.add(options, local_cluster.LocalCluster)


def run(options: programs.Options) -> "local_run.RunResult":
    """Runs a command as the options say, to the end of all groups."""
    # Only here: --help and wrong options are answered at once.
    from tfdistill.launcher import local_run

    try:
        topology = local_cluster.LocalCluster(
            command=options.command,
            **fields.chosen(local_cluster.LocalCluster, options),
        )
        started = local_run.LocalRun(topology)
    except ValueError as cause:
        raise programs.UsageError(str(cause)) from cause
    return started.supervise()


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
