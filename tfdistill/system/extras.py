"""Packages: which versions there are, and how to get a missing one."""

import contextlib
import importlib.util
import platform
import sys
from collections.abc import Iterator

from tfdistill import _version

# What `pip install "tfdistill[EXTRA]"` brings, by the name that is imported.
_EXTRAS = {
    "grpc": "teach",
    "matplotlib": "compare",
    "scipy": "compare",
    "tensorflow_serving": "teach",
    "yaml": "kubernetes",
}


class MissingError(ModuleNotFoundError):
    """A package of an extra isn't installed; one line says how to get it."""


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Raises MissingError for `what` if a package of an extra isn't found."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingError(
            f"{what} needs {package}: pip install "
            f'"tfdistill[{_EXTRAS[package]}]"',
            name=package,
        ) from error


def check(*packages: str) -> None:
    """Raises ModuleNotFoundError unless all can be imported, importing none.

    For what would otherwise be found out after long work.
    """
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def installed_versions() -> dict[str, str]:
    """Returns the versions of Python, tfdistill, Keras and TensorFlow.

    The last two only if they are imported.
    """
    loaded = {name: sys.modules.get(name) for name in ("keras", "tensorflow")}
    return {
        "python": platform.python_version(),
        "tfdistill": _version.__version__,
        **{n: str(m.__version__) for n, m in loaded.items() if m is not None},
    }
