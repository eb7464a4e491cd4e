"""Holds the BUILD files to the sources: what imports need, and no more."""

import ast
import difflib
import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest

from tests.project import build_files

_ROOT = build_files.ROOT


@pytest.fixture(scope="module")
def sources() -> build_files.Sources:
    return build_files.Sources(_ROOT)


@pytest.fixture(scope="module")
def targets(sources) -> build_files.Targets:
    return build_files.Targets(sources)


def test_build_files_are_those_of_the_sources(targets):
    made = build_files.texts(targets)
    have = {
        path: (_ROOT / path).read_text("utf-8")
        for path in build_files.paths(_ROOT)
    }
    diff = [
        line
        for path in sorted(made.keys() | have.keys())
        for line in difflib.unified_diff(
            have.get(path, "").splitlines(),
            made.get(path, "").splitlines(),
            path,
            "python tests/project/build_files.py",
            lineterm="",
        )
    ]
    assert not diff, "\n".join(diff)


def test_buildifier_agrees():
    if not shutil.which("buildifier"):
        pytest.skip("buildifier is not on PATH")
    for kind, names in (
        ("build", sorted(build_files.paths(_ROOT))),
        ("module", ["MODULE.bazel"]),
        ("bzl", ["python.bzl"]),
    ):
        done = subprocess.run(
            ["buildifier", f"--type={kind}", "--mode=check", *names],
            cwd=_ROOT,
            timeout=60,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_module_that_is_imported_exists(sources):
    missing = [
        f"{name} imports {needed}"
        for name, found in sources.imports.items()
        for needed in found
        if not needed.startswith("@") and needed not in sources.imports
    ]
    assert not missing, "\n".join(missing)


def test_no_file_imports_itself_by_way_of_others(sources):
    circles = build_files.circles(sources.imports)
    assert not circles, f"files that import each other in a circle: {circles}"


def test_packages_are_in_the_lock(sources):
    lock = (_ROOT / "requirements.txt").read_text("utf-8")
    locked = {
        re.sub(r"[-.]", "_", line.partition("==")[0]).lower()
        for line in lock.splitlines()
        if "==" in line
    }
    used = {
        needed.removeprefix("@pypi//")
        for found in sources.imports.values()
        for needed in found
        if needed.startswith("@")
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
    init = (_ROOT / "tfdistill" / "_version.py").read_text("utf-8")
    version = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    assert calls["module"]["name"] == project["name"]
    assert calls["module"]["version"] == version.group(1)
    oldest = re.match(r">=(3\.\d+)", project["requires-python"]).group(1)
    assert calls["python.toolchain"]["python_version"] == oldest
    assert calls["pip.parse"]["python_version"] == oldest


def _make(root: pathlib.Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_every_form_of_import_counts(tmp_path):
    _make(
        tmp_path,
        {
            "tfdistill/__init__.py": "from tfdistill import a\n",
            "tfdistill/a.py": "import numpy as np\nfrom tfdistill.b import c\n",
            "tfdistill/b/__init__.py": "",
            "tfdistill/b/c.py": "import json, sklearn.metrics\n",
            "tfdistill/b/d.py": "def f():\n  from .c import x\n",
            "launch/go.py": "import tfdistill.b.d\nCOMMAND = 'launch.task'\n",
            "launch/task.py": "from tfdistill import Thing\n",
            "tests/conftest.py": "",
            "tests/help.py": "import tensorflow.compat.v2 as tf\n",
            "tests/b/a_test.py": "import help\n"
            "x = 'import tfdistill.a\\nf(1)', 'docs', 'programs'\n",
            "tests/programs/p.py": "",
        },
    )
    sources = build_files.Sources(tmp_path)
    assert sources.imports == {
        "tfdistill": {
            "tfdistill/__init__",
            "tfdistill/a",
            "tfdistill/b/__init__",
            "tfdistill/b/c",
            "tfdistill/b/d",
        },
        "tfdistill/__init__": set(),
        "tfdistill/a": {"tfdistill/b/c", "@pypi//numpy"},
        "tfdistill/b/__init__": set(),
        "tfdistill/b/c": {"@pypi//scikit_learn"},
        "tfdistill/b/d": {"tfdistill/b/c"},
        "launch/go": {"launch/task", "tfdistill/b/d"},
        "launch/task": {"tfdistill"},
        "tests/conftest": set(),
        "tests/help": {"@pypi//tensorflow"},
        "tests/b/a_test": {
            "docs",
            "tests/help",
            "tests/programs/p",
            "tfdistill/a",
        },
        "tests/programs/p": set(),
        "docs": set(),
    }
    assert sources.needs["tests/b/a_test"] == {
        "docs",
        "tests/conftest",
        "tests/help",
        "tests/programs/p",
        "tfdistill/a",
    }
    assert sources.needs["tfdistill/b/c"] == {
        "tfdistill/__init__",
        "tfdistill/b/__init__",
        "@pypi//scikit_learn",
    }


def test_a_folder_is_one_library_unless_it_is_in_a_circle(tmp_path):
    _make(
        tmp_path,
        {
            "launch/first.py": "from launch.room import inner\n",
            "launch/second.py": "import numpy\n",
            "launch/room/inner.py": "from launch import second\n",
            "launch/room/other.py": "import numpy\nimport rich\n",
        },
    )
    targets = build_files.Targets(build_files.Sources(tmp_path))
    assert {label: targets.deps(label) for label in targets.needs} == {
        "//:docs": [],
        "//:tfdistill": [],
        "//launch": ["//launch/room"],
        "//launch/room": ["//launch:second", "@pypi//rich"],
        "//launch:second": ["@pypi//numpy"],
    }


def test_writing_adds_changes_and_removes_build_files(tmp_path):
    _make(
        tmp_path,
        {
            "BUILD": "old",
            "models/gone/BUILD": "old",
            "models/m.py": "import keras\n",
            "tests/conftest.py": "",
            "tests/models/m_test.py": "import models.m\n",
            "tests/cases/case.py": "",
            "tests/cases/files/text": "",
        },
    )
    build_files.write(tmp_path)
    assert build_files.paths(tmp_path) == {
        "BUILD",
        "models/BUILD",
        "tests/BUILD",
        "tests/cases/BUILD",
        "tests/models/BUILD",
    }
    assert (tmp_path / "models/BUILD").read_text() == (
        'load("//:python.bzl", "py_library")\n'
        "\n"
        "py_library(\n"
        '    name = "models",\n'
        '    deps = ["@pypi//keras"],\n'
        ")\n"
    )
    assert '    data = glob(["files/**"]),\n' in (
        (tmp_path / "tests/cases/BUILD").read_text()
    )
    assert (tmp_path / "tests/models/BUILD").read_text() == (
        'load("//:python.bzl", "py_tests")\n'
        "\n"
        "py_tests({\n"
        '    "m_test": ["//models"],\n'
        "})\n"
    )
