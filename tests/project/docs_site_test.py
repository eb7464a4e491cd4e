"""The documentation's site: built strictly, with every page and public name.

And what only a browser shows, on a screen as wide as a telephone's.
"""

import functools
import http.server
import inspect
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import threading

import pytest

import tfdistill
from tests.cases import docs_blocks

pytest.importorskip("mkdocs", reason="needs mkdocs (extra: docs)")
pytestmark = [pytest.mark.deep, pytest.mark.multiprocess]
# As many links as one list may have.
_MOST_LINKS = 40
# Opens each page, then searches; posts what it finds.
_PROBE = """<!doctype html><iframe width="390" height="844"></iframe><script>
const frame = document.querySelector("iframe");
const found = {pages: {}, first_hits: {}};
const sleep = () => new Promise((done) => setTimeout(done, 20));
const all = (what) => [...frame.contentDocument.querySelectorAll(what)];

async function open(page) {
  await new Promise((done) => { frame.onload = done; frame.src = page; });
}

function brokenWords() {
  const words = [], range = new Range();
  const texts = frame.contentDocument.createTreeWalker(
      all(".md-content")[0], NodeFilter.SHOW_TEXT);
  for (let text; text = texts.nextNode();)
    for (const word of text.data.matchAll(/\\w{2,}/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const lines = [...range.getClientRects()].map((line) => line.top);
      if (Math.max(...lines) - Math.min(...lines) > 5) words.push(word[0]);
    }
  return words;
}

(async () => {
  for (const page of PAGES) {
    await open(page);
    // The theme's script gives tables what lets them scroll.
    while (all("article table:not(.md-typeset__table *)").length) await sleep();
    found.pages[page] = {
      too_wide: frame.contentDocument.scrollingElement.scrollWidth > 390,
      broken: brokenWords(),
      most_links: Math.max(0, ...all(".md-nav--secondary").map(
          (list) => list.querySelectorAll("a").length)),
      other_hosts: frame.contentWindow.performance.getEntriesByType("resource")
          .map((entry) => entry.name)
          .filter((name) => !name.startsWith(location.origin)),
    };
  }
  for (const query of QUERIES) {
    await open("index.html?q=" + query);
    while (!all(".md-search-result__item a").length) await sleep();
    found.first_hits[query] =
        all(".md-search-result__item a")[0].pathname.slice(1);
  }
  await fetch("/", {method: "POST", body: JSON.stringify(found)});
})();
</script>"""
_FIRST_HITS = {
    "install": "install.html",
    "checkpoint": "resume.html",
    "mixed precision": "models.html",
}


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


def test_pages_fit_a_telephone_and_the_search_finds_them(site, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    pages = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    probe = _PROBE.replace("PAGES", json.dumps(pages))
    (site / "probe.html").write_text(
        probe.replace("QUERIES", json.dumps([*_FIRST_HITS]))
    )
    posted = queue.Queue()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self):
            size = int(self.headers["Content-Length"])
            posted.put(json.loads(self.rfile.read(size)))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        process = subprocess.Popen(
            [
                *(browser, "--headless=new", "--no-sandbox", "--disable-gpu"),
                *("--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"),
                f"http://127.0.0.1:{server.server_port}/probe.html",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            found = posted.get()
        finally:
            process.terminate()
            process.wait()
            server.shutdown()
    assert len(found["pages"]) == len(pages) > len(docs_blocks.pages())
    for page, seen in found["pages"].items():
        assert not seen["too_wide"], page
        assert not seen["broken"], page
        assert not seen["other_hosts"], page
        assert seen["most_links"] <= _MOST_LINKS, page
    assert found["first_hits"] == _FIRST_HITS


def _public_names(module=tfdistill, prefix=""):
    for name in module.__all__:
        found = getattr(module, name)
        if inspect.ismodule(found):
            yield from _public_names(found, f"{prefix}{name}.")
        elif not name.startswith("_"):
            yield prefix + name
