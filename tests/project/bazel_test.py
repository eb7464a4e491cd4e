"""Holds BUILD to the sources: one target per module, deps as imported.

    python tests/project/bazel_test.py --print > BUILD

makes BUILD anew. A target is named as its file without `.py`; an import counts
wherever it stands: in a function, under TYPE_CHECKING, as the module name of
`python -m` in a string, or in a program held in a string.
"""

import argparse
import ast
import dataclasses
import difflib
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from collections.abc import Mapping

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FOLDERS = ("benchmarks", "launch", "models", "tests", "tfdistill")
_LIBRARY = "tfdistill"
# Where the name to import is not the name to install.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "absl": "absl_py",
    "google": "protobuf",
    "kubeflow": "kubeflow_training",
    "sklearn": "scikit_learn",
    "yaml": "pyyaml",
}
# These read the checkout itself (git, every source), not Bazel's copy of it.
_MANUAL = (
    "tests/project/bazel_test",
    "tests/project/docs_site_test",
    "tests/project/docs_test",
    "tests/project/guide_test",
    "tests/project/install_test",
    "tests/project/packaging_test",
)
_HEADER = '''"""Targets of tfdistill, one for each module and each test.

Made by: python tests/project/bazel_test.py --print > BUILD
"""

load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])

exports_files(["requirements.txt"])
'''


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    rule: str
    name: str
    attributes: Mapping[str, object]

    @property
    def deps(self) -> tuple[str, ...]:
        return tuple(self.attributes.get("deps", ()))


def _label_key(label: str) -> tuple[int, list[str]]:
    """Buildifier's order: this package first, other repositories last."""
    return (label.startswith("@"), re.split(r"[:.]", label))


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


class Sources:
    """The Python files of a checkout and what each of them imports."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.paths = sorted(
            path.relative_to(root).as_posix()
            for folder in _FOLDERS
            for path in (root / folder).rglob("*.py")
        )
        self.names = {path.removesuffix(".py") for path in self.paths}

    def _target_of(self, dotted: str, importer: str) -> str | None:
        """The target of a module that is ours; None where it is not."""
        name = dotted.replace(".", "/")
        inside = importer.startswith(f"{_LIBRARY}/")
        if name == _LIBRARY and not inside:
            return _LIBRARY
        beside = f"{importer.rpartition('/')[0]}/{name}"
        for found in (name, f"{name}/__init__", beside):
            if found in self.names:
                return found
        return None

    def _imports(self, tree: ast.AST, importer: str) -> Iterator[str]:
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
                    ours = self._target_of(full, importer)
                    yield full if ours else module

    def _labels(
        self, tree: ast.AST, importer: str, *, strict: bool
    ) -> Iterator[str]:
        for dotted in self._imports(tree, importer):
            top = dotted.partition(".")[0]
            ours = self._target_of(dotted, importer)
            if ours:
                yield f":{ours}"
            elif top in _FOLDERS or top == "conftest":
                # No such file: a test says so, BUILD can still be printed.
                if strict:
                    yield f":{dotted.replace('.', '/')}"
            elif top not in sys.stdlib_module_names:
                name = _DISTRIBUTIONS.get(top, top).replace("-", "_").lower()
                yield f"@pypi//{name}"

    def deps(self, name: str) -> list[str]:
        """Sorted labels of everything the module `name` needs."""
        tree = ast.parse((self.root / f"{name}.py").read_text("utf-8"))
        labels = set(self._labels(tree, name, strict=True))
        for text in _strings(tree):
            if re.fullmatch(r"[a-z]\w*(\.\w+)+", text):
                found = self._target_of(text, name)
                labels |= {f":{found}"} if found else set()
            elif name.startswith("tests/") and (program := _program(text)):
                # Example programs may import what nobody has installed.
                found_in = self._labels(program, "", strict=False)
                labels |= {x for x in found_in if x.startswith(":")}
        package = f"{name.rpartition('/')[0]}/__init__"
        if package in self.names:
            labels.add(f":{package}")
        if name.endswith("_test"):
            labels.add(":tests/conftest")
        if name == f"{_LIBRARY}/__init__":
            # What it imports on first use belongs to the target `tfdistill`;
            # its modules need this file, so it cannot need them.
            labels = {label for label in labels if label.startswith("@")}
        return sorted(labels - {f":{name}"}, key=_label_key)

    def target(self, name: str) -> Target:
        attributes: dict[str, object] = {}
        if name.endswith("_test"):
            text = (self.root / f"{name}.py").read_text("utf-8")
            attributes["size"] = (
                "large" if "pytest.mark.multiprocess" in text else "medium"
            )
        elif name.startswith("tests/"):
            attributes["testonly"] = True
        attributes["srcs"] = [f"{name}.py"]
        if name == "tests/conftest":
            attributes["data"] = ["pyproject.toml"]
        if name.endswith("/__init__") or name == "tests/conftest":
            attributes["imports"] = ["."]
        if name.endswith("_test"):
            attributes["main"] = f"{name}.py"
            if name in _MANUAL:
                attributes["tags"] = ["manual"]
        if deps := self.deps(name):
            attributes["deps"] = deps
        rule = "py_test" if name.endswith("_test") else "py_library"
        return Target(rule=rule, name=name, attributes=attributes)

    def targets(self) -> dict[str, Target]:
        modules = [x for x in self.names if x.startswith(f"{_LIBRARY}/")]
        deps = sorted((f":{x}" for x in modules), key=_label_key)
        whole = Target(
            rule="py_library", name=_LIBRARY, attributes={"deps": deps}
        )
        found = [whole, *(self.target(name) for name in sorted(self.names))]
        return {target.name: target for target in found}


def _attribute_text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return f"    {key} = {value},\n"
    if isinstance(value, str):
        return f'    {key} = "{value}",\n'
    items = [f'"{item}"' for item in value]
    if len(items) == 1:
        return f"    {key} = [{items[0]}],\n"
    lines = "".join(f"        {item},\n" for item in items)
    return f"    {key} = [\n{lines}    ],\n"


def build_text(targets: Mapping[str, Target]) -> str:
    """The whole BUILD file, in the form buildifier gives it."""
    rules = [
        f'\n{target.rule}(\n    name = "{target.name}",\n'
        + "".join(_attribute_text(*item) for item in target.attributes.items())
        + ")\n"
        for target in targets.values()
    ]
    return _HEADER + "".join(rules)


def read_build(text: str) -> dict[str, Target]:
    """The targets of a BUILD file, whose syntax is that of Python."""
    targets = {}
    for node in ast.parse(text).body:
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or not call.keywords:
            continue
        values = {x.arg: ast.literal_eval(x.value) for x in call.keywords}
        if "name" in values:
            name = values.pop("name")
            targets[name] = Target(
                rule=call.func.id, name=name, attributes=values
            )
    return targets


def differences(have: dict[str, Target], want: dict[str, Target]) -> list[str]:
    """One line for each thing to add to BUILD or to remove from it."""
    lines = [f'remove target "{x}": no file' for x in have.keys() - want.keys()]
    for name, target in want.items():
        if name not in have:
            lines.append(f'add target "{name}" ({target.rule})')
            continue
        found = have[name]
        if found.rule != target.rule:
            lines.append(f'"{name}": {found.rule} must be {target.rule}')
        for label in sorted({*target.deps} - {*found.deps}):
            lines.append(f'"{name}": add to deps "{label}"')
        for label in sorted({*found.deps} - {*target.deps}):
            lines.append(f'"{name}": remove from deps "{label}"')
        for key in sorted({*found.attributes} | {*target.attributes}):
            now, then = found.attributes.get(key), target.attributes.get(key)
            if key != "deps" and now != then:
                lines.append(f'"{name}": {key} = {now!r} must be {then!r}')
    return sorted(lines)


def reachable(targets: Mapping[str, Target], name: str) -> set[str]:
    """Every label that the target needs, directly or not."""
    seen: set[str] = set()
    left = list(targets[name].deps)
    while left:
        label = left.pop()
        if label not in seen:
            seen.add(label)
            if label[1:] in targets:
                left += targets[label[1:]].deps
    return seen


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return Sources(_ROOT).targets()


@pytest.fixture(scope="module")
def build() -> str:
    return (_ROOT / "BUILD").read_text("utf-8")


def test_build_has_the_targets_and_deps_of_the_sources(build, targets):
    found = differences(read_build(build), targets)
    assert not found, "\n".join(
        ["BUILD is behind: python tests/project/bazel_test.py --print > BUILD"]
        + found
    )


def test_build_is_what_print_makes(build, targets):
    diff = difflib.unified_diff(
        build.splitlines(), build_text(targets).splitlines(), "BUILD", "made"
    )
    assert not list(diff)


def test_buildifier_agrees():
    if not shutil.which("buildifier"):
        pytest.skip("buildifier is not on PATH")
    for kind, name in (("build", "BUILD"), ("module", "MODULE.bazel")):
        done = subprocess.run(
            ["buildifier", f"--type={kind}", "--mode=check", name],
            cwd=_ROOT,
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_that_is_imported_exists(targets):
    missing = [
        f"{name} imports {label[1:]}"
        for name, target in targets.items()
        for label in target.deps
        if label.startswith(":") and label[1:] not in targets
    ]
    assert not missing, "\n".join(missing)


def test_no_target_needs_itself(targets):
    circles = [x for x in targets if f":{x}" in reachable(targets, x)]
    assert not circles, f"modules that import each other in a circle: {circles}"


@pytest.mark.parametrize(
    ("folder", "may_not_need"),
    [
        ("tfdistill/", ("benchmarks/", "launch/", "models/", "tests/")),
        ("models/", ("benchmarks/", "launch/", "tests/")),
        ("launch/", ("benchmarks/", "tests/")),
    ],
)
def test_imports_never_go_backwards(targets, folder, may_not_need):
    checked = [name for name in targets if name.startswith(folder)]
    assert checked, f"no module in {folder}"
    for name in checked:
        wrong = [
            label
            for label in reachable(targets, name)
            if label[1:].startswith(may_not_need)
        ]
        assert not wrong, f"{name} needs {wrong}"


@pytest.mark.parametrize(
    ("name", "packages"),
    [
        ("tfdistill/__init__", ("tensorflow", "keras")),
        ("tfdistill/cluster/identity", ("tensorflow", "keras")),
        ("tfdistill/launcher/local_cluster", ("tensorflow", "keras")),
        ("tfdistill/launcher/command", ("tensorflow", "keras")),
        ("tfdistill/exchange/manifest", ("tensorflow", "keras")),
        ("tfdistill/status/command", ("keras",)),
        ("tfdistill/slurm/group", ("tensorflow", "keras")),
        ("tfdistill/exchange/publisher", ("keras",)),
    ],
)
def test_light_modules_need_no_heavy_package(targets, name, packages):
    heavy = {f"@pypi//{package}" for package in packages}
    assert not heavy & reachable(targets, name)


def test_packages_are_in_the_lock(targets):
    lock = (_ROOT / "requirements.txt").read_text("utf-8")
    locked = {
        re.sub(r"[-.]", "_", line.partition("==")[0]).lower()
        for line in lock.splitlines()
        if "==" in line
    }
    used = {
        label.removeprefix("@pypi//")
        for target in targets.values()
        for label in target.deps
        if label.startswith("@")
    }
    assert used <= locked, f"not in requirements.txt: {used - locked}"


def test_module_file_agrees_with_the_package():
    calls = {}
    for node in ast.walk(ast.parse((_ROOT / "MODULE.bazel").read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            calls[name] = {
                x.arg: ast.literal_eval(x.value) for x in node.keywords
            }
    init = (_ROOT / _LIBRARY / "_version.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert calls["module"]["name"] == project["name"]
    assert calls["module"]["version"] == version.group(1)
    oldest = re.match(r">=(3\.\d+)", project["requires-python"]).group(1)
    assert calls["python.toolchain"]["python_version"] == oldest
    assert calls["pip.parse"]["python_version"] == oldest


def test_every_form_of_import_counts(tmp_path):
    files = {
        "tfdistill/__init__.py": "from tfdistill import a\n",
        "tfdistill/a.py": "import numpy as np\nfrom tfdistill import b\n",
        "tfdistill/b.py": "import json, sklearn.metrics\n",
        "tfdistill/c.py": "def f():\n  from .b import x\n  import tfdistill\n",
        "launch/go.py": "import tfdistill.c\nCOMMAND = 'launch.task'\n",
        "launch/task.py": "from tfdistill import Thing\n",
        "tests/conftest.py": "",
        "tests/help.py": "import tensorflow.compat.v2 as tf\n",
        "tests/a_test.py": "import help\nx = 'import tfdistill.b\\nf(1)'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = {k: list(v.deps) for k, v in Sources(tmp_path).targets().items()}
    assert found == {
        "tfdistill": [
            ":tfdistill/__init__",
            ":tfdistill/a",
            ":tfdistill/b",
            ":tfdistill/c",
        ],
        "tfdistill/__init__": [],
        "tfdistill/a": [":tfdistill/__init__", ":tfdistill/b", "@pypi//numpy"],
        "tfdistill/b": [":tfdistill/__init__", "@pypi//scikit_learn"],
        "tfdistill/c": [":tfdistill/__init__", ":tfdistill/b"],
        "launch/go": [":launch/task", ":tfdistill/c"],
        "launch/task": [":tfdistill"],
        "tests/conftest": [],
        "tests/help": ["@pypi//tensorflow"],
        "tests/a_test": [":tests/conftest", ":tests/help", ":tfdistill/b"],
    }


def test_differences_name_what_to_change():
    def library(name: str, *deps: str) -> Target:
        attributes = {"srcs": [f"{name}.py"], "deps": list(deps)}
        return Target(rule="py_library", name=name, attributes=attributes)

    want = {"a": library("a", ":b"), "b": library("b")}
    text = build_text(want)
    assert differences(read_build(text), want) == []
    assert differences(read_build(text.replace(":b", ":c")), want) == [
        '"a": add to deps ":b"',
        '"a": remove from deps ":c"',
    ]
    have = {"a": want["a"], "z": library("z")}
    assert differences(have, want) == [
        'add target "b" (py_library)',
        'remove target "z": no file',
    ]


if __name__ == "__main__":
    if "--print" in sys.argv[1:]:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--print", action="store_true", required=True)
        parser.parse_args()
        print(build_text(Sources(_ROOT).targets()), end="")
        raise SystemExit(0)
    raise SystemExit(pytest.main([__file__]))
