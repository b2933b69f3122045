"""The drafters that ship, as a user runs them: plain decoding's texts for held-out prompts, in as many rounds as each
method is worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ROOT, Run, write_rows
from output_rows import read_rows

PROMPTS = json.loads((ROOT / "trtrun" / "assets" / "heldout.json").read_text(encoding="utf-8"))["prompts"]
LENGTH = 96
LEAST = {"medusa_cpu": 2.0, "eagle3_cpu": 4.0, "pard_cpu": 3.2}
"""Tokens a round. Fewer would be those of a drafter that reads something else than it was trained on."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"prompt": prompt["text"]} for prompt in PROMPTS]
    return write_rows(tmp_path_factory.mktemp("shipped") / "prompts.jsonl", rows)


@pytest.fixture
def plain(prompts: Path, trtrun: Run) -> list[list[int]]:
    """Tokens of the target alone, made once."""
    output = prompts.with_name("plain.jsonl")
    if not output.exists():
        config = ROOT / "launch" / "configs" / "one_process_cpu.yaml"
        words = ("--speculation", "none", "--prompts", prompts, "--max-tokens", LENGTH, "--output", output)
        done = trtrun("run", "--config", config, *words)
        assert done.returncode == 0, done.stderr
    return [row["token_ids"] for row in read_rows(output)]


@pytest.mark.parametrize("name", LEAST)
def test_a_shipped_drafter_is_worth_its_name(
    trtrun: Run, prompts: Path, plain: list[list[int]], tmp_path: Path, name: str
) -> None:
    output = tmp_path / "out.jsonl"
    fixed = ("--set", "speculation.pacing=fixed")  # times do not decide how much it drafts
    words = (*fixed, "--prompts", prompts, "--max-tokens", LENGTH, "--output", output)
    done = trtrun("run", "--config", ROOT / "launch" / "configs" / f"{name}.yaml", *words)
    assert done.returncode == 0, done.stderr
    rows = read_rows(output)
    assert [row["token_ids"] for row in rows] == plain
    rounds = sum(row["num_rounds"] for row in rows)
    assert 1 + sum(row["num_accepted_draft_tokens"] for row in rows) / rounds >= LEAST[name]


def test_heads_take_the_place_of_a_configurations_draft_by_one_word(trtrun: Run) -> None:
    config = ROOT / "launch" / "configs" / "one_process_cpu.yaml"
    words = ("--speculation", "medusa", "--set", "draft={model: asset:medusa}", "--prompt", "def main(")
    done = trtrun("run", "--config", config, *words, "--max-tokens", 16)
    plain = trtrun("run", "--config", config, "--speculation", "none", "--prompt", "def main(", "--max-tokens", 16)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
