"""Tables, lists and figures of a report in Markdown."""

from collections.abc import Sequence


def section(title: str, text: str) -> str:
    """Returns a text under a heading; empty without one."""
    return f"## {title}\n\n{text}" if text else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""Returns a table; empty without rows.

    Example:
        >>> print(table(["a", "b"], [["1", "2|3"]]))
        | a | b |
        | --- | --- |
        | 1 | 2\|3 |
    """
    if not rows:
        return ""
    lines = [
        " | ".join(cell.replace("|", "\\|") for cell in row)
        for row in (head, ["---"] * len(head), *rows)
    ]
    return "\n".join(f"| {line} |" for line in lines)


def bullets(lines: Sequence[str]) -> str:
    """Returns a list; empty without lines."""
    return "\n".join(f"- {line}" for line in lines)


def figure(
    value: float | None, shape: str, interval: Sequence[float] | None = None
) -> str:
    """Returns a figure with its interval; empty without a figure.

    Example:
        >>> figure(0.5, ".2f"), figure(0.5, "+.2f", (0.4, 0.6))
        ('0.50', '+0.50 (+0.40 to +0.60)')
    """
    if value is None:
        return ""
    text = format(value, shape)
    if interval is not None:
        low, high = (format(end, shape) for end in interval)
        text += f" ({low} to {high})"
    return text
