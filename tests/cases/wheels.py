"""The wheel, made from a copy of the checkout, and installed alone."""

import pathlib
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib import metadata

import pytest
from packaging import requirements

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: str, cwd: pathlib.Path) -> str:
    """Returns what a command prints; it must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(directory: pathlib.Path) -> pathlib.Path:
    """Makes a wheel from a copy, so that no build folder stays behind here."""
    pytest.importorskip("pip", reason="needs pip (extra: dev)")
    source, target = directory / "source", directory / "made"
    target.mkdir()
    copied = ["LICENSE", "README.md", "pyproject.toml"]
    for folder in ("benchmarks", "launch", "models", "tests", "tfdistill"):
        found = (_ROOT / folder).rglob("*")
        copied += [
            path.relative_to(_ROOT).as_posix()
            for path in found
            if path.is_file() and "__pycache__" not in path.parts
        ]
    for name in copied:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((_ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    run(*command, cwd=target)
    (made,) = target.glob("*.whl")
    return made


def install(wheel: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Installs the wheel, and nothing else, in a directory."""
    command = [sys.executable, "-m", "pip", "install", "--no-deps"]
    command += ["--no-index", "--target", str(target), str(wheel)]
    run(*command, cwd=target)
    return target


def bare(wheel: pathlib.Path, directory: pathlib.Path) -> pathlib.Path:
    """Makes an environment of the wheel and what it depends on; no extras.

    As pip would, but of links to the packages of this environment: to install
    TensorFlow takes minutes. Returns its directory of programs.
    """
    run(sys.executable, "-m", "venv", "--without-pip", ".", cwd=directory)
    python = str(directory / "bin" / "python")
    command = [sys.executable, "-m", "pip", "--python", python, "install"]
    run(*command, "--no-deps", "--no-index", str(wheel), cwd=directory)
    (target,) = directory.glob("lib/python*/site-packages")
    (own,) = metadata.distributions(name="tfdistill", path=[str(target)])
    seen: set[str] = set()
    _link(own.requires or (), target, seen)
    return directory / "bin"


def _link(wanted: Iterable[str], target: pathlib.Path, seen: set[str]) -> None:
    """Links distributions, and all that they depend on, to a directory."""
    site = pathlib.Path(sysconfig.get_path("purelib"))
    for wish in map(requirements.Requirement, wanted):
        if wish.marker and not wish.marker.evaluate({"extra": ""}):
            continue
        assert not wish.extras, wish
        if wish.name in seen:
            continue
        seen.add(wish.name)
        found = metadata.distribution(wish.name)
        for path in found.files or ():
            top = pathlib.Path(*path.parts[:1])
            if not (site / top / "__init__.py").exists():
                # A part of what several distributions share, as `google`.
                top = pathlib.Path(*path.parts[:2])
            link = target / top
            if ".." not in top.parts and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(site / top)
        _link(found.requires or (), target, seen)
