"""What shortens the start of the processes that tests start.

They find this file through PYTHONPATH, which conftest.py sets.

`import keras` imports scikit-learn and matplotlib if it finds them, a third of
its time; a user who installs tfdistill alone has neither. Keras finds neither
here, while the tests' own code still does.

Python's collector looks through a million objects again and again while
TensorFlow is imported, a fifth of that time, and finds no garbage: here it
waits for more new objects before it looks.
"""

import gc
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
gc.set_threshold(100_000, 50, 50)
