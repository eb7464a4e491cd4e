"""A publisher that ends at any moment, in processes of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TESTS = pathlib.Path(__file__).resolve().parent


def _run(*arguments):
    found = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        stdout=subprocess.PIPE,
        timeout=280,
        check=True,
    )
    return json.loads(found.stdout)


@pytest.mark.multiprocess
@pytest.mark.parametrize("scenario", ["prune", "replace"])
@pytest.mark.parametrize("storage", ["rename", "manifest_last"])
def test_a_crash_at_any_file_operation_is_survived(
    tmp_path, no_process_left, storage, scenario
):
    """Claiming, writing, committing, pruning and sweeping alike."""
    found = _run(_TESTS / "crash_program.py", tmp_path, storage, scenario)
    assert found["problems"] == []
    assert len(found["calls"]) > 40
    # The program names its operations: each kind was tried.
    assert {"list_dir", "blocks", "write", "rename", "remove_tree"} < set(
        found["calls"]
    )


@pytest.mark.multiprocess
def test_random_kills_show_no_bad_version(tmp_path, no_process_left):
    """The full number is `python -m benchmarks.exchange_kills`."""
    found = _run("-m", "benchmarks.exchange_kills", "--kills=150", "--seed=7")
    assert (found["kills"], found["bad"]) == (150, 0), found
    assert found["versions"] > 20
    assert found["interrupted"] > 10
    assert found["reads"] > 20


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
