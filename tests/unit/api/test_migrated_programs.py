"""The programs of docs/migrate-from-vllm.md, as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtrun import LLM, SamplingParams

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migrate-from-vllm.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_programs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("target: {model: 'asset:target', devices: ['cpu:0']}\n", encoding="utf-8")
    exec("\n".join(BLOCKS), {})
    text, _, accepted = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    with LLM(target="asset:target", device="cpu:0") as llm:
        plain = llm.generate(["def main("], SamplingParams(max_tokens=16))[0].completions[0].text
    assert text == plain and int(accepted) >= 0
