"""Writes, and submits, the batch script that runs groups of tasks on Slurm.

tfdistill slurm --num-groups=2 --workdir=DIR --recipe=digits > run.sh
tfdistill slurm --num-groups=2 --workdir=DIR --submit -- python train.py
"""

import os
import pathlib

from tfdistill.commands import keras_script
from tfdistill.commands import recipe_options
from tfdistill.commands import run as run_command
from tfdistill.exchange import signing
from tfdistill.launcher import fields
from tfdistill.slurm import commands
from tfdistill.slurm import job
from tfdistill.system import programs

_SUBMITTED = "slurm.sh"
_NOTES = """\
DIR must be on storage that all nodes share. The command creates it, with logs/
and the key that signs versions; everything else happens in the jobs. Each group
is an element of a job array, so each one waits in the queue, runs, fails,
restarts and reaches its time limit separately. If you submit the same script
again, the groups resume from their backups. See docs/clusters.md.

Exit code: 0 if the script was written, 1 if sbatch fails, 2 for wrong options.

example:
  tfdistill slurm --num-groups=2 --workers-per-group=4 --time=12:00:00 \\
      --cpus-per-worker=8 --workdir=/shared/run --submit --recipe=digits
"""


def _add_options(options: programs.Program) -> None:
    fields.add(options, job.Script)
    keras_script.add(options)
    recipe_options.add(options)
    options.section("script")
    options.add("output", "<FILE>: script to write; default: stdout")
    options.add(
        "submit",
        "call sbatch too, and print the job's id; the script is then "
        f"DIR/{_SUBMITTED} by default",
        False,
    )


def _make_script(options: programs.Options) -> job.Script:
    command = recipe_options.command(
        options,
        python=options.python,
        workdir=os.path.abspath(options.workdir),
    )
    return job.Script(command=command, **fields.chosen(job.Script, options))


def _prepare(script: job.Script) -> None:
    """Makes what the jobs need before they start: Slurm writes into logs."""
    (script.logs_dir / "ready").mkdir(parents=True, exist_ok=True)
    # Even if the environment has a key, which comes first in the tasks: the
    # key at submission is used, and may be another.
    signing.make_file(script.key_path)


def _run(options: programs.Options) -> int:
    path = options.output
    with programs.usage_errors():
        script = _make_script(options)
        text = script.text
        _prepare(script)
        if path is None and options.submit:
            path = str(pathlib.Path(script.workdir, _SUBMITTED))
        if path is not None:
            pathlib.Path(path).write_text(text, "utf-8")
    if path is None:
        print(text, end="")
    if options.submit:
        print(commands.submit(path))
    return 0


PROGRAM = programs.Program(
    name="tfdistill slurm",
    usage=run_command.EITHER,
    about="Writes the batch script for a run on Slurm.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    takes_command=True,
    reports=(RuntimeError,),
)
main = PROGRAM.main
