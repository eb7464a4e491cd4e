"""Writes the manifests that run a script or a recipe on Kubernetes.

python -m launch.kubernetes --form=job --name=run1 --image=IMAGE \
    --num_groups=2 --workers_per_group=2 --volume_claim=runs \
    --workdir=/mnt/run1 --recipe=digits | kubectl apply -f -

Nothing is sent anywhere: what is written is for `kubectl apply`.
"""

import pathlib
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from absl import logging

from launch import recipe_options
from launch import recipes
from launch.kubernetes import objects as objects_lib
from launch.kubernetes import run
from tfdistill.launcher import command as launcher
from tfdistill.system import programs

_OBJECTS = {
    "job": objects_lib.job_objects,
    "jobset": objects_lib.jobset_objects,
}
_NOTES = """\
The command after -- runs in each container with TF_CONFIG and TFDISTILL_* set.
A recipe runs as python -m launch.train, so the image must contain this
checkout. DIR is an absolute path in the containers; without --volume_claim it
is lost when its pod ends. docs/kubernetes.md describes restarts, keys and GPUs.
Exit code: 0, or 2 for wrong options.
"""


def objects(run: run.Run) -> list[dict[str, Any]]:
    """Returns the objects of Kubernetes that make up a run, in order."""
    return _OBJECTS[run.form](run)


def _add_options(options: programs.Flags) -> None:
    options.section("run")
    add = options.add
    add(
        "form",
        "job: Indexed Jobs, which need no operator; jobset: one JobSet for "
        "each group",
        enum_values=run.FORMS,
        required=True,
    )
    for name, text in (
        ("name", "<NAME>: name of the run, a DNS label"),
        ("image", "<IMAGE>: image of the containers"),
    ):
        add(name, text, required=True)
    launcher.add_topology(options)
    options.section("files")
    for name, text in (
        ("volume_claim", "<NAME>: PersistentVolumeClaim with the workdir"),
        ("mount_path", "<DIR>: where it is mounted; default the workdir"),
        (
            "output",
            "<FILE>: file to write, or a directory for a file for each object",
        ),
    ):
        add(name, text)
    recipe_options.add(options)
    _add_pods(options)
    _add_limits(options)


def _add_pods(options: programs.Flags) -> None:
    options.section("pods")
    add = options.add
    for name, text in (
        ("namespace", "<NAME>: namespace of all objects; default kubectl's"),
        ("key_secret", "<NAME>: Secret whose entry 'key' signs the versions"),
        ("service_account", "<NAME>: service account of the pods"),
        ("queue", "<NAME>: LocalQueue of Kueue that admits each JobSet"),
        ("cpus_per_worker", "<CPUS>: for each worker and chief, such as 4"),
        ("memory_per_worker", "<SIZE>: for each worker and chief, such as 8Gi"),
        ("cpus_per_ps", "<CPUS>: for each ps; default: as for a worker"),
        ("memory_per_ps", "<SIZE>: for each ps; default: as for a worker"),
    ):
        add(name, text)
    add("gpus_per_worker", "GPUs of each worker; one is best", 0)
    add("shm_size", "<SIZE>: of /dev/shm", "1Gi")
    add("run_as_user", "<UID>: default the image's", kind=int)
    for name, form, text in (
        ("node_selector", "KEY=VALUE", "label that a node must have"),
        ("toleration", "KEY[=VALUE][:EFFECT]", "taint that a node may have"),
        ("env", "NAME=VALUE", "variable to set for each task"),
    ):
        add(name, f"<{form}>: {text}", [])


def _add_limits(options: programs.Flags) -> None:
    options.section("limits")
    for name, default, text in (
        ("max_restarts", 10, "how often a group may be restarted"),
        ("start_timeout_secs", 1800, "how long tasks wait for each other"),
        (
            "keep_secs",
            None,
            "delete a job and its logs this long after it has ended; default "
            "never",
        ),
    ):
        options.add(name, text, default, kind=int)


def _command(options: programs.Options) -> list[str]:
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
        options, python="python", workdir=options.workdir
    )


def _make_run(parsed: programs.Options) -> run.Run:
    options = vars(parsed) | {"command": _command(parsed)}
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
    return run.Run(**fields)


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


def _run(options: programs.Options) -> int:
    try:
        run = _make_run(options)
        _write(objects(run), options.output)
    except (ValueError, OSError) as error:
        raise programs.UsageError(str(error)) from error
    if run.volume_claim is None:
        logging.warning(
            "no --volume_claim: %s ends with its pod, and with it backups, "
            "logs and results. A task on another node starts from step 0.",
            run.workdir,
        )
    return 0


PROGRAM = programs.Program(
    name="python -m launch.kubernetes",
    usage=(
        "--workdir=DIR ... [options] -- COMMAND [ARGUMENT ...]\n"
        "--workdir=DIR ... [options] --recipe=NAME"
    ),
    about="Writes manifests that run groups of tasks on Kubernetes.",
    notes=_NOTES,
    define=_add_options,
    run=_run,
    takes_command=True,
)
main = PROGRAM.main

if __name__ == "__main__":
    PROGRAM.start()
