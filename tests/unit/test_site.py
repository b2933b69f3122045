"""docs/ as a site: it is built without a warning, loads nothing from elsewhere, and shows what the pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from test_docs import ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs: mkdocs-material")

LOADING = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "audio": "src",
    "form": "action",
}
SHOWN = ("table", "tr", "li", "pre", "p", "h2", "h3", "img")


class PageReader(HTMLParser):
    """What a page loads, where its links lead, which anchors it has, and how many elements its article has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.shown: Counter[str] = Counter()
        self._is_in_article = False
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in LOADING and LOADING[tag] in values and values.get("rel") not in ("next", "prev", "canonical"):
            self.loaded.append(values[LOADING[tag]])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self._is_in_article |= tag == "article"
        self.shown[tag] += self._is_in_article

    def handle_endtag(self, tag: str) -> None:
        self._is_in_article &= tag != "article"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as CI and readers build it."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, PageReader]:
    """Its pages by their files; the one for addresses that lead nowhere is the theme's."""
    return {page: PageReader(page) for page in site.rglob("*.html") if page.name != "404.html"}


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[Path, PageReader]) -> None:
    for page, reader in pages.items():
        assert reader.loaded and not [address for address in reader.loaded if "//" in address], page
        assert not re.search(r'class="[^"]*mermaid', page.read_text(encoding="utf-8")), "the theme fetches mermaid"
    styles = list(site.rglob("*.css"))
    assert len(styles) >= 3
    for style in styles:
        text = style.read_text(encoding="utf-8")
        assert not re.search(r"@import|url\(['\"]?(?:https?:)?//", text), style


def test_links_lead_to_pages_of_the_site(site: Path, pages: dict[Path, PageReader]) -> None:
    for page, reader in pages.items():
        for address in [*reader.loaded, *reader.links]:
            if re.match(r"[a-z]+:", address):
                continue
            path, _, anchor = unquote(address).partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file() and target.is_relative_to(site), (page, address)
            assert not anchor or target not in pages or anchor in pages[target].anchors, (page, address)


def test_pages_show_what_a_checkout_shows(site: Path, pages: dict[Path, PageReader]) -> None:
    """Not all that renders Markdown takes the same text for a list, a table or a block of code."""
    markdown = MarkdownIt("commonmark").enable("table")
    places = {page.relative_to(ROOT / "docs"): page for page in (ROOT / "docs").rglob("*.md")}
    outside = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "examples").rglob("*.md")]
    places |= {Path(str(page.relative_to(ROOT)).lower()): page for page in outside}
    places[Path("index.md")] = ROOT / "README.md"
    for place, written in places.items():
        html = markdown.render(written.read_text(encoding="utf-8"))
        expected = {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in SHOWN}
        shown = pages[site / place.with_suffix(".html")].shown
        assert {tag: shown[tag] for tag in SHOWN} == expected, written
