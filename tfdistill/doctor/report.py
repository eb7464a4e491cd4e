"""What the doctor says, to people and to scripts."""

from collections.abc import Sequence
from typing import Any
from typing import TextIO

import rich.console
import rich.text

from tfdistill import plain_text
from tfdistill.doctor import check

FORMAT = 1
_STYLES = {
    check.OK: "green",
    check.WARNING: "yellow",
    check.FAILED: "bold red",
    check.SKIPPED: "dim",
}
_WIDTH = max(map(len, _STYLES))
_INDENT = " " * (_WIDTH + 2)


class Report:
    """Prints each result as it comes."""

    def __init__(self, stream: TextIO, *, plain: bool = False) -> None:
        """Prints nothing yet.

        Args:
            stream: Where to print.
            plain: Whether to do without colours even on a terminal.
        """
        self._console = rich.console.Console(
            file=stream, no_color=plain or None, soft_wrap=True
        )

    def add(self, result: check.Result) -> None:
        """Prints one result: its status, what was seen, and the remedy."""
        line = rich.text.Text()
        line.append(f"{result.status:<{_WIDTH}}", _STYLES[result.status])
        line.append(f"  {result.name}: ")
        line.append(plain_text.one_line(result.seen, max_chars=2000))
        if result.remedy:
            line.append(f"\n{_INDENT}remedy: ", "bold")
            line.append(plain_text.one_line(result.remedy, max_chars=2000))
        self._console.print(line, soft_wrap=True)

    def end(self, results: Sequence[check.Result]) -> None:
        """Prints how many there were of each status."""
        self._console.print(summary(results), soft_wrap=True, highlight=False)


def summary(results: Sequence[check.Result]) -> str:
    """Returns how many results there are of each status."""
    counts = [
        f"{sum(r.status == status for r in results)} {status}"
        for status in _STYLES
    ]
    return ", ".join(counts)


def document(results: Sequence[check.Result]) -> dict[str, Any]:
    """Returns all results as one JSON document.

    Args:
        results: All of them.
    """
    return {
        "format": FORMAT,
        "failed": sum(r.status == check.FAILED for r in results),
        "warnings": sum(r.status == check.WARNING for r in results),
        "results": [
            {
                "name": r.name,
                "status": r.status,
                "seen": r.seen,
                "remedy": r.remedy or None,
                "secs": round(r.secs, 3),
            }
            for r in results
        ],
    }
