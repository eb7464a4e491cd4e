"""Writes the manifests that run a script or a recipe on Kubernetes.

python -m launch.kubernetes --form=job --name=run1 --image=IMAGE \
    --num_groups=2 --workers_per_group=2 --volume_claim=runs \
    --workdir=/mnt/run1 --recipe=digits | kubectl apply -f -

Nothing is sent anywhere: what is written is for `kubectl apply`.
"""

import argparse
import pathlib
import sys
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from launch import recipe_options
from launch import recipes
from launch.kubernetes import objects as objects_lib
from launch.kubernetes import run
from tfdistill.launcher import command as cli

_PROG = "python -m launch.kubernetes"
_OBJECTS = {"job": objects_lib.job_objects, "tfjob": objects_lib.tfjob_objects}
_EPILOG = """\
The command after -- is run in each container with TF_CONFIG and TFDISTILL_*
set; a recipe is run by python -m launch.train, so that the image must hold this
checkout. Without --volume_claim the workdir ends with its pod.
docs/kubernetes.md says how restarts, keys and GPUs go. Exit code: 0, or 2 for
wrong options.
"""


def objects(run: run.Run) -> list[dict[str, Any]]:
    """Returns the objects of Kubernetes that make up a run, in order.

    Args:
        run: What to run.
    """
    return _OBJECTS[run.form](run)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=(
            f"{_PROG} --form=FORM --name=NAME --image=IMAGE --workdir=DIR "
            "[options] (--recipe=NAME | -- COMMAND [ARGUMENT ...])"
        ),
        description="Writes manifests that run groups of tasks on Kubernetes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser)
    _add_pods(parser)
    _add_limits(parser)
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--form",
        required=True,
        choices=run.FORMS,
        help="job: Indexed Jobs, which need no operator; tfjob: one TFJob of "
        "Kubeflow's training operator for each group",
    )
    add("--name", required=True, help="of the run, a DNS label")
    add("--image", required=True, help="of the containers")
    add("--num_groups", type=int, default=1, metavar="N", help="default 1")
    for name, default, text in (
        ("workers_per_group", 1, "workers in each group"),
        ("ps_per_group", 0, "parameter servers; with any, also a chief"),
    ):
        text += f"; default {default}"
        add(f"--{name}", type=int, default=default, metavar="N", help=text)
    for name, text in (
        ("workdir", "absolute directory of the run, in the containers"),
        ("exchange", "what the groups share; default exchange in the workdir"),
        ("volume_claim", "PersistentVolumeClaim that holds the workdir"),
        ("mount_path", "where it is mounted; default the workdir"),
        ("output", "file to write, or a directory for a file for each object"),
    ):
        add(f"--{name}", required=name == "workdir", help=text)
    recipe_options.add(parser)


def _add_pods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    for name, text in (
        ("namespace", "of all objects; default that of kubectl"),
        ("key_secret", "Secret whose entry key signs the versions"),
        ("service_account", "of the pods"),
        ("cpus_per_worker", "such as 4; also of a chief"),
        ("memory_per_worker", "such as 8Gi; also of a chief"),
        ("cpus_per_ps", "default as a worker"),
        ("memory_per_ps", "default as a worker"),
    ):
        add(f"--{name}", help=text)
    add(
        "--gpus_per_worker",
        type=int,
        default=0,
        metavar="N",
        help="GPUs of each worker; one is best; default 0",
    )
    add("--shm_size", default="1Gi", help="of /dev/shm; default 1Gi")
    add("--run_as_user", type=int, metavar="UID", help="default the image's")
    for name, form, text in (
        ("node_selector", "KEY=VALUE", "label that a node must have"),
        ("toleration", "KEY[=VALUE][:EFFECT]", "taint that a node may have"),
        ("env", "NAME=VALUE", "variable to set for each task"),
    ):
        text += "; may be repeated"
        add(f"--{name}", action="append", default=[], metavar=form, help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--max_restarts",
        type=int,
        default=10,
        metavar="N",
        help="how often a group may be started again; default 10",
    )
    add(
        "--start_timeout_secs",
        type=int,
        default=1800,
        metavar="SECS",
        help="how long tasks wait for each other; default 1800",
    )
    add(
        "--keep_secs",
        type=int,
        metavar="SECS",
        help="delete what has ended, with its logs, after so long; default "
        "never",
    )


def _command(options: argparse.Namespace, given: Sequence[str]) -> list[str]:
    name = options.recipe
    if name is not None and name not in recipes.RECIPES:
        raise run.error(
            "recipe",
            f"be one of {', '.join(recipes.RECIPES)}",
            name,
            "A file is not in the image: run launch.train --recipe=FILE as a "
            "command.",
        )
    return recipe_options.command(
        options, given, python="python", workdir=options.workdir
    )


def _make_run(parsed: argparse.Namespace, given: Sequence[str]) -> run.Run:
    command = _command(parsed, given)
    options = vars(parsed)
    fields = {
        name: value
        for name, value in options.items()
        if name not in ("recipe", "override", "output", "toleration")
    }
    fields["env"] = dict(run.variable("env", text) for text in options["env"])
    fields["node_selector"] = dict(
        run.node_selector("node_selector", text)
        for text in options["node_selector"]
    )
    fields["tolerations"] = [
        run.toleration("toleration", text) for text in options["toleration"]
    ]
    return run.Run(command=command, **fields)


def _dump(found: Sequence[Mapping[str, Any]]) -> str:
    try:
        import yaml
    except ImportError as error:
        raise ValueError(
            "PyYAML writes the manifests and is not installed: pip install "
            "'tfdistill[schedulers]'."
        ) from error

    class Dumper(yaml.SafeDumper):
        """Writes what occurs twice in full, as people read it."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump_all(
        found, Dumper=Dumper, sort_keys=False, explicit_start=True
    )


def _write(found: Sequence[Mapping[str, Any]], output: str | None) -> None:
    if output is None:
        print(_dump(found), end="")
        return
    path = pathlib.Path(output)
    if not path.is_dir() and not output.endswith("/"):
        path.write_text(_dump(found), "utf-8")
        return
    path.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(found):
        # kubectl reads a directory's files by name: services come first.
        kind, name = each["kind"].lower(), each["metadata"]["name"]
        file = path / f"{number:03d}-{name}-{kind}.yaml"
        file.write_text(_dump([each]), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name. Default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    parser = _make_parser()
    before, command = cli.split_command(sys.argv[1:] if argv is None else argv)
    options = parser.parse_args(before)
    try:
        run = _make_run(options, command)
        _write(objects(run), options.output)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if run.volume_claim is None:
        print(
            f"{_PROG}: no --volume_claim: {run.workdir} ends with its pod, and "
            "with it backups, logs and results. A task on another node starts "
            "from step 0.",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
