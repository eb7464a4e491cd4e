"""Chooses the tests that are closest to a change.

`python -m tests.affected [COMMIT]` prints the test files to run after an edit,
one a line; `bash tests/run.sh --changed[=COMMIT]` runs them, of both tiers.
What differs from the commit (HEAD) counts, new files too.

A fault shows in its own room or in one that can see it. So chosen are first the
tests of each room that has changed and the test files that name a changed
module, then those whose cases name one, then those that name a module which
imports one; of equal ones first those that take least. They end where they
would take longer than `BUDGET_SECS` by tests/durations.json. How many are left
out is said on stderr.
"""

import ast
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Process-seconds on an idle machine, of which two pass at once.
BUDGET_SECS = 360.0
_SOURCES = ("tfdistill", "models", "launch", "benchmarks", "tests")
# What all tests depend on.
_EVERYTHING = {"tests/conftest.py", "pyproject.toml", "requirements.txt"}
# The whole of a training, kept to the bit.
_ALWAYS = "tests.golden_test"


@functools.cache
def modules() -> dict[str, pathlib.Path]:
    """All Python modules of the checkout by their dotted names."""
    found = {}
    for source in _SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(p for p in parts if p != "__init__")] = path
    return found


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The name that each import binds, and what it is bound to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                yield name, alias.name if alias.asname else name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


@functools.cache
def _home(dotted: str) -> str | None:
    """The module in which a name stands; names of packages resolve late."""
    if dotted in modules():
        return dotted
    package, _, name = dotted.rpartition(".")
    if not package or (home := _home(package)) is None:
        return None
    if home == package and modules()[home].name == "__init__.py":
        tree = ast.parse(modules()[home].read_text("utf-8"))
        for bound, target in _imports(tree):
            if bound == name and target != dotted:
                return _home(target)
    return home


@functools.cache
def names(module: str) -> frozenset[str]:
    """The modules that a module names, by imports or by attributes."""
    tree = ast.parse(modules()[module].read_text("utf-8"))
    bound = dict(_imports(tree))
    found = {_home(target) for target in bound.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts = ast.unparse(node).split(".")
            if parts[0] in bound and all(map(str.isidentifier, parts)):
                found.add(_home(".".join([bound[parts[0]], *parts[1:]])))
    packages = {name for name in found if name and name.count(".") == 0}
    return frozenset(found - packages - {None, module})


@functools.cache
def _named_by_test(module: str) -> frozenset[str]:
    """What a module of tests names, by others of tests too."""
    found: set[str] = set()
    left = [module]
    while left:
        new = names(left.pop()) - found
        found |= new
        left += [name for name in new if name.startswith("tests.")]
    return frozenset(found)


def _tests() -> list[str]:
    return [name for name in modules() if name.endswith("_test")]


def _distance(test: str, changed: set[str]) -> int | None:
    """How far from a change a test file is: 0, 1, 2, or None if farther."""
    room = test.split(".")[1].removesuffix("_test")
    rooms = {name.split(".")[1] for name in changed if name.count(".")}
    named = _named_by_test(test)
    if room in rooms or (names(test) | {test}) & changed:
        return 0
    if named & changed:
        return 1
    if any(names(name) & changed for name in named):
        return 2
    return None


def choose(
    paths: Iterable[str], durations: dict[str, float]
) -> tuple[list[str], list[str]]:
    """Returns the test files to run for changed files, and those left out."""
    paths = set(paths)
    if paths & _EVERYTHING:
        return ["tests", "tfdistill"], []
    of_path = {str(p.relative_to(ROOT)): name for name, p in modules().items()}
    changed = {of_path[path] for path in paths if path in of_path}
    found = {test: _distance(test, changed) for test in _tests()}
    if paths - of_path.keys():  # Pages, scripts, tables.
        found |= {t: 0 for t in found if t.startswith("tests.project.")}
    if any(distance is not None for distance in found.values()):
        found[_ALWAYS] = 0
    near = sorted(
        (distance, durations.get(_path(test), 1.0), _path(test))
        for test, distance in found.items()
        if distance is not None
    )
    chosen, left, total = [], [], 0.0
    for distance, secs, path in near:
        total += secs
        fits = not distance or total <= BUDGET_SECS
        (chosen if fits else left).append(path)
    return chosen, left


def _path(test: str) -> str:
    return str(modules()[test].relative_to(ROOT))


def _differs(commit: str) -> list[str]:
    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments, "-z"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split("\0")[:-1]

    return [
        *git("diff", "--name-only", commit),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def main(commit: str = "HEAD") -> None:
    """Prints what to run."""
    durations = json.loads((ROOT / "tests" / "durations.json").read_text())
    chosen, left = choose(_differs(commit), durations)
    print("\n".join(chosen))
    if left:
        print(
            f"left to --all: {len(left)} files, such as {', '.join(left[:3])}",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
