"""The status of a run as one output of a notebook's cell, updated in place.

A live view of rich needs ipywidgets there, which not every notebook has.
"""

import collections
import html
import importlib
import io
import sys
import time
from typing import Any

import rich.console

from tfdistill.status import group
from tfdistill.status import tables

_WIDTH = 100
_MOST_MESSAGES = 12
_PAUSE_SECS = 0.5


def _shell() -> Any:
    """Returns IPython's shell if this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell if hasattr(shell, "kernel") else None


def is_here() -> bool:
    """Whether a notebook shows what this process displays."""
    return _shell() is not None


class NotebookDisplay(tables.Display):
    """Shows the table of groups, and the last messages below it."""

    def __init__(self) -> None:
        """Opens an output in the running cell."""
        super().__init__(plain=True)
        self._messages: collections.deque[str] = collections.deque(
            maxlen=_MOST_MESSAGES
        )
        self._table = self._drawn = ""
        self._next_secs = 0.0
        self._output: Any = None

    def say(self, text: str) -> None:
        """Adds a message; the oldest is left out."""
        self._messages.append(text)
        self._draw()

    def show(self, run: group.RunStatus) -> None:
        """Shows the present status."""
        console = rich.console.Console(
            file=io.StringIO(),
            width=_WIDTH,
            color_system=None,
            force_jupyter=False,
        )
        with console.capture() as text:
            console.print(tables.view(run, width=_WIDTH))
        self._table = "\n".join(map(str.rstrip, text.get().splitlines()))
        self._draw()

    def close(self) -> None:
        """Leaves the last view in the output."""
        self._next_secs = 0.0
        self._draw()

    def _draw(self) -> None:
        text = "\n".join(filter(None, [self._table, *self._messages]))
        now = time.monotonic()
        if text == self._drawn or now < self._next_secs:
            return
        self._drawn, self._next_secs = text, now + _PAUSE_SECS
        page = f'<pre style="line-height: normal">{html.escape(text)}</pre>'
        bundle = {"text/plain": text, "text/html": page}
        if self._output is None:
            display = importlib.import_module("IPython.display").display
            self._output = display(bundle, raw=True, display_id=True)
        else:
            self._output.update(bundle, raw=True)
