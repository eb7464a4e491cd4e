"""Are the versions those that tfdistill is made for, and do they work?"""

import importlib.metadata
import os
import platform
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping

import tfdistill
from tfdistill.doctor import check
from tfdistill.doctor import supported

NAME = "versions"
TENSORFLOW = "tensorflow"


def _installed(name: str) -> str | None:
    if name == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def of_packages(
    wanted: Mapping[str, str] | None = None,
    *,
    installed: Callable[[str], str | None] = _installed,
) -> Iterator[check.Result]:
    """Compares what is installed with what is supported.

    Args:
        wanted: Range by name. Default: those of tfdistill.
        installed: Returns the version of a package, or None.
    """
    wanted = supported.ranges() if wanted is None else wanted
    if not wanted:
        yield check.warning(
            NAME,
            "tfdistill is not installed as a package, and no pyproject.toml "
            "tells the supported versions",
            "Install it: pip install tfdistill, or pip install -e . in its "
            "checkout.",
        )
        return
    good = [f"tfdistill {tfdistill.__version__}"]
    for name, limits in sorted(wanted.items()):
        found = installed(name)
        if found is not None and supported.fits(found, limits):
            good.append(f"{name} {found}")
            continue
        what = "is not installed" if found is None else f"is {found}"
        how = (
            "Run it with a Python in this range."
            if name == "python"
            else f"pip install '{name}{limits}'"
        )
        yield check.failed(
            NAME, f"{name} {what}, and must be {limits or 'installed'}", how
        )
    yield check.ok(NAME, ", ".join(good))


def of_backend(environ: Mapping[str, str] | None = None) -> check.Result:
    """Checks that Keras is told to run on TensorFlow.

    Args:
        environ: Variables to read. Default `os.environ`.
    """
    environ = os.environ if environ is None else environ
    backend = environ.get("KERAS_BACKEND", "")
    if backend not in ("", "tensorflow"):
        return check.failed(
            NAME,
            f"KERAS_BACKEND is {backend!r}, and tfdistill needs Keras on "
            "TensorFlow",
            "unset KERAS_BACKEND, or export KERAS_BACKEND=tensorflow",
        )
    return check.ok(NAME, "Keras is to run on TensorFlow")


def of_tensorflow() -> Iterator[check.Result]:
    """Imports TensorFlow and Keras, and looks at the devices."""
    import tensorflow as tf

    from tfdistill import keras_internals

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
