"""Writes the manifests that run a script or a recipe on Kubernetes.

tfdistill kubernetes --name=run1 --image=IMAGE \
    --num-groups=2 --workers-per-group=2 --volume-claim=runs \
    --workdir=/mnt/run1 --recipe=digits | kubectl apply -f -

Nothing is sent anywhere: what is written is for `kubectl apply`.
"""

import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import logging

from tfdistill.commands import keras_script
from tfdistill.commands import recipe_options
from tfdistill.commands import run as run_command
from tfdistill.kubernetes import objects
from tfdistill.kubernetes import run
from tfdistill.launcher import fields
from tfdistill.recipes import recipes
from tfdistill.system import programs

_NOTES = """\
The command after -- runs in each container with TF_CONFIG and TFDISTILL_* set.
A named recipe runs as python -m launch.train, so the image must contain this
checkout. DIR is an absolute path in the containers; without --volume-claim it
is lost when its pod ends. docs/clusters.md describes restarts, keys and GPUs.

Exit code: 0, or 2 for wrong options.
"""


def _add_options(options: programs.Program) -> None:
    fields.add(options, run.Run)
    keras_script.add(options)
    recipe_options.add(options)
    options.section("output")
    options.add("output", "<FILE>: file to write; default: stdout")


def _command(options: programs.Options) -> list[str]:
    name = options.recipe
    if name is not None and name not in recipes.RECIPES:
        known = ", ".join(recipes.RECIPES) or "left out, as here are none"
        raise ValueError(
            f"`recipe` must be {known}; received {name!r}. The file isn't in "
            "the image: pass its path in the image as a command: -- python -m "
            "tfdistill.commands.train --recipe=FILE"
        )
    return recipe_options.command(
        options, python="python", workdir=options.workdir
    )


def _dump(found: Sequence[Mapping[str, Any]]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Writes what occurs twice in full, as people read it."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(
        found, Dumper=Dumper, sort_keys=False, explicit_start=True
    )


def _run(options: programs.Options) -> int:
    with programs.usage_errors():
        made = run.Run(
            command=_command(options), **fields.chosen(run.Run, options)
        )
        text = _dump(objects.objects(made))
        if options.output is not None:
            pathlib.Path(options.output).write_text(text, "utf-8")
    if options.output is None:
        print(text, end="")
    if made.volume_claim is None:
        logging.warning(
            "no --volume-claim: %s ends with its pod, and with it backups, "
            "logs and results. A task on another node starts from step 0.",
            made.workdir,
        )
    return 0


PROGRAM = programs.Program(
    name="tfdistill kubernetes",
    usage=run_command.EITHER,
    about="Writes the manifests for a run on Kubernetes.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    takes_command=True,
    needs=("yaml",),
)
main = PROGRAM.main
