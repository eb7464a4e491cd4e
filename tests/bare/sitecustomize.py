"""What shortens the start of the processes that tests start.

They find this file through PYTHONPATH, which conftest.py sets.

`import keras` imports scikit-learn, matplotlib, pandas, SciPy and IPython if it
finds them, TensorBoard boto3 and fsspec: a third of the time of a start. A user
who installs tfdistill alone has none of them. Here neither finds them, while
the tests' own code still does.

Python's collector looks through a million objects again and again while
TensorFlow is imported, a fifth of that time, and finds no garbage: here it
waits for more new objects before it looks.

A test that fails because nothing happens asks by a signal for the stacks of all
threads (tests/cases/waits.py).
"""

import faulthandler
import gc
import signal
import sys
from typing import Any

# By the package of the module that asks.
_HIDDEN = {
    "keras": {"IPython", "matplotlib", "pandas", "scipy", "sklearn"},
    "tensorboard": {"boto3", "botocore", "fsspec"},
}
# A parent of tasks imports what they need later once for all of them.
if any(word.endswith("fork_server.py") for word in sys.orig_argv):
    _HIDDEN["keras"] -= {"scipy", "sklearn"}
_NAMES = frozenset().union(*_HIDDEN.values())


class _Hidden:
    """A finder that hides optional packages from those who ask for them."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if name not in _NAMES:
            return
        frame = sys._getframe(1)
        while frame is not None:
            asking = frame.f_globals.get("__name__", "").partition(".")[0]
            if asking in ("importlib", "_frozen_importlib"):
                frame = frame.f_back
                continue
            if name in _HIDDEN.get(asking, ()):
                raise ModuleNotFoundError(
                    f"{name} is hidden from {asking} in tests", name=name
                )
            return


sys.meta_path.insert(0, _Hidden)
gc.set_threshold(100_000, 50, 50)
faulthandler.register(signal.SIGUSR2, file=2)
