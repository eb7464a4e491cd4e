"""Runs a script, a command or a recipe as groups of tasks on this machine.

tfdistill run --num-groups=2 my_train.py --epochs=3
"""

import os
import pathlib
import re
import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

from absl import logging

from tfdistill.commands import keras_script
from tfdistill.commands import recipe_options
from tfdistill.launcher import fields
from tfdistill.launcher import local_cluster
from tfdistill.recipes import outputs
from tfdistill.status import run_events
from tfdistill.system import programs
from tfdistill.system import run_files

if TYPE_CHECKING:
    from tfdistill.launcher import local_run
    from tfdistill.status import result as outcome

RUNS, LAST = run_files.RUNS, run_files.LAST
_NOTES = """\
The launcher starts the script once for each task, with this Python and with
TF_CONFIG and TFDISTILL_* set, and writes the output to DIR/logs. It renames the
logs of an earlier run in DIR. The first task that fails ends its group; with
--max-restarts=N, the whole group is then restarted, up to N times. With
parameter servers, a failed worker is restarted by itself, and only the loss of
the chief, a ps or the last worker ends the group. Frozen and stuck tasks are
killed. DIR/logs/events.jsonl records all of this. Ctrl-C stops all tasks, and a
second Ctrl-C kills them.

Exit code: 0 if all groups are done; otherwise the exit code of the task that
failed first (128 + n for signal n); 75 if a task did not start in time or a
group was stuck; 2 for wrong options; 130 or 143 after Ctrl-C or SIGTERM.

examples:
  tfdistill run --num-groups=2 --workers-per-group=2 my_train.py --epochs=3
  tfdistill run --resume my_train.py
  tfdistill run --num-groups=2 -- any_program its_arguments
"""
EITHER = (
    "[options] SCRIPT.py [ARGUMENT ...]\n"
    "[options] -- COMMAND [ARGUMENT ...]\n"
    "[options] --recipe=NAME"
)


def _add_options(options: programs.Program) -> None:
    options.section("groups")
    options.add(
        "workdir",
        f"<DIR>: directory of the run; default: a new one, ./{RUNS}/1, "
        f"./{RUNS}/2 and so on; ./{LAST} links to the newest",
    )
    options.add(
        "resume",
        f"resume the run in --workdir, or in ./{LAST}, with as many groups and "
        "tasks as it had",
        False,
    )
    fields.add(options, local_cluster.LocalCluster, without=("workdir",))
    keras_script.add(options)
    recipe_options.add(options)


def new_directory(runs: pathlib.Path, last: str = LAST) -> pathlib.Path:
    """Makes the directory with the next number; `last`, beside, links to it."""
    runs.mkdir(exist_ok=True)
    number = 0
    while True:
        taken = [int(x.name) for x in runs.iterdir() if x.name.isdecimal()]
        number = max([number, *taken]) + 1
        try:
            (runs / str(number)).mkdir()
        except FileExistsError:
            continue  # Taken by a run that started at the same moment.
        link(runs / str(number), last)
        return runs / str(number)


def link(directory: pathlib.Path, last: str) -> None:
    """Makes `last`, beside the directory of all runs, a link to one of them."""
    runs = directory.parent
    made, place = runs / f".{last}.{directory.name}", runs.parent / last
    if place.is_symlink() or not place.exists():  # No file of the user's.
        made.symlink_to(pathlib.Path(runs.name, directory.name))
        made.replace(place)


def _workdir(options: programs.Options) -> str:
    given = options.workdir
    if not options.resume:
        return given or str(new_directory(pathlib.Path(RUNS)))
    found = pathlib.Path(given or LAST)
    if not (found / "logs").is_dir():
        raise programs.UsageError(
            f"there is no run to resume in {found}. Leave out --resume to "
            "start a new run, or pass the directory of the run: --workdir=DIR"
        )
    _keep_sizes(options, found / "logs" / run_events.NAME)
    if not any(found.glob("group_*/backup/*")):
        logging.warning(
            "%s has no backup in group_*/backup, so training starts at step 0, "
            "unless the program keeps backups elsewhere. To be able to resume, "
            "add tfdistill.callbacks.Backup to the callbacks of `fit`, or use "
            "tfdistill.callbacks.defaults(...), which has one.",
            found,
        )
    return str(found.resolve())


def _keep_sizes(options: programs.Options, events: pathlib.Path) -> None:
    """Resumes as many groups and tasks as ran, unless options ask for more."""
    started = [x for x in run_events.read(events) if x["event"] == "start"]
    tasks = {x["task"] for x in started}
    given = {x.partition("=")[0].replace("_", "-") for x in _own(options)}
    for name, size in (
        ("num_groups", len({x["group"] for x in started})),
        ("workers_per_group", sum("group_0_worker_" in x for x in tasks)),
        ("ps_per_group", sum("group_0_ps_" in x for x in tasks)),
    ):
        if tasks and f"--{name.replace('_', '-')}" not in given:
            setattr(options, name, size)


def _own(options: programs.Options) -> list[str]:
    """Returns what was typed before the script or command."""
    num_own = len(options.given) - len(options.command)
    num_own += options.command[:1] == [programs.PYTHON]
    return options.given[:num_own]


def _topology(
    options: programs.Options, workdir: str
) -> local_cluster.LocalCluster:
    script = options.command[:2]
    if script[:1] == [programs.PYTHON] and not pathlib.Path(script[1]).exists():
        raise ValueError(f"there is no script {script[1]} in {os.getcwd()}")
    command = recipe_options.command(
        options, python=sys.executable, workdir=workdir
    )
    chosen = fields.chosen(
        local_cluster.LocalCluster, options, without=("workdir",)
    )
    return local_cluster.LocalCluster(
        command=command, workdir=workdir, **chosen
    )


def _launch(options: programs.Options) -> "local_run.RunResult":
    # Only here: --help and wrong options are answered at once.
    from tfdistill.launcher import local_run

    with programs.usage_errors():
        started = local_run.LocalRun(_topology(options, options.workdir))
    return started.supervise(_commands(options))


def _commands(options: programs.Options) -> "outcome.Commands":
    """Returns what can be typed after this run."""
    from tfdistill.status import result as outcome

    own = _own(options)
    task = options.given[len(own) :]
    if own[-1:] == ["--"]:
        own, task = own[:-1], ["--", *task]
    kept, skips = list[str](), False
    for argument in own:
        name, equals, _ = argument.partition("=")
        if not skips and name not in ("--resume", "--workdir"):
            kept.append(argument)
        skips = not skips and name == "--workdir" and not equals

    def again(*more: str) -> str:
        return shlex.join([*options.program.split(), *kept, *more, *task])

    compared = f"--recipe={options.recipe}" if options.recipe else ""
    if options.command[:1] == [programs.PYTHON]:
        compared = options.command[1]
        if keras_script.imports_tfdistill(compared):
            compared += " --held-out=NAME"
    compare = re.sub("(run|local)$", "compare", options.program)
    return outcome.Commands(
        new=again(),
        resume=again("--resume", f"--workdir={outcome.short(options.workdir)}"),
        two_groups=again("--num-groups=2"),
        compare=f"{compare} {compared}" * bool(compared),
    )


def run(
    options: programs.Options, *, launch: Callable[..., Any] = _launch
) -> int:
    """Runs all groups by a launcher, to their end; returns the exit code.

    If a group of a recipe fails, the results of the others are put together
    here, as no group can know that it is the last.
    """
    with programs.usage_errors():
        _topology(options, options.workdir or RUNS)  # All else is right.
        options.workdir = _workdir(options)
    result = launch(options)
    if options.recipe and result.exit_code:
        written = outputs.write_results_so_far(options.workdir, result.groups)
        if written is not None:
            try:
                said = f"results of the groups that are done: {written}"
                print(said, flush=True)
            except OSError:
                programs.forget_output()
    return result.exit_code


PROGRAM = programs.Program(
    name="tfdistill run",
    usage=EITHER,
    about="Runs a script on this machine, in one or more groups.",
    notes=_NOTES,
    define=_add_options,
    run=run,
    takes_command=True,
)
main = PROGRAM.main
