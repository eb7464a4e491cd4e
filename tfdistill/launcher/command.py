"""The command `tfdistill-local`: any script as groups of tasks."""

import argparse
import sys
from collections.abc import Sequence

from tfdistill.launcher import local_cluster
from tfdistill.launcher import local_run
from tfdistill.status import tables

EXIT_OPTIONS = 2
# Each is a process with a port: more is a slip of the finger, and would keep a
# machine from answering before anybody could stop it.
_MOST_TASKS = 512
_EPILOG = """\
The command after -- is found through PATH and started once for each task,
with TF_CONFIG and TFDISTILL_* set; its output goes to DIR/logs. Logs of an
earlier run in DIR are kept under new names. The first task that fails ends its
group, which --max_restarts=N starts again as a whole up to N times; with
parameter servers a worker is started again instead, and only the loss of the
chief, of a ps or of the last worker ends the group. Tasks that are frozen or
stuck are killed. DIR/logs/events.jsonl tells what happened. Ctrl-C stops all
tasks, a second Ctrl-C kills them. Exit code: 0 if all groups are done; else
that of the task that failed first (128 + n for signal n), 75 if a task did not
start in time or a group was stuck, 2 for wrong options, 130 or 143 after Ctrl-C
or SIGTERM.

example:
  tfdistill-local --num_groups=2 --workers_per_group=2 --workdir=/tmp/run \\
      -- python my_train.py --epochs=3
"""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """Returns the parser of the options before `--`.

    Args:
        prog: Name of the program in messages.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} --workdir=DIR [options] -- COMMAND [ARGUMENT ...]",
        description="Runs a command as groups of tasks on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_topology(parser)
    _add_supervision(parser)
    _add_restarts(parser)
    _add_limits(parser)
    parser.add_argument(
        "--plain",
        action="store_true",
        help="lines instead of a live table, as when not on a terminal",
    )
    return parser


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say which groups there are, and where they meet.

    Args:
        parser: Of a launcher.
    """
    add = parser.add_argument
    add("--workdir", required=True, metavar="DIR", help="directory of the run")
    for name, default, text in (
        ("--num_groups", 1, "groups, each training a student of its own"),
        ("--workers_per_group", 1, "workers in each group"),
        (
            "--ps_per_group",
            0,
            "parameter servers; with any, a group has a chief too",
        ),
    ):
        text += f"; default {default}"
        add(name, type=int, default=default, metavar="N", help=text)
    add(
        "--exchange",
        metavar="URL",
        help="directory or URL the groups share; default DIR/exchange",
    )


def _add_supervision(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--on_group_failure",
        choices=("stop", "continue"),
        default="stop",
        help="what becomes of the other groups; default stop",
    )
    add(
        "--start_timeout_secs",
        type=float,
        default=300.0,
        metavar="SECS",
        help="limit until a group's first task appears, and from then until "
        "all are connected; 0 for scripts that do not call "
        "tfdistill.make_strategy; default 300",
    )
    add(
        "--grace_secs",
        type=float,
        default=5.0,
        metavar="SECS",
        help="time between SIGTERM and SIGKILL; default 5",
    )


def _add_restarts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--worker_restarts",
        type=int,
        metavar="N",
        help="with parameter servers: how often each worker is started again "
        "after its end; default 10",
    )
    add(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often each group is started again as a whole after it has "
        "failed, before --on_group_failure applies; not after exit code 2 or "
        "65; default 0",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--frozen_secs",
        type=float,
        default=3.0,
        metavar="SECS",
        help="a task that a signal has stopped for so long is killed; 0 for "
        "none, as under a debugger; default 3",
    )
    add(
        "--stuck_secs",
        type=float,
        default=8.0,
        metavar="SECS",
        help="a group whose steps stop coming for so long, or for ten times "
        "the longest recent step, is killed; 0 for none; default 8",
    )


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at the first `--` into options and command."""
    if "--" not in argv:
        return list(argv), []
    index = list(argv).index("--")
    return list(argv[:index]), list(argv[index + 1 :])


def run(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    command: Sequence[str],
) -> int:
    """Runs a command as the options say."""
    fields = vars(options) | {"command": command}
    plain = True if fields.pop("plain") else None
    display = tables.Display(plain=plain)
    try:
        topology = local_cluster.LocalCluster(**fields)
        _check_size(topology)
        started = local_run.LocalRun(topology, display=display)
    except ValueError as cause:
        display.close()
        parser.error(str(cause))
    try:
        result = started.supervise()
    finally:
        display.close()
    for group in result.groups:
        suffix = f": {group.reason}" if group.reason else ""
        restarted = [f"{n} {name}" for name, n in group.restarts.items() if n]
        if restarted:
            suffix += f" (worker restarts: {', '.join(restarted)})"
        if group.group_restarts:
            suffix += f" (restarts: {group.group_restarts})"
        print(f"group {group.group} {group.state}{suffix}", flush=True)
    return result.exit_code


def _check_size(topology: local_cluster.LocalCluster) -> None:
    number = topology.num_groups * topology.num_tasks
    if number > _MOST_TASKS:
        raise ValueError(
            f"The tasks of one machine must be at most {_MOST_TASKS}, each a "
            f"process; received options for {number:,}. Use fewer groups or "
            "workers, or a cluster's own scheduler."
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = make_parser("tfdistill-local")
    arguments = sys.argv[1:] if argv is None else argv
    before, command = split_command(arguments)
    options = parser.parse_args(before)
    if not command:
        parser.error("expected a command after --, such as: -- python train.py")
    return run(parser, options, command)


if __name__ == "__main__":
    sys.exit(main())
