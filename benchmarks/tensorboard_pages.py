"""A TensorBoard and a headless browser that looks at its dashboards."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

_BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_START_SECS, _STOP_SECS, _PAGE_SECS = 180.0, 20.0, 120.0


def find_browser() -> str | None:
    """Returns the path of a Chromium that is installed, or None."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


class TensorBoard:
    """A TensorBoard that serves a directory on a free port of this machine.

    Attributes:
        url: Where it serves, with a slash at the end.
    """

    def __init__(self, url: str) -> None:
        """Takes its address; see `serving`."""
        self.url = url

    def data(self, path: str) -> Any:
        """Returns what a data endpoint answers, from JSON.

        Args:
            path: Under `url`, such as `data/runs`.
        """
        with urllib.request.urlopen(self.url + path, timeout=60.0) as answer:
            return json.load(answer)

    def page(self, dashboard: str, *, query: str = "") -> str:
        """Returns the address of a dashboard.

        Args:
            dashboard: Such as `timeseries`.
            query: Options of the page, such as `smoothing=0`.
        """
        # Curves as elements of the page, not as pixels.
        return f"{self.url}?darkMode=false&forceSVG=true&{query}#{dashboard}"


@contextlib.contextmanager
def serving(logdir: str) -> Iterator[TensorBoard]:
    """Runs TensorBoard until the end of the block.

    Args:
        logdir: What to show.

    Raises:
        RuntimeError: It does not start in time.
    """
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tensorboard.main"),
            *("--logdir", logdir, "--host", "127.0.0.1", "--port", "0"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Also where it says nothing at all.
    limit = threading.Timer(_START_SECS, process.kill)
    limit.start()
    reader = threading.Thread(target=lambda: None)
    try:
        board = TensorBoard(_address(process))
        limit.cancel()
        # It must not wait for somebody to read the rest.
        reader = threading.Thread(target=process.communicate, daemon=True)
        reader.start()
        _wait_for_runs(board)
        yield board
    finally:
        limit.cancel()
        process.terminate()
        try:
            process.wait(_STOP_SECS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident is not None:
            reader.join(_STOP_SECS)


def _address(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stdout or ():
        found = re.search(r"(http://[^ ]+/) \(Press", line)
        if found:
            return found.group(1)
        said.append(line)
    raise RuntimeError(
        f"TensorBoard did not start within {_START_SECS:g} s:\n{''.join(said)}"
    )


def _wait_for_runs(board: TensorBoard) -> None:
    """Its data server reads the files in the background."""
    end = time.monotonic() + _START_SECS
    while time.monotonic() < end:
        with contextlib.suppress(urllib.error.URLError):
            if board.data("data/runs"):
                return
        time.sleep(0.2)
    raise RuntimeError(f"TensorBoard found no run within {_START_SECS:g} s.")


@contextlib.contextmanager
def browser_page(path: str, *, width: int, height: int) -> Iterator[Any]:
    """Opens a page in a new profile of a headless browser.

    Args:
        path: Of the browser.
        width: Of the page, in pixels.
        height: Likewise.
    """
    # Only here: the rest is of use without it.
    from playwright import sync_api

    with sync_api.sync_playwright() as driver:
        # Its profile is a new temporary directory.
        browser = driver.chromium.launch(
            executable_path=path, args=list(_OPTIONS)
        )
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(_PAGE_SECS * 1000)
            yield page
        finally:
            browser.close()
