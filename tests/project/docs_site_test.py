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
pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    built = tmp_path_factory.mktemp("site")
    (command,) = (
        words
        for block in docs_blocks.blocks("CONTRIBUTING.md")
        for words in block.commands
        if words[0] == "mkdocs"
    )
    done = subprocess.run(
        [sys.executable, "-m", *command, "--site-dir", str(built)],
        cwd=docs_blocks.ROOT,
        # What mkdocs-material says of other projects' plans is no warning.
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return built


def test_the_site_has_every_page_and_public_name(site):
    for page in docs_blocks.pages()[2:]:
        name = pathlib.Path(page).relative_to("docs").with_suffix(".html")
        assert (site / name).is_file(), page
    assert "api/index.html" in (site / "index.html").read_text()
    index = (site / "api" / "index.html").read_text()
    for name in _public_names():
        page = re.search(
            rf'href="(\w+\.html)#tfdistill\.{re.escape(name)}"', index
        )
        assert page, f"{name} is not two clicks from the first page"
        text = (site / "api" / page[1]).read_text()
        assert f'id="tfdistill.{name}"' in text, name
    # The notebook is shown with what it printed and drew.
    notebook = (site / "quickstart.html").read_text()
    assert "data:image/png" in notebook and "group 1: done" in notebook


def _public_names(module=tfdistill, prefix=""):
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.ismodule(found):
            yield from _public_names(found, f"{prefix}{name}.")
        elif not name.startswith("_"):
            yield prefix + name
