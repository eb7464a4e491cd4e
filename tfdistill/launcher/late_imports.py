"""What Keras and TensorBoard only look for: imported when a task wants it.

`import keras` imports scikit-learn, matplotlib, pandas, SciPy and IPython if
they are there, a third of its processor time, and few tasks use them. The
parent of tasks leaves them out, in two ways. A task finds all of it as in a new
program, only later:

- Modules that are nothing but a way to such a package run when a task first
  looks into them.
- The others don't find the package. They run again, and look again, once the
  task has imported it: they need it only for objects that it has made.

Needs the standard library only, as fork_server.py.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_LATER = {
    "keras._tf_keras.keras.visualization",
    "keras._tf_keras.keras.wrappers",
    "keras.src.visualization",
    "keras.visualization",
    "keras.wrappers",
    "tensorboard.compat.tensorflow_stub.io.gfile",
}
_HIDDEN = {"IPython", "pandas", "scipy"}
# These don't find them: Keras, and the older Keras that TensorFlow contains.
_FROM = ("keras.", "tensorflow.python.keras.")


class _Later(ModuleType):
    """A module that has not run yet."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            # A search through all modules, as by inspect, needs none of it.
            raise AttributeError(f"{self.__name__!r} has no {name!r} yet")
        self.__class__ = ModuleType  # type: ignore[assignment]
        self.__spec__.loader.exec_module(self)  # type: ignore[union-attr]
        return getattr(self, name)

    def __dir__(self) -> list[str]:
        self.__all__  # noqa: B018
        return dir(self)


class _Loader:
    """Makes a module that runs later."""

    def __init__(self, loader: object) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Later(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader


class Finder:
    """Finds the packages and modules above; first in `sys.meta_path`."""

    def __init__(self) -> None:
        self._is_parent = True
        # By package, the modules that did not find it.
        self._asking: dict[str, list[str]] = {}

    def in_task(self) -> None:
        """Hides nothing from now on."""
        self._is_parent = False

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Finds a module, as `sys.meta_path` has it."""
        if name in _LATER:
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            if spec is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
            return spec
        if name not in _HIDDEN:
            return None
        asking = _asking()
        if self._is_parent and asking.startswith(_FROM):
            self._asking.setdefault(name, []).append(asking)
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if not (modules := self._asking.pop(name, [])):
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_both(module: Any) -> None:
                run(module)
                for one in modules:
                    importlib.reload(sys.modules[one])

            spec.loader.exec_module = run_both  # type: ignore[method-assign]
        return spec


def _asking() -> str:
    """Returns the name of the module that imports another."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("importlib", "_frozen_importlib"):
            return name
        frame = frame.f_back
    return ""
