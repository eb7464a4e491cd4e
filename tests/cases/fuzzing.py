"""A program under libFuzzer, in a process of its own."""

import pathlib
import re
import subprocess
import sys

_PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"


def num_covered(program, corpus, *, runs, max_len):
    """Feeds a program of `tests.programs`; returns how many edges it took.

    `corpus` is the directory of the first inputs; an input that breaks the
    program fails the test, and is left beside it.
    """
    options = [f"-runs={runs}", "-seed=1", f"-max_len={max_len}"]
    options += ["-len_control=0", f"-artifact_prefix={corpus.parent}/"]
    # Linux hands the peak of this process down to a program that it starts, so
    # that libFuzzer would take the memory of earlier tests for the program's.
    options += ["-rss_limit_mb=0", "-malloc_limit_mb=2048"]
    done = subprocess.run(
        [sys.executable, _PROGRAMS / program, *options, corpus],
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return int(re.findall(r"cov: (\d+)", done.stderr)[-1])
