"""Writes the BUILD files from the imports of the sources.

    python tests/project/build_files.py

A folder with Python files is a package of Bazel: one py_library, and one
py_test for each test file. The public files of tfdistill/ belong to the top
BUILD, one target each. An import counts wherever it stands: in a function,
under TYPE_CHECKING, as the module name of `python -m` in a string, or in a
program held in a string. A target's deps leave out what another of them needs
itself.
"""

import argparse
import ast
import collections
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "launch", "models", "tests", "tfdistill")
_LIBRARY = "tfdistill"
FACE = f"{_LIBRARY}/__init__"
_PROGRAMS = "tests/programs"
# A test that names this folder reads pages of it.
DOCS = "docs"
# What every test needs: conftest.py, and the program that runs a test file.
_ALL_TESTS = ("tests/conftest", "tests/pytest_main")
PUBLIC_FILES = ("pyproject.toml", "requirements.txt")
# These tests read the checkout itself (git, every source), not Bazel's copy.
_MANUAL_FOLDER = "tests/project"
_EXPORTED = {"": PUBLIC_FILES, "tests": ("pytest_main.py",)}
_HEADER = '''"""The public files of tfdistill, and the whole of it.

Made by: python tests/project/build_files.py
"""

'''
# Where the name to import is not the name to install.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl_py",
    "google": "protobuf",
    "grpc": "grpcio",
    "kubeflow": "kubeflow_training",
    "sklearn": "scikit_learn",
    "tensorflow_serving": "tensorflow_serving_api",
    "yaml": "pyyaml",
}


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _program(text: str) -> ast.AST | None:
    """A string that is a program with imports; None for any other string."""
    if "import " not in text:
        return None
    try:
        return ast.parse(textwrap.dedent(text))
    except SyntaxError:
        return None


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


class Sources:
    """The Python files of a checkout, and what each of them imports.

    A file is named by its path without `.py`. What it imports are such names,
    "tfdistill" for the whole library, and "@pypi//numpy" for a package; what it
    needs is that and what is loaded with it.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.names = sorted(
            path.relative_to(root).as_posix().removesuffix(".py")
            for folder in FOLDERS
            for path in (root / folder).rglob("*.py")
        )
        self._known = set(self.names)
        self.imports = {name: self._imports(name) for name in self.names}
        self.imports[_LIBRARY] = {
            name for name in self.names if name.startswith(f"{_LIBRARY}/")
        }
        self.imports[DOCS] = set()
        self.needs = {
            name: found | self._implicit(name)
            for name, found in self.imports.items()
        }

    def _file_of(self, dotted: str, importer: str) -> str | None:
        """The file of a module that is ours; None if it is not."""
        name = dotted.replace(".", "/")
        inside = importer.startswith(f"{_LIBRARY}/")
        if name == _LIBRARY and not inside:
            return _LIBRARY
        places = [name]
        if importer.startswith("tests/"):
            places += [f"tests/{name}", f"{_folder(importer)}/{name}"]
        for place in places:
            for found in (place, f"{place}/__init__"):
                if found in self._known:
                    return found
        return None

    def _dotted(self, tree: ast.AST, importer: str) -> Iterator[str]:
        """Dotted names, each the longest that may be a module."""
        folder = importer.split("/")[:-1]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = folder[: len(folder) - node.level + 1]
                base = above if node.level else []
                parts = [*base, *([node.module] if node.module else [])]
                module = ".".join(parts)
                for alias in node.names:
                    full = f"{module}.{alias.name}"
                    ours = self._file_of(full, importer)
                    yield full if ours else module

    def _imported(
        self, tree: ast.AST, importer: str, *, strict: bool
    ) -> Iterator[str]:
        for dotted in self._dotted(tree, importer):
            top = dotted.partition(".")[0]
            ours = self._file_of(dotted, importer)
            if ours:
                yield ours
            elif top in FOLDERS or top == "conftest":
                # No such file: a test says so, BUILD can still be written.
                if strict:
                    yield dotted.replace(".", "/")
            elif top not in sys.stdlib_module_names:
                name = _DISTRIBUTIONS.get(top, top).replace("-", "_").lower()
                yield f"@pypi//{name}"

    def _imports(self, name: str) -> set[str]:
        tree = ast.parse((self.root / f"{name}.py").read_text("utf-8"))
        found = set(self._imported(tree, name, strict=True))
        for text in _strings(tree):
            if re.fullmatch(r"[a-z]\w*(\.\w+)+", text):
                module = self._file_of(text, name)
                found |= {module} if module else set()
            elif name.startswith("tests/") and (program := _program(text)):
                # Example programs may import what nobody has installed.
                inner = self._imported(program, "", strict=False)
                found |= {x for x in inner if not x.startswith("@")}
            elif name.endswith("_test") and text == DOCS:
                found.add(DOCS)
            elif name.endswith("_test") and text == "programs":
                # It runs one of them by its path.
                found |= {x for x in self.names if _folder(x) == _PROGRAMS}
        if name == FACE:
            # What it imports on first use belongs to the target `tfdistill`;
            # its modules need this file, so it cannot need them.
            found = {x for x in found if x.startswith("@")}
        return found - {name}

    def _implicit(self, name: str) -> set[str]:
        """What is loaded with a file: its packages; for a test, conftest."""
        parts = name.split("/")
        found = {
            f"{'/'.join(parts[:n])}/__init__" for n in range(1, len(parts))
        }
        if name.endswith("_test"):
            found |= set(_ALL_TESTS)
        return found & self._known - {name}


def reachable(needs: Mapping[str, Iterable[str]], name: str) -> set[str]:
    """Everything that `name` needs, directly or not."""
    seen: set[str] = set()
    left = list(needs[name])
    while left:
        found = left.pop()
        if found not in seen:
            seen.add(found)
            left += needs.get(found, ())
    return seen


def circles(needs: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """Each name that needs itself, with all that it makes a circle with."""
    all_needs = {name: reachable(needs, name) for name in needs}
    return {
        name: {x for x in found if name in all_needs.get(x, ())}
        for name, found in all_needs.items()
        if name in found
    }


class Targets:
    """The targets that hold the files: by label, what each of them needs.

    The files of a folder are one target. Where folders need each other in a
    circle, those files of a folder that the others need are a target each.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._apart = {
            name
            for name in sources.names
            if name.endswith("_test") or _folder(name) == _LIBRARY
        }
        while True:
            self._labels = {x: self._label(x) for x in sources.names}
            self._labels |= {x: f"//:{x}" for x in (_LIBRARY, DOCS)}
            self.needs = self._needs_of_labels()
            found = circles(self.needs)
            if not found:
                break
            self._apart |= self._to_take_apart(found)

    def _label(self, name: str) -> str:
        folder, _, file = name.rpartition("/")
        if name == f"{_LIBRARY}/_version":
            # The face imports it, and it is loaded with the face.
            return f"//:{FACE}"
        if folder == _LIBRARY:
            return f"//:{name}"
        return f"//{folder}:{file}" if name in self._apart else f"//{folder}"

    def _needs_of_labels(self) -> dict[str, set[str]]:
        needs = collections.defaultdict(set)
        for name, found in self._sources.needs.items():
            label = self._labels[name]
            needs[label] |= {self._labels.get(x, x) for x in found}
            needs[label].discard(label)
        return dict(needs)

    def _to_take_apart(self, found: Mapping[str, set[str]]) -> set[str]:
        """What the others need of the outermost folder, or of the smallest."""
        choices = []
        for label, circle in found.items():
            needed = set().union(
                *(
                    reachable(self._sources.needs, name)
                    for name in self._sources.names
                    if self._labels[name] in circle - {label}
                )
            )
            more = needed.intersection(self.files(label)) - self._apart
            if more:
                choices.append((label.count("/"), len(more), sorted(more)))
        if not choices:
            raise ValueError(f"Files import each other in a circle: {found}.")
        return set(min(choices)[-1])

    def data_folders(self, folder: str) -> list[str]:
        """Folders of a room of tests that hold files, none of them Python's."""
        if not folder.startswith("tests/"):
            return []
        inside = self._sources.root / folder
        suffixes = collections.defaultdict(set)
        for path in inside.rglob("*"):
            top = path.relative_to(inside).parts[0]
            if path.is_file() and not top.startswith((".", "__pycache__")):
                suffixes[top].add(path.suffix)
        return sorted(
            top
            for top, found in suffixes.items()
            if (inside / top).is_dir() and not found & {".py", ".pyc"}
        )

    def files(self, label: str) -> list[str]:
        return [x for x in self._sources.names if self._labels[x] == label]

    def deps(self, label: str) -> list[str]:
        """The labels it needs, without those that another of them needs."""
        needs = self.needs[label]
        implied = (reachable(self.needs, x) for x in needs if x in self.needs)
        return sorted(needs.difference(*implied))

    def packages(self) -> dict[str, list[str]]:
        """The labels of each folder that has a BUILD file."""
        found = collections.defaultdict(list)
        for label in sorted(self.needs):
            found[label[2:].partition(":")[0]].append(label)
        return dict(found)


def _order(label: str) -> tuple[int, list[str]]:
    """Buildifier's order: this package first, other repositories last."""
    kinds = (":", "//", "@")
    return (
        next(n for n, kind in enumerate(kinds) if label.startswith(kind)),
        re.split(r"[:.]", label),
    )


def _list(items: Sequence[str], indent: str) -> str:
    """A list in the form that buildifier gives it."""
    if len(items) < 2:
        return "[" + "".join(f'"{item}"' for item in items) + "]"
    lines = "".join(f'{indent}    "{item}",\n' for item in items)
    return f"[\n{lines}{indent}]"


def _call(rule: str, attributes: Mapping[str, str]) -> str:
    lines = "".join(f"    {key} = {x},\n" for key, x in attributes.items())
    return f"{rule}(\n{lines})\n"


def texts(targets: Targets) -> dict[str, str]:
    """The text of every BUILD file, by its path."""
    return {
        f"{folder}/BUILD".removeprefix("/"): _text(targets, folder, labels)
        for folder, labels in targets.packages().items()
    }


def _text(targets: Targets, folder: str, labels: list[str]) -> str:
    tests = [label for label in labels if label.endswith("_test")]
    libraries = [label for label in labels if label not in tests]
    loaded = []
    parts = []
    header = _HEADER if not folder else ""
    if exported := _EXPORTED.get(folder):
        parts.append(f"exports_files({_list(exported, '')})\n")
    if libraries:
        loaded.append("py_library")
        parts += [_library(targets, label, folder) for label in libraries]
    if tests:
        loaded.append("py_tests")
        parts.append(_tests(targets, tests, folder))
    names = ", ".join(f'"{name}"' for name in loaded)
    load = f'{header}load("//:python.bzl", {names})\n'
    return "\n".join([load, *parts])


def _within(label: str, folder: str) -> str:
    """The label as the BUILD file of the folder writes it."""
    if label == f"//{folder}":
        return f":{folder.rpartition('/')[-1]}"
    return label.replace(f"//{folder}:", ":", 1)


def _deps(targets: Targets, label: str, folder: str) -> list[str]:
    found = [_within(x, folder) for x in targets.deps(label)]
    return sorted(found, key=_order)


def _library(targets: Targets, label: str, folder: str) -> str:
    name = label.partition(":")[2] or folder.rpartition("/")[-1]
    attributes = {"name": f'"{name}"'}
    if label == f"//:{DOCS}":
        attributes["srcs"] = "[]"
        attributes["data"] = f'glob(["{DOCS}/**"])'
    elif srcs := _srcs(targets, label, folder):
        attributes["srcs"] = srcs
    if label == f"//:{FACE}":
        attributes["imports"] = '["."]'
    if label == "//tests":
        attributes["data"] = '["//:pyproject.toml"]'
    elif label == f"//{folder}" and (data := targets.data_folders(folder)):
        patterns = _list([f"{name}/**" for name in data], "    ")
        attributes["data"] = f"glob({patterns})"
    if deps := _deps(targets, label, folder):
        attributes["deps"] = _list(deps, "    ")
    return _call("py_library", attributes)


def _srcs(targets: Targets, label: str, folder: str) -> str | None:
    """None for all files of the folder, which is what python.bzl takes."""
    if ":" in label:
        start = f"{folder}/" if folder else ""
        files = [f"{x.removeprefix(start)}.py" for x in targets.files(label)]
        return _list(files, "    ")
    others = [
        f"{x.rpartition(':')[-1]}.py"
        for x in targets.packages()[folder]
        if ":" in x and not x.endswith("_test")
    ]
    if not others:
        return None
    exclude = _list(others, "        ")
    return f'glob(\n        ["*.py"],\n        exclude = {exclude},\n    )'


def _tests(targets: Targets, labels: list[str], folder: str) -> str:
    manual = folder == _MANUAL_FOLDER
    indent = "        " if manual else "    "
    # python.bzl adds what every test needs.
    every = _within("//tests", folder)
    lines = ""
    for label in labels:
        deps = [x for x in _deps(targets, label, folder) if x != every]
        name = label.partition(":")[2]
        lines += f'{indent}"{name}": {_list(deps, indent)},\n'
    if manual:
        lines = f'    {{\n{lines}    }},\n    tags = ["manual"],\n'
        return f"py_tests(\n{lines})\n"
    return f"py_tests({{\n{lines}}})\n"


def paths(root: pathlib.Path) -> set[str]:
    """The BUILD files that are there."""
    found = [path for x in FOLDERS for path in (root / x).rglob("BUILD")]
    if (root / "BUILD").exists():
        found.append(root / "BUILD")
    return {path.relative_to(root).as_posix() for path in found}


def write(root: pathlib.Path) -> None:
    """Writes all BUILD files, and removes those of folders that are gone."""
    made = texts(Targets(Sources(root)))
    for path in paths(root) - made.keys():
        (root / path).unlink()
    for path, text in made.items():
        (root / path).write_text(text, "utf-8")


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    write(ROOT)
