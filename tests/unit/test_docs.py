"""What people read: links lead somewhere, files that are named are there, and nothing is too long to be taken in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "trtrun/kernels/cpu/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
SHORT = ("README.md", "docs/architecture.md", "docs/configuration.md", "docs/performance.md", "docs/python.md")
MOST_WORDS = 120
"""Of a paragraph, or a point of a list."""
MOST_CHARACTERS = 300
"""Of a table's cell."""
LONGEST_LINE = 160
"""Characters, of lines that are no table and no code."""

LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![\w/.$}*-])(?:[\w-]+/)*[\w-]+\.(?:py|sh|cu|yaml|svg)\b(?![\w(])")
OF_OTHERS = {
    "config.yaml", "run.yaml", "pair.yaml", "job.yaml", "cluster.yaml", "one.yaml", "llama.yaml", "program.py",
    "benchmarks/serve.py", "inflight_batcher_llm_client.py", "end_to_end_test.py", "end_to_end_grpc_client.py",
    "base_metrics_verification_tests.py", "rounds.svg", "P.svg", "curves.png",
}  # fmt: skip
"""Files of the reader's own, and of other projects."""
ABOUT_OTHERS = ROOT / "docs" / "migrate-from-triton.md"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def without_code(text: str) -> str:
    return FENCE.sub("", text)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """What links into a page may name, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(without_code(page.read_text(encoding="utf-8"))):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            yield link


@cache
def files_by_name() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder in ("docs", "examples", "launch", "parallel", "scripts", "tests", "trtrun"):
        for path in (ROOT / folder).rglob("*.*"):
            found.setdefault(path.name, []).append(name_of(path))
    return found


def missing_files(page: Path) -> list[str]:
    """Files that a page names and that nobody has. A name with folders may leave out those above them."""
    names = set(NAMED.findall(page.read_text(encoding="utf-8"))) - OF_OTHERS
    known = files_by_name()
    return sorted(
        name
        for name in names
        if not (ROOT / name).exists()
        and not any(path.endswith(f"/{name}") for path in known.get(name.rpartition("/")[2], []))
    )


def paragraphs_of(text: str) -> Iterator[str]:
    """Paragraphs and points of lists; tables, headings, pictures of letters and code are none."""
    for block in re.split(r"\n\s*\n", without_code(text)):
        if not block.lstrip().startswith(("|", "#", "<!--")):
            yield from re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", block)


def cells_of(text: str) -> Iterator[str]:
    for line in without_code(text).splitlines():
        if line.startswith("|"):
            yield from (cell.strip() for cell in re.split(r"(?<!\\)\|", line))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not list(dead_links(page))


@pytest.mark.parametrize("page", [page for page in PAGES if page != ABOUT_OTHERS], ids=name_of)
def test_files_that_are_named_are_there(page: Path) -> None:
    assert not missing_files(page)


def test_the_architecture_names_files_by_their_whole_paths() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"`((?:[\w-]+/)+[\w.-]+)`", text)
    assert len(names) > 80 and not [name for name in names if not (ROOT / name).exists()]


@pytest.mark.parametrize("name", SHORT)
def test_paragraphs_and_cells_are_short(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not [part for part in paragraphs_of(text) if len(part.split()) > MOST_WORDS]
    assert not [cell for cell in cells_of(text) if len(cell) > MOST_CHARACTERS]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_are_short(page: Path) -> None:
    lines = without_code(page.read_text(encoding="utf-8")).splitlines()
    assert not [line for line in lines if len(line) > LONGEST_LINE and not line.startswith("|")]


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    other = tmp_path / "other.md"
    other.write_text("# A `word` here?\n\n```\n# no heading\n```\n", encoding="utf-8")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-word-here) [b](other.md#no-heading) [c](gone.md) [d](https://e.example/x)\n\n"
        "`trtrun/cli.py`, cli.py, `launch/cli.py`, scripts/gone.sh and run.yaml\n",
        encoding="utf-8",
    )
    assert list(dead_links(page)) == ["other.md#no-heading", "gone.md"]
    assert missing_files(page) == ["scripts/gone.sh", "trtrun/cli.py"]
    assert [len(part.split()) for part in paragraphs_of("# x\n\na b\n\n- c\n- d e f\n\n| g |\n")] == [2, 2, 4]
    assert [cell for cell in cells_of("| a \\| b | c |\n") if cell] == ["a \\| b", "c"]
