"""docs/ is built as a book: every page is in it, and every link leads to a page, a heading, or a file of the repository."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from kvrig.server import REPOSITORY

pytestmark = pytest.mark.ours("the pages are ours")

DOCS = REPOSITORY / "docs"
# Pages that mdbook makes of its own: everything on one page, where anchors differ, and the list of pages alone.
MADE = {"print.html", "toc.html", "404.html"}


class Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if "id" in attrs:
            self.anchors.add(attrs["id"])
        link = attrs.get("href") if tag == "a" else attrs.get("src") if tag == "img" else None
        if link and not urlsplit(link).scheme:
            self.links.append(unquote(link))


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The built pages, by name."""
    folder = tmp_path_factory.mktemp("book")
    mdbook = Path(sys.executable).parent / "mdbook"
    done = subprocess.run([mdbook, "build", "-d", folder, REPOSITORY], capture_output=True, text=True, timeout=120, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "WARN" not in output and "ERROR" not in output, output
    return {path.name: Page(path.read_text()) for path in folder.glob("*.html") if path.name not in MADE}, folder


def test_every_page_is_built(book):
    """Each page of docs/ is a page of the book; the first one is its start."""
    pages, _ = book
    assert {path.stem for path in DOCS.glob("*.md")} - {"SUMMARY"} == {Path(name).stem for name in pages} - {"index"}


def test_every_link_leads_somewhere(book):
    """In the book to a page and, if it names one, a heading there; out of it to a file of the repository."""
    pages, folder = book
    checked, dead = 0, []
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            checked += bool(anchor)
            if path.startswith("../"):
                # mdbook takes each page for one of its own.
                outside = os.path.normpath(DOCS / path)
                if not any(os.path.exists(outside.removesuffix(".html") + ending) for ending in (".md", "")) and not os.path.exists(outside):
                    dead.append((name, link))
            elif (target := path or name) in pages:
                if anchor and anchor not in pages[target].anchors:
                    dead.append((name, link))
            elif not (folder / target).exists():
                dead.append((name, link))
    assert not dead
    assert checked > 200, "links with anchors were not found"
