"""What a publisher runs on, for the manifests of what it publishes."""

import functools
import importlib.metadata
import platform
import sys
import types
from collections.abc import Mapping

import tfdistill


@functools.cache
def found() -> Mapping[str, str]:
    """Returns the versions of Python, tfdistill, Keras and TensorFlow.

    Neither of the last two is imported for it, and one that is not installed
    is left out.
    """
    versions = {
        "python": platform.python_version(),
        "tfdistill": tfdistill.__version__,
    }
    for name in ("keras", "tensorflow"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is None:
            try:
                version = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        versions[name] = str(version)
    return types.MappingProxyType(versions)
