"""What tests of batch scripts share: a folder to submit from, whose name a shell must not trip over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a prompts file of five rows."""
    folder = tmp_path / "a $(touch bad) folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    lines = [json.dumps({"prompt": f"p{index}"}) for index in range(5)]
    Path("p.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder
