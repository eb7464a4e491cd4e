"""Keras without the packages that it imports only because they are there.

`import keras` imports scikit-learn and matplotlib if it finds them, a third of
its time; a user who installs tfdistill alone has neither. The processes that
tests start find this file through PYTHONPATH, which conftest.py sets. Their own
code still imports both.
"""

import sys
from typing import Any

_OPTIONAL = frozenset({"matplotlib", "sklearn"})


class _NotForKeras:
    """A finder that hides the optional packages from Keras' own modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name not in _OPTIONAL:
            return
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("keras."):
                raise ModuleNotFoundError(
                    f"{name} is hidden from Keras in tests", name=name
                )
            frame = frame.f_back


sys.meta_path.insert(0, _NotForKeras)
