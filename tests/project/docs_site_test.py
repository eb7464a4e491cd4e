"""The documentation's site: built strictly, complete, and on its own."""

import html.parser
import os
import pathlib
import re
import subprocess
import sys
import urllib.parse

import pytest

import tfdistill
from tests.cases import docs_blocks

pytest.importorskip("mkdocs", reason="needs mkdocs (extra: docs)")
pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout_secs(400)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site, from the command that CONTRIBUTING.md names."""
    target = tmp_path_factory.mktemp("site")
    (command,) = (
        words
        for block in docs_blocks.blocks("CONTRIBUTING.md")
        for words in block.commands
        if words[0] == "mkdocs"
    )
    environ = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        # What mkdocs-material says of other projects' plans is no warning.
        "NO_MKDOCS_2_WARNING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-m", *command, "--site-dir", str(target)],
        cwd=docs_blocks.ROOT,
        env=environ,
        timeout=360,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert "WARNING -" not in done.stdout, done.stdout
    return target


class _Page(html.parser.HTMLParser):
    """What a page offers to links, and what it refers to."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids.add(found.get("id") or "")
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("img", "script") and found.get("src"):
            self.loaded.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical",):
            self.loaded.append(found.get("href") or "")


@pytest.fixture(scope="module")
def pages(site):
    return {path: _Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_public_name_has_an_entry(site, pages):
    names = [name for name in tfdistill.__all__ if not name.startswith("_")]
    for name in names:
        page = pages[site / "api" / f"{name}.html"]
        assert f"tfdistill.{name}" in page.ids
    index = (site / "api" / "index.html").read_text("utf-8")
    for name in names:
        assert f'href="{name}.html"' in index


@pytest.mark.parametrize(
    "module",
    ["losses", "labels", "schedules", "metrics", "data", "data_checks"],
)
def test_every_name_of_a_public_module_has_an_entry(module, site, pages):
    page = pages[site / "api" / f"{module}.html"]
    for name in getattr(tfdistill, module).__all__:
        found = [i for i in page.ids if i.endswith(f".{name}")]
        assert found, f"tfdistill.{module}.{name} has no entry"


def test_examples_of_docstrings_are_shown_as_code(site):
    text = (site / "api" / "metrics.html").read_text("utf-8")
    assert "Examples:" in text
    assert "&gt;&gt;&gt; " in text.partition("Examples:")[2]


def test_every_page_and_program_is_there(site):
    for page in docs_blocks.pages()[2:]:
        name = pathlib.Path(page).relative_to("docs").with_suffix(".html")
        assert (site / name).is_file(), page
    for program in ("local", "train", "compare", "tfdistill-local"):
        text = (site / "commands" / f"{program}.html").read_text("utf-8")
        assert "usage: " in text
        assert "--help" in text


def test_every_link_of_the_site_leads_somewhere(site, pages):
    wrong = []
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # Served from any place; its links are absolute.
        for link in [*page.links, *page.loaded]:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            name = urllib.parse.unquote(parts.path)
            target = path
            if name:
                target = pathlib.Path(os.path.normpath(path.parent / name))
            if target.is_dir():
                target /= "index.html"
            known = target.is_file()
            if known and parts.fragment and target in pages:
                fragment = urllib.parse.unquote(parts.fragment)
                known = fragment in pages[target].ids
            if not known:
                wrong.append(f"{path.relative_to(site)}: {link}")
    assert not wrong, "\n".join(wrong)


def test_nothing_is_loaded_from_elsewhere(site, pages):
    """Reading the site needs no network."""
    for path, page in pages.items():
        for name in page.loaded:
            assert not re.match(r"(https?:)?//", name), f"{path}: {name}"
    for path in site.rglob("*.css"):
        imported = re.findall(
            r"@import[^;]+|url\((https?:[^)]+)\)", path.read_text()
        )
        assert not imported, f"{path}: {imported}"
