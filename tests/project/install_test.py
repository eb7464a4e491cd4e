"""launch/install.sh with a stand-in for Python: no download, no real venv."""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# Knows what the script asks of an interpreter. `venv` copies the stand-in, and
# `pip` notes its arguments and fails where a file named `fail` says so.
_STAND_IN = """\
    #!/usr/bin/env bash
    case "$*" in
      "-c "*python_version*) echo "{version}" ;;
      "-c "*ensurepip*) exit {no_ensurepip} ;;
      "- "*) exec "{python}" "$@" ;;
      "-m venv --clear "*)
        rm -rf "$4"
        mkdir -p "$4/bin"
        touch "$4/pyvenv.cfg"
        cp "$0" "$4/bin/python"
        echo venv >>"{log}" ;;
      "-m pip install "*)
        echo "pip $*" >>"{log}"
        if [ -e "{fail}" ]; then echo "no such package"; exit 1; fi ;;
      *) echo "unexpected: $*" >&2; exit 99 ;;
    esac
    """


class _Machine:
    """A search path with a stand-in interpreter, and an empty home."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.venv = folder / "venv"
        self.fail = folder / "fail"
        self.log = folder / "log"
        (folder / "bin").mkdir()

    def add_python(
        self, version: str, *, name: str = "python3", no_ensurepip: int = 0
    ) -> None:
        path = self.folder / "bin" / name
        text = textwrap.dedent(_STAND_IN).format(
            version=version,
            no_ensurepip=no_ensurepip,
            python=sys.executable,
            log=self.log,
            fail=self.fail,
        )
        path.write_text(text)
        path.chmod(0o755)

    def install(
        self, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess:
        # /usr/bin has the tools of the script and maybe a Python that fits,
        # which the stand-ins hide.
        return subprocess.run(
            ["bash", str(_ROOT / "launch" / "install.sh"), *arguments],
            cwd=self.folder,
            env={
                "PATH": f"{self.folder / 'bin'}:{os.defpath}:/usr/bin:/bin",
                "VENV": str(self.venv),
                "UV": "",
                **environment,
            },
            timeout=60,
            capture_output=True,
            text=True,
        )

    def done(self) -> list[str]:
        """What was run, a line each; then forgets it."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path) -> _Machine:
    made = _Machine(tmp_path)
    made.add_python("3.12.4")
    return made


def test_installs_what_models_need_in_the_versions_of_the_lock(machine):
    done = machine.install()
    assert done.returncode == 0, done.stderr
    venv, packages = machine.done()
    assert venv == "venv"
    assert f"--constraint {_ROOT / 'requirements.txt'}" in packages
    assert packages.endswith(
        f"--editable {_ROOT}[compare,kubernetes,teach,models]"
    )
    assert "Python 3.12.4" in done.stdout


def test_what_is_missing_is_added_and_what_is_there_is_kept(machine):
    machine.install("library")
    assert machine.done()[1].endswith(f"{_ROOT}[compare,kubernetes,teach]")
    machine.install("models")
    (added,) = machine.done()
    assert added.endswith(f"{_ROOT}[compare,kubernetes,teach,models]")
    machine.install("library")
    assert machine.done() == []


def test_failed_install_is_told_and_begun_again(machine):
    machine.fail.touch()
    done = machine.install()
    assert done.returncode == 1
    assert "no such package" in done.stderr
    assert str(machine.venv / "install.log") in done.stderr
    machine.fail.unlink()
    machine.done()
    assert machine.install().returncode == 0
    assert machine.done()[0] == "venv"


def test_foreign_directory_is_not_replaced(machine):
    machine.venv.mkdir()
    (machine.venv / "thesis.txt").write_text("years of work")
    done = machine.install()
    assert done.returncode == 1
    assert "is not a virtual environment" in done.stderr
    assert (machine.venv / "thesis.txt").read_text() == "years of work"
