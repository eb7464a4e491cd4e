"""What shortens the start of the processes that tests start.

They find this file through PYTHONPATH, which conftest.py sets.

`import keras` imports what it only looks for later, as in forks of a parent of
tasks (tfdistill/launcher/late_imports.py).

Python's collector looks through a million objects again and again while
TensorFlow is imported, a fifth of that time, and finds no garbage: here it
waits for more new objects before it looks.

A test that fails because nothing happens asks by a signal for the stacks of all
threads (tests/cases/waits.py).
"""

import faulthandler
import gc
import pathlib
import runpy
import signal
import sys

_LAUNCHER = pathlib.Path(__file__).parents[2] / "tfdistill" / "launcher"
# A parent of tasks does so itself.
if not any(word.endswith("fork_server.py") for word in sys.orig_argv):
    _late_imports = runpy.run_path(str(_LAUNCHER / "late_imports.py"))
    sys.meta_path.insert(0, _late_imports["Finder"]())
gc.set_threshold(100_000, 50, 50)
faulthandler.register(signal.SIGUSR2, file=2)
