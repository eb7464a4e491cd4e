"""The fenced blocks of the documentation's pages.

A page's conventions:

- a Python block whose first line is `# name.py` is the file of that name; the
  others of a page are run one after the other, in one namespace;
- a `diff` that begins with `# name.py` is that file once it is applied;
- a block in `sh`, `bash` or no language holds commands, not what they print;
- `<!-- not run: reason -->` in the line before a block: why no test runs it.
"""

import dataclasses
import pathlib
import re
import shlex

ROOT = pathlib.Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^(`{3,})(\w*)\s*$")
_MARKER = re.compile(r"^<!-- not run: (.+) -->$")
_FILE = re.compile(r"^# ([\w/]+\.py)$")
SHELL = ("", "bash", "sh")
# Languages of blocks that are there to be read.
READ = ("diff", "dockerfile", "json", "text", "yaml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def file_name(self) -> str | None:
        found = _FILE.match(self.text.partition("\n")[0])
        return found[1] if found and self.language == "python" else None

    @property
    def applied(self) -> str:
        """What a diff leaves of a file."""
        lines = self.text.splitlines()
        kept = [line[1:] for line in lines if not line.startswith("-")]
        return "".join(f"{line}\n" for line in kept)

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command of a shell block."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        return [found for found in words if found]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    docs = sorted((ROOT / "docs").glob("*.md"))
    names = [path.relative_to(ROOT).as_posix() for path in docs]
    return ["README.md", "CONTRIBUTING.md", *names]


def read(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def blocks(page: str) -> list[Block]:
    found, fence, reason = [], None, ""
    for number, line in enumerate(read(page).splitlines(), 1):
        opening = _FENCE.match(line)
        if fence is None and opening:
            fence, language, start, kept = opening[1], opening[2], number, []
        elif fence is None:
            if reason:
                raise ValueError(
                    f"{page}:{number}: a `not run` marker must stand in the "
                    f"line before a block; received {line!r}."
                )
            marker = _MARKER.match(line)
            reason = marker[1] if marker else ""
        elif line == fence:
            found.append(
                Block(
                    page=page,
                    line=start,
                    language=language,
                    text="".join(f"{text}\n" for text in kept),
                    not_run=reason,
                )
            )
            fence, reason = None, ""
        else:
            kept.append(line)
    if fence is not None:
        raise ValueError(f"{page}:{start}: this block is not closed.")
    return found
