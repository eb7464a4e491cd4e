"""Makes Keras find this package's classes by name before they are imported.

A `.keras` file names each class as "tfdistill>ShardedEmbedding". Keras looks
that name up among the classes registered so far and ignores the module beside
it, so `import tfdistill`, which loads neither TensorFlow nor Keras, would not
be enough to read such a file. What is registered here is a stub for each
class; the module of the class is imported when a file asks for it.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

_PACKAGE = "tfdistill"


def register(homes: Mapping[str, str]) -> None:
    """Registers stubs for classes, now or once `keras` is imported.

    `homes` has the module of each class, by the name of the class.
    """
    if sys.modules.get("keras") is not None:
        _register_stubs(homes)
    else:
        sys.meta_path.insert(0, _AfterKeras(homes))


def _register_stubs(homes: Mapping[str, str]) -> None:
    known = importlib.import_module("keras").saving.get_custom_objects()
    for name, home in homes.items():
        # Importing the class replaces its stub.
        known.setdefault(f"{_PACKAGE}>{name}", _Stub(name, home))


class _Stub:
    """Stands for a class in Keras' registry; Keras calls `from_config`."""

    def __init__(self, name: str, home: str) -> None:
        self.__name__, self._home = name, home

    def from_config(self, *args: Any, **kwargs: Any) -> Any:
        found = getattr(importlib.import_module(self._home), self.__name__)
        return found.from_config(*args, **kwargs)


class _AfterKeras(importlib.abc.MetaPathFinder):
    """Runs once: finds `keras` as others do, and registers after its import."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            _register_stubs(self._homes)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
