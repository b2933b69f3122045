"""What mkdocs.yml adds to the pages of docs/: the README as the first page, and whatever lies elsewhere and is linked.

Pages are written for a checkout, where links lead to any file. The site has a page for each file outside of docs/ that
a page links to: Markdown as it is, other files as code, of a folder all its files. Links are turned to these.
mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
CODE_OR_LINK = re.compile(r"^```.*?^```$|`[^`\n]+`|(?<=\]\()(?P<link>[^()\s]+)(?=\))", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "sh", ".json": "json"}


def place_of(path: str) -> str:
    """The page of the site, or its file, that shows a path of the checkout."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".md"):
        return "index.md" if path == "README.md" else path.lower()
    return f"source/{path}.md"


def path_of(place: str) -> str:
    """The path of the checkout that a page of the site was made of."""
    return next((path for path in outside_paths() if place_of(path) == place), f"docs/{place}")


def links_of(path: str) -> list[tuple[str, str]]:
    """The links of a page of the checkout to others of its paths: as they stand, and the paths."""
    found = []
    for match in CODE_OR_LINK.finditer((ROOT / path).read_text(encoding="utf-8")):
        link = match["link"]
        if link and "://" not in link and not link.startswith(("#", "mailto:")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0]))
            found.append((link, target))
    return found


@cache
def outside_paths() -> tuple[str, ...]:
    """The README, and all files and folders outside of docs/ that a page links to, directly or by others."""
    waiting = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        new = {target for _, target in links_of(page) if (ROOT / target).exists()} - seen
        seen |= new
        waiting += [target for target in new if target.endswith(".md")]
    return tuple(sorted(path for path in seen if not path.startswith("docs/")))


def written(path: str) -> str:
    """The Markdown of the page that shows a path outside of docs/."""
    if path.endswith(".md"):
        return (ROOT / path).read_text(encoding="utf-8")
    files = sorted(file for file in (ROOT / path).iterdir() if file.is_file()) if (ROOT / path).is_dir() else []
    parts = [f"---\nsearch: {{boost: 0.3}}\n---\n\n# {path}\n"]  # found below what explains it
    for file in files or [ROOT / path]:
        heading = f"## {file.name}\n\n" if files else ""
        text = file.read_text(encoding="utf-8").rstrip("\n")
        parts.append(f"{heading}````{LANGUAGES.get(file.suffix, 'text')}\n{text}\n````\n")
    return "\n".join(parts)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each path outside of docs/."""
    for path in outside_paths():
        files.append(File.generated(config, place_of(path), content=written(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of a page to where the site has what they lead to."""
    place = page.file.src_uri
    targets = dict(links_of(path_of(place))) if not place.startswith("source/") else {}

    def turn(match: re.Match[str]) -> str:
        link = match["link"]
        if link not in targets:
            return match[0]
        anchor = link.partition("#")[2]
        target = posixpath.relpath(place_of(targets[link]), posixpath.dirname(place) or ".")
        return target + (f"#{anchor}" if anchor else "")

    return CODE_OR_LINK.sub(turn, markdown)
