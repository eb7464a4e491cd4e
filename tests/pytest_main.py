"""Runs one test file for Bazel: python -m pytest, in what Bazel sets aside."""

import os
import sys

import pytest


def _options() -> list[str]:
    options = ["-p", "no:cacheprovider"]
    if directory := os.environ.get("TEST_TMPDIR"):
        # Tests of several files at once would clear each other's directories.
        options.append(f"--basetemp={os.path.join(directory, 'pytest')}")
    if report := os.environ.get("XML_OUTPUT_FILE"):
        options.append(f"--junitxml={report}")
    if chosen := os.environ.get("TESTBRIDGE_TEST_ONLY"):
        # bazel test --test_filter=...
        options += ["-k", chosen]
    return options


if __name__ == "__main__":
    raise SystemExit(pytest.main([*_options(), *sys.argv[1:]]))
