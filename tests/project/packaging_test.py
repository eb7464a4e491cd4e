"""The wheel as a user gets it, the lock, the versions and the house rules."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging import requirements
from packaging import utils

import tfdistill
from tests.cases import wheels
from tfdistill.commands import main

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_PYTHONS = ("3.11.0", "3.12.0", "3.13.0")


def _project() -> dict:
    return tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]


def _version() -> str:
    text = (_ROOT / "tfdistill" / "_version.py").read_text("utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> pathlib.Path:
    return wheels.install(wheel, tmp_path_factory.mktemp("installed"))


def _import_installed(installed: pathlib.Path, program: str) -> str:
    """Runs a program that sees the installed package and not the checkout."""
    # -I leaves out the working directory and PYTHONPATH; a development install
    # may still lead to the checkout, hence the place in front and the check.
    head = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import tfdistill\n"
        f"if not tfdistill.__file__.startswith({str(installed)!r}):\n"
        "    raise SystemExit(f'wrong package: {tfdistill.__file__}')\n"
    )
    command = [sys.executable, "-I", "-c", head + program]
    return wheels.run(*command, cwd=installed.parent)


def test_wheel_holds_the_library_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"tfdistill-{_version()}.dist-info/"
    modules = {
        path.relative_to(_ROOT).as_posix()
        for path in (_ROOT / "tfdistill").rglob("*.py")
    }
    assert modules <= names
    assert "tfdistill/py.typed" in names
    assert any(x.startswith(info) and x.endswith("LICENSE") for x in names)
    others = {
        name
        for name in names - modules - {"tfdistill/py.typed"}
        if not name.startswith(info)
    }
    assert not others
    # Another process loads the wheel's own, in the deep test.
    assert all(hasattr(tfdistill, name) for name in tfdistill.__all__)


# What must work if TensorFlow is slow to load, or not installed: whole rooms,
# and some files of the rooms below them.
_LIGHT_ROOMS = ("commands", "exchange", "launcher", "slurm", "status")
_LIGHT_FILES = (
    "cluster.identity",
    "cluster.rendezvous",
    "cluster.signs",
    "system.background",
    "system.processes",
    "system.programs",
    "system.run_files",
    "system.untrusted",
)


@pytest.mark.parametrize("part", [*_LIGHT_ROOMS, "files"])
def test_light_parts_load_neither_tensorflow_nor_keras(installed, part):
    folder = installed / "tfdistill" / part
    names = _LIGHT_FILES if part == "files" else (part,)
    if folder.is_dir():
        names = tuple(f"{part}.{file.stem}" for file in folder.glob("*.py"))
    program = (
        "import importlib\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(f'tfdistill.{name}')\n"
        "print({'tensorflow', 'keras'} & set(sys.modules) or 'none')\n"
    )
    assert _import_installed(installed, program).strip() == "none"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_command_starts(installed, tmp_path, name):
    done = subprocess.run(
        [str(installed / "bin" / "tfdistill"), name, "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: tfdistill {name} ")


def _lock() -> list[requirements.Requirement]:
    lines = (_ROOT / "requirements.txt").read_text("utf-8").splitlines()
    return [
        requirements.Requirement(line)
        for line in lines
        if line.strip() and not line.startswith("#")
    ]


def _pins(python: str) -> dict[str, str]:
    """Name -> version of the lock on Linux under one Python version."""
    environment = {
        "platform_python_implementation": "CPython",
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
        "sys_platform": "linux",
    }
    pins: dict[str, str] = {}
    for pin in _lock():
        if pin.marker is None or pin.marker.evaluate(environment):
            name = utils.canonicalize_name(pin.name)
            assert name not in pins, f"{name} is pinned twice for {python}"
            (exact,) = pin.specifier
            assert exact.operator == "==", f"{pin} is not an exact version"
            pins[name] = exact.version
    return pins


@pytest.mark.parametrize("python", _PYTHONS)
def test_lock_satisfies_every_range_of_the_project(python):
    project = _project()
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    pins = _pins(python)
    for text in wanted:
        wish = requirements.Requirement(text)
        if wish.name == project["name"]:  # Another extra.
            continue
        have = pins.get(utils.canonicalize_name(wish.name))
        assert have, f"requirements.txt has no {wish.name} for {python}"
        assert have in wish.specifier, f"{wish} but the lock has {have}"


def test_newest_change_is_this_version():
    text = (_ROOT / "CHANGELOG.md").read_text("utf-8")
    # The first heading that names a version; "Unreleased" may stand above it.
    assert re.search(r"^## (\d.*)", text, re.MULTILINE)[1] == _version()
    citation = (_ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {_version()}\n" in citation


def _project_files() -> list[pathlib.Path]:
    """Files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = wheels.run(*command, cwd=_ROOT).splitlines()
    except (FileNotFoundError, AssertionError) as error:
        pytest.skip(f"not a git checkout: {error}")
    return [_ROOT / name for name in names if (_ROOT / name).is_file()]


# Written in parts, so that this file does not find itself.
_UNWANTED = {
    "a package registry": r"pypi\.or" r"g|pythonhosted\.or" r"g|registry\.npm",
    "a path of one machine": (
        r"(?<![\w.$}/~-])/(?:work/(?:main|shared)|root/|home/\w+/|opt/pypi"
        r"|Users/\w+/)"
    ),
    "talk about an issue's number": r"\b[Ii]ssue #?\d",
    "a session or an assistant": r"(?i)\bchatgpt\b|\bclaude\b|\bcopilot\b",
}


@pytest.mark.parametrize("what", list(_UNWANTED))
def test_no_file_mentions(what):
    pattern = re.compile(_UNWANTED[what])
    found = []
    for path in _project_files():
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(_ROOT)}:{number}: {line.strip()[:100]}"
            for number, line in enumerate(lines, 1)
            if pattern.search(line)
        ]
    assert not found, f"{what}:\n" + "\n".join(found)
