"""The limits and the clean-up of conftest.py, seen from outside."""

import pathlib
import shutil
import subprocess
import sys
import textwrap

_ROOT = pathlib.Path(__file__).resolve().parents[2]


def _pytest(folder: pathlib.Path, program: str) -> str:
    """The output of a run of pytest on a program with our conftest.py."""
    shutil.copy(_ROOT / "tests" / "conftest.py", folder)
    shutil.copy(_ROOT / "pyproject.toml", folder)
    (folder / "a_test.py").write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "a_test.py"],
        cwd=folder,
        timeout=120,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_limit_stops_a_test_that_swallows_exceptions(tmp_path):
    output = _pytest(
        tmp_path,
        """
        import time
        import pytest

        @pytest.mark.timeout_secs(0.5)
        def test_sleeps():
            try:
                time.sleep(60)
            except Exception:
                pass

        def test_next():
            pass
        """,
    )
    assert "call of a_test.py::test_sleeps took more than 0.5 s" in output
    assert "1 failed, 1 passed" in output


def test_orphan_is_found_and_ended(tmp_path):
    output = _pytest(
        tmp_path,
        """
        import subprocess
        import sys
        import conftest
        import psutil

        conftest.END_WAIT_SECS = 0.2
        SLEEP = "import time; time.sleep(60)"
        START = (
            "import subprocess, sys;"
            f"print(subprocess.Popen([sys.executable, '-c', '{SLEEP}'],"
            " stdout=subprocess.DEVNULL).pid)"
        )
        left = []

        def test_leaves_an_orphan(no_process_left):
            pid = subprocess.check_output([sys.executable, "-c", START])
            left.append(int(pid))

        def test_orphan_has_ended():
            psutil.wait_procs(
                [psutil.Process(x) for x in left if psutil.pid_exists(x)],
                timeout=10,
            )
            assert not psutil.pid_exists(left[0])

        def test_leaves_nothing(no_process_left):
            subprocess.run([sys.executable, "-c", ""], check=True)
        """,
    )
    assert "processes left behind" in output
    assert "3 passed, 1 error" in output
