"""A real Bazel builds everything and runs ten tests: Debian's Bazel 4.2.3.

It does not know MODULE.bazel, and its own tools would have to be fetched. Local
repositories stand in: the rules are Bazel's native ones, and each package of
PyPI is an empty library, since the tests run by this interpreter, which has
them. So this tries the BUILD files and python.bzl; not MODULE.bazel, nor the
wheels that rules_python would install.
"""

import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Mapping

import pytest

from tests.project import build_files

# Debian's name; any other Bazel is newer, and has no native rules.
_BAZEL = "bazel-4"
_LIMIT_SECS = 240
_TESTS = (
    "//tests/cluster:identity_test",
    "//tests/exchange:signing_test",
    "//tests/launch:recipes_test",
    "//tests/launcher:restarts_test",
    "//tests/slurm:task_test",
    "//tests/status:run_events_test",
    "//tests/status:tables_test",
    "//tests/system:background_test",
    "//tests/system:untrusted_test",
    "//tests/teachers:options_test",
)
_NATIVE_RULES = {
    "python": ("py_library", "py_test"),
    "cc": (
        "cc_binary",
        "cc_library",
        "cc_test",
        "cc_toolchain",
        "cc_toolchain_suite",
    ),
    "java": ("java_binary", "java_import", "java_runtime", "java_toolchain"),
}
_STAND_INS = ("rules_python", "rules_cc", "rules_java", "remote_coverage_tools")


def _write(path: pathlib.Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _make_rules(root: pathlib.Path) -> None:
    """One repository for all of _STAND_INS."""
    _write(root / "WORKSPACE")
    _write(root / "BUILD", _public("filegroup", "coverage_report_generator"))
    for folder, rules in _NATIVE_RULES.items():
        lines = [f"{rule} = native.{rule}\n" for rule in rules]
        _write(root / folder / "BUILD")
        _write(root / folder / "defs.bzl", "".join(lines))


def _make_packages(root: pathlib.Path, build_texts: Mapping[str, str]) -> None:
    """The repository `pypi`: a library without files for each package."""
    _write(root / "WORKSPACE")
    for name in re.findall(r'"@pypi//(\w+)"', "".join(build_texts.values())):
        _write(root / name / "BUILD", _public("py_library", name))


def _public(rule: str, name: str) -> str:
    return f'{rule}(name = "{name}", visibility = ["//visibility:public"])\n'


def _copy_checkout(root: pathlib.Path) -> None:
    """What Bazel needs of the checkout, which gets no link into its output."""
    for folder in (*build_files.FOLDERS, build_files.DOCS):
        shutil.copytree(
            build_files.ROOT / folder,
            root / folder,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("BUILD", "python.bzl", *build_files.PUBLIC_FILES):
        shutil.copy(build_files.ROOT / name, root)
    options = (build_files.ROOT / ".bazelrc").read_text()
    _write(root / ".bazelrc", options.replace("common --enable_bzlmod\n", ""))
    _write(root / "WORKSPACE")


class _Bazel:
    """Commands of one Bazel server, which has its own directory."""

    def __init__(self, root: pathlib.Path) -> None:
        self.workspace = root / "workspace"
        self._start = [
            _BAZEL,
            "--nohome_rc",
            f"--output_user_root={root / 'output'}",
            "--max_idle_secs=60",
            # The server lives for a minute: compiling it well does not pay.
            "--host_jvm_args=-XX:TieredStopAtLevel=1",
        ]
        local = {name: root / "rules" for name in _STAND_INS}
        local["pypi"] = root / "pypi"
        self._options = [
            *(f"--override_repository={x}={path}" for x, path in local.items()),
            "--incompatible_use_python_toolchains=false",
            "--nosandbox_debug",
            # Hundreds of links for each test that is built and not run.
            "--nobuild_runfile_links",
            f"--python_path={sys.executable}",
        ]

    def run(self, command: str, *targets: str) -> tuple[int, str]:
        """The exit code, and what it printed."""
        done = self._call(command, *self._options, *targets)
        return done.returncode, done.stdout

    def shut_down(self) -> None:
        self._call("shutdown")

    def _call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._start, *arguments],
            cwd=self.workspace,
            timeout=_LIMIT_SECS,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def bazel(tmp_path: pathlib.Path, no_process_left: None) -> Iterator[_Bazel]:
    if not shutil.which(_BAZEL):
        pytest.skip(f"needs {_BAZEL} of Debian's package bazel-bootstrap")
    texts = {
        path: (build_files.ROOT / path).read_text()
        for path in build_files.paths(build_files.ROOT)
    }
    _make_rules(tmp_path / "rules")
    _make_packages(tmp_path / "pypi", texts)
    _copy_checkout(tmp_path / "workspace")
    started = _Bazel(tmp_path)
    yield started
    started.shut_down()
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.mark.multiprocess
@pytest.mark.timeout_secs(500)
def test_bazel_builds_everything_and_runs_ten_tests(bazel):
    code, output = bazel.run("build", "//...")
    assert code == 0, output
    code, output = bazel.run("test", *_TESTS)
    assert code == 0, output
    assert f"Executed {len(_TESTS)} out of {len(_TESTS)} tests" in output
    # A file sees what its deps bring, and nothing else of the checkout.
    path = bazel.workspace / "tests" / "status" / "BUILD"
    needed, other = '"//tfdistill/status"', '"//tfdistill/system"'
    assert needed in path.read_text()
    path.write_text(path.read_text().replace(needed, other))
    code, output = bazel.run("test", "//tests/status:run_events_test")
    assert code != 0
    assert "No module named 'tfdistill.status'" in output, output
