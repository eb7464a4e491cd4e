"""The wheel, made from a copy of the checkout, and installed alone."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*command: str, cwd: pathlib.Path) -> str:
    """Returns what a command prints; it must succeed."""
    done = subprocess.run(
        command, cwd=cwd, timeout=240, capture_output=True, text=True
    )
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
