"""The documentation's site: built strictly, with every page and public name."""

import inspect
import os
import pathlib
import re
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
    assert "api/index.html" in (tmp_path / "index.html").read_text()
    index = (tmp_path / "api" / "index.html").read_text()
    for name in _public_names():
        page = re.search(rf'href="(\w+\.html)#{re.escape(name)}"', index)
        assert page, f"{name} is not two clicks from the first page"
        text = (tmp_path / "api" / page[1]).read_text()
        assert f'id="{name}"' in text, name
    # The notebook is shown with what it printed and drew.
    notebook = (tmp_path / "quickstart.html").read_text()
    assert "data:image/png" in notebook and "group 1: done" in notebook


def _public_names():
    for name in tfdistill.__all__:
        found = getattr(tfdistill, name)
        if inspect.ismodule(found):
            yield from (f"{name}.{member}" for member in found.__all__)
        elif not name.startswith("_"):
            yield name
