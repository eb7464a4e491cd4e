"""Do TF_CONFIG and the TFDISTILL_ variables describe a task that can run?

The ranges stand in pyproject.toml, and in the metadata of the installed
package; they are read from there, so that no second list can differ.
"""

import importlib.metadata
import os
import pathlib
import platform
import tomllib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

from packaging import requirements
from packaging import specifiers

from tfdistill import _version
from tfdistill.cluster import identity
from tfdistill.doctor import check
from tfdistill.exchange import signing

ENVIRONMENT = "environment"
KEY = "key"


def cluster_of(
    environ: Mapping[str, str] | None = None,
) -> tuple[identity.Cluster | None, check.Result]:
    """Reads the environment of this task; None if it describes no task."""
    try:
        cluster = identity.Cluster.from_env(environ)
    except ValueError as error:
        # "... must ...; received ...": the rest is the remedy.
        text = str(error)
        seen, _, remedy = text.partition(". ")
        return None, check.failed(
            ENVIRONMENT,
            seen,
            remedy or "Correct that variable and start again.",
        )
    return cluster, check.ok(ENVIRONMENT, _describe(cluster))


def _describe(cluster: identity.Cluster) -> str:
    sizes = ", ".join(
        f"{len(hosts)} {name}" for name, hosts in cluster.spec.items()
    )
    where = f" at {cluster.address}" if cluster.address else ""
    peers = ", ".join(f"group {peer}" for peer in cluster.peers) or "none"
    return (
        f"group {cluster.group} of {cluster.num_groups}, {cluster.task_name}"
        f"{where}; its tasks: {sizes or 'this one'}; peers: {peers}; exchange: "
        f"{cluster.exchange or 'none'}"
    )


def peers(
    cluster: identity.Cluster, environ: Mapping[str, str] | None = None
) -> Iterator[check.Result]:
    """Checks what makes several groups work together."""
    environ = os.environ if environ is None else environ
    if cluster.num_groups == 1:
        has_number = "TFDISTILL_NUM_GROUPS" in environ
        if "TFDISTILL_EXCHANGE" in environ and not has_number:
            yield check.warning(
                ENVIRONMENT,
                "TFDISTILL_EXCHANGE is set and TFDISTILL_NUM_GROUPS is not: "
                "this is one group, and it learns from nobody",
                "export TFDISTILL_NUM_GROUPS and TFDISTILL_GROUP for each "
                "task.",
            )
        return
    if cluster.exchange is None:
        yield check.failed(
            ENVIRONMENT,
            f"{cluster.num_groups} groups have no exchange to meet in",
            "export TFDISTILL_EXCHANGE, a directory or URL that all groups "
            "reach, or TFDISTILL_WORKDIR.",
        )
    if "TFDISTILL_GROUP" not in environ:
        yield check.failed(
            ENVIRONMENT,
            f"TFDISTILL_GROUP is not set in a run of {cluster.num_groups} "
            "groups: every group would be group 0",
            "export TFDISTILL_GROUP, from 0 up, for each task.",
        )


def key(
    environ: Mapping[str, str] | None = None, *, num_groups: int = 2
) -> Iterator[check.Result]:
    """Checks the key that versions are signed with; one group needs none."""
    environ = os.environ if environ is None else environ
    try:
        signer = signing.signer_for("environment", environ)
    except ValueError as error:
        yield check.failed(
            KEY,
            str(error),
            "openssl rand -hex 32 > key; chmod 600 key; then export "
            f"{signing.FILE_VARIABLE}=/path/to/key for every task of every "
            "group.",
        )
        return
    if signer is None and num_groups == 1:
        yield check.skipped(KEY, "one group alone needs no key")
    elif signer is None:
        yield check.warning(
            KEY,
            "no key is set: versions are neither signed nor checked, and "
            "whoever can write to the exchange can teach this group",
            f"export {signing.FILE_VARIABLE} with the same key for every task "
            "of every group; launch.local makes one by itself.",
        )
    else:
        yield check.ok(KEY, "a key is set: versions are signed and checked")


_PROJECT = pathlib.Path(__file__).parents[2] / "pyproject.toml"


def ranges(
    project: pathlib.Path = _PROJECT,
    *,
    metadata: Callable[[str], Any] = importlib.metadata.metadata,
) -> Mapping[str, str]:
    """Returns the range of each requirement by name, Python's as `python`.

    The pyproject.toml of a checkout goes before the metadata of what is
    installed.
    """
    try:
        found = tomllib.loads(project.read_text("utf-8"))["project"]
        if found["name"] != "tfdistill":
            raise KeyError("another project's")
        python, wanted = found["requires-python"], found["dependencies"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        try:
            installed = metadata("tfdistill")
        except importlib.metadata.PackageNotFoundError:
            return {}
        python = installed["Requires-Python"] or ""
        wanted = installed.get_all("Requires-Dist") or []
    result = {"python": str(specifiers.SpecifierSet(python))}
    for requirement in map(requirements.Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            result[requirement.name.lower()] = str(requirement.specifier)
    return result


def fits(version: str, wanted: str) -> bool:
    """Whether a version, which may be one before a release, is in a range.

    Example:
        >>> fits("3.13.2", ">=3.11,<3.14"), fits("3.14.0rc1", ">=3.11,<3.14")
        (True, False)
    """
    return specifiers.SpecifierSet(wanted).contains(version, prereleases=True)


VERSIONS = "versions"
TENSORFLOW = "tensorflow"


def _installed(name: str) -> str | None:
    if name == "python":
        return platform.python_version().rstrip("+")  # Built from a checkout.
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def of_packages(
    wanted: Mapping[str, str] | None = None,
    *,
    installed: Callable[[str], str | None] = _installed,
) -> Iterator[check.Result]:
    """Compares what is installed with what is supported."""
    wanted = ranges() if wanted is None else wanted
    if not wanted:
        yield check.warning(
            VERSIONS,
            "tfdistill is not installed as a package, and no pyproject.toml "
            "lists the supported versions",
            "Install it: pip install tfdistill, or pip install -e . in its "
            "checkout.",
        )
        return
    good = [f"tfdistill {_version.__version__}"]
    for name, limits in sorted(wanted.items()):
        found = installed(name)
        if found is not None and fits(found, limits):
            good.append(f"{name} {found}")
            continue
        what = "is not installed" if found is None else f"is {found}"
        how = (
            "Run it with a Python in this range."
            if name == "python"
            else f"pip install '{name}{limits}'"
        )
        yield check.failed(
            VERSIONS, f"{name} {what}, and must be {limits or 'installed'}", how
        )
    yield check.ok(VERSIONS, ", ".join(good))


def of_backend(
    environ: Mapping[str, str] | None = None,
) -> Iterator[check.Result]:
    """Checks that Keras is to run on TensorFlow."""
    environ = os.environ if environ is None else environ
    backend = environ.get("KERAS_BACKEND", "")
    if backend not in ("", "tensorflow"):
        yield check.failed(
            VERSIONS,
            f"KERAS_BACKEND is {backend!r}, and tfdistill needs Keras on "
            "TensorFlow",
            "unset KERAS_BACKEND, or export KERAS_BACKEND=tensorflow",
        )
    else:
        yield check.ok(VERSIONS, "Keras is to run on TensorFlow")


def of_tensorflow() -> Iterator[check.Result]:
    """Imports TensorFlow and Keras, and looks at the devices."""
    import tensorflow as tf

    from tfdistill.system import keras_internals

    try:
        keras_internals.check_keras()
    except RuntimeError as error:
        yield check.failed(
            TENSORFLOW, str(error), "Install the versions named above."
        )
        return
    gpus = [gpu.name for gpu in tf.config.list_physical_devices("GPU")]
    cores = os.cpu_count()
    yield check.ok(
        TENSORFLOW,
        f"TensorFlow {tf.__version__} sees {len(gpus)} GPUs and {cores} cores",
    )
    if not gpus and _has_nvidia():
        yield check.warning(
            TENSORFLOW,
            "this machine has an NVIDIA device, and TensorFlow does not see it",
            "pip install 'tensorflow[and-cuda]', and look at "
            "CUDA_VISIBLE_DEVICES and nvidia-smi; or ignore it to train on "
            "the CPU.",
        )


def _has_nvidia() -> bool:
    return os.path.exists("/dev/nvidia0")
