"""Puts the table of other servers' options into docs/migrate-from-vllm.md, made of launch/migration/serving_flags.py.

    python scripts/dev/make_flags_docs.py

It knows the page's two marks, between which the table stands, and nothing of what the options mean.
tests/unit/migration/test_server_flags.py fails where the page has another table.
"""

from __future__ import annotations

from pathlib import Path

from launch.migration.flags import Flag
from launch.migration.serving_flags import FLAGS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate-from-vllm.md"
BEGIN, END = "<!-- made by scripts/dev/make_flags_docs.py -->\n", "<!-- end of the table -->"


def make_table() -> str:
    """What sets a key, a row each; then what is refused. What there is nothing to do for is not in it."""
    keys = [f"| {_names(flag)} | {_here(flag)} |" for flag in FLAGS if flag.here]
    others = [flag for flag in FLAGS if not flag.here]
    some = ", ".join(_names(flag) for flag in others if flag.allowed)
    refused = ", ".join(_names(flag) for flag in others if flag.refuses and not flag.allowed)
    rows = [
        f"| {some} | refused, but for what is so in any case |",
        f"| {refused} | refused |",
    ]
    return "\n".join(["| there | here |", "|---|---|", *keys, *rows, ""])


def _names(flag: Flag) -> str:
    return ", ".join(f"`{name}`" for name in flag.names)


def _here(flag: Flag) -> str:
    keys = ", ".join(f"`{key}`" for key in flag.here.split(", "))
    return f"{keys}: {flag.says}" if flag.says else keys


def replace_table(page: str) -> str:
    """The page with today's table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + make_table() + "\n" + END + rest.partition(END)[2]


def main() -> None:
    """Write the page."""
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
