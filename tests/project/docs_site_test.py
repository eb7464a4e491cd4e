"""The documentation's site: built strictly, with every page and public name."""

import os
import pathlib
import subprocess
import sys

import pytest

import tfdistill
from tests.cases import docs_blocks

pytest.importorskip("mkdocs", reason="needs mkdocs (extra: docs)")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(400)]


def test_the_site_builds_strictly_and_has_every_page_and_name(tmp_path):
    (command,) = (
        words
        for block in docs_blocks.blocks("CONTRIBUTING.md")
        for words in block.commands
        if words[0] == "mkdocs"
    )
    done = subprocess.run(
        [sys.executable, "-m", *command, "--site-dir", str(tmp_path)],
        cwd=docs_blocks.ROOT,
        # What mkdocs-material says of other projects' plans is no warning.
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        timeout=360,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for page in docs_blocks.pages()[2:]:
        name = pathlib.Path(page).relative_to("docs").with_suffix(".html")
        assert (tmp_path / name).is_file(), page
    for name in tfdistill.__all__:
        if not name.startswith("_"):
            assert (tmp_path / "api" / f"{name}.html").is_file(), name
