"""References that are computed once, however many tests and runs need them.

They lie under .pytest_cache by everything that decides them: a change of any
source of the library, of the workloads or of the cases, of a version or of the
processor computes them again, as `tests/run.sh --fresh` does. TensorFlow's
rewriting of graphs changes last bits, so those with it and without are two.
"""

import functools
import hashlib
import importlib
import os
import pathlib
import platform
from collections.abc import Callable

import numpy as np
import tensorflow as tf

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_DIRECTORY = _ROOT / ".pytest_cache" / "references"
_SOURCES = ("tfdistill", "models", "tests/cases")
_PACKAGES = ("keras", "numpy", "tensorflow")

Arrays = dict[str, np.ndarray]


@functools.cache
def _key() -> str:
    """What all references of this checkout, on this machine, depend on."""
    # Not those of the installed `keras`, which keras-nightly may lie above.
    versions = [importlib.import_module(x).__version__ for x in _PACKAGES]
    digest = hashlib.sha256(repr([*versions, *_processor()]).encode())
    for source in _SOURCES:
        for path in sorted((_ROOT / source).rglob("*.py")):
            digest.update(str(path.relative_to(_ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> list[str]:
    """Its kind and instructions, by which TensorFlow chooses kernels."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    kinds = ("model name", "flags", "Features")
    found = {line for line in lines if line.startswith(kinds)}
    return [platform.machine(), *sorted(found)]


def kept(name: str, compute: Callable[[], Arrays]) -> Arrays:
    options = tf.config.optimizer.get_experimental_options()
    kind = "as_written" if options["disable_meta_optimizer"] else "rewritten"
    path = _DIRECTORY / _key() / kind / f"{name}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{name}.{os.getpid()}.npz")
        np.savez(draft, **compute())
        draft.replace(path)
    with np.load(path) as arrays:
        return dict(arrays)
