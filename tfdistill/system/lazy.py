"""Names of a package that resolve on first use."""

import importlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from tfdistill.system import extras

Hooks = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]


def attach(package: str, names: Mapping[str, Sequence[str]]) -> Hooks:
    """Returns a package's `__getattr__`, `__dir__` and `__all__`.

    `names` has what each of its modules offers; a module that lists nothing
    is offered itself. Type checkers and editors read the imports that the
    package makes under `typing.TYPE_CHECKING`.
    """
    homes = {name: home for home, offered in names.items() for name in offered}
    modules = {home for home, offered in names.items() if not offered}

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            with extras.needed_by(f"{package}.{name}"):
                home = importlib.import_module(f"{package}.{homes[name]}")
            return getattr(home, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    everything = sorted([*homes, *modules])
    return get, lambda: list(everything), everything
