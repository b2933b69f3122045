"""scripts/mmlu.py and scripts/summarize.py with the shipped pair: with drafts, without, and by transformers beside."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from commands import ROOT, Run, write_rows

MODELS = [
    *("--hf_model_dir", "asset:target", "--draft_engine_dir", "asset:draft", "--data_type", "fp32"),
    *("--draft_target_model_config", "[4,[0],[0],False]", "--test_trt_llm", "--test_hf", "--check_accuracy"),
]


def script(name: str) -> list[str]:
    return [sys.executable, str(ROOT / "scripts" / name)]


def test_mmlu_agrees_with_transformers_and_ends_with_status_1_below_its_threshold(tmp_path: Path, trtrun: Run) -> None:
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        rows = [f"What is {n} plus {n}?,{2 * n},{n},{n + 7},{3 * n},{'ABCD'[n % 4]}\n" for n in range(1, 6)]
        (tmp_path / split / f"astronomy_{split}.csv").write_text("".join(rows), encoding="utf-8")
    ranks = ["--draft_target_model_config", "[4,[0],[1],False]"]
    words = [*MODELS, *ranks, "--data_dir", tmp_path, "--accuracy_threshold", "101"]
    done = trtrun(*words, words=script("mmlu.py"))
    assert done.returncode == 1
    by_trtrun, _, by_transformers = done.stdout.partition("Hugging Face:\n")
    assert "With drafts the answers are the plain ones, token by token: 5 of 5\n" in by_trtrun
    assert "The answers of both are the same tokens: 5 of 5\n" in by_transformers
    said = re.findall("(?:MMLU|Average).*accuracy.*", done.stdout)
    assert len(said) == 8 and said[:4] == said[4:]
    assert "expected accuracy >= 101" in done.stderr.splitlines()[-1]


def test_summaries_and_perplexities_are_those_of_transformers(tmp_path: Path, trtrun: Run) -> None:
    rows = [{"article": f"def add(a, b):\n    return a + {n}\n" * n, "highlights": "add"} for n in (1, 3, 60)]
    lines = write_rows(tmp_path / "test.jsonl", [json.dumps(row) for row in rows])
    done = trtrun(
        *MODELS,
        *("--dataset_dir", lines, "--eval_ppl", "--output_len", "12", "--max_input_length", "200"),
        *("--tensorrt_llm_rouge1_threshold", "-1", "--tensorrt_llm_ppl_threshold", "99"),
        *("--batch_size", "2", "--output_dir", tmp_path / "out"),
        words=script("summarize.py"),
    )
    assert done.returncode == 0, done.stderr
    assert "With drafts the answers are the plain ones, token by token: 3 of 3\n" in done.stdout
    assert "The answers of both are the same tokens: 3 of 3\n" in done.stdout
    ours, theirs = map(float, re.findall("Per-token perplexity: (.*)", done.stdout))
    assert 1 < ours < 99 and abs(ours / theirs - 1) < 1e-4
    scores = re.findall("rouge.*", done.stdout)
    assert len(scores) == 8 and scores[:4] == scores[4:]
    texts = [(tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("trtllm.out", "hf.out")]
    assert texts[0] == texts[1] and texts[0].count("[Beam 0]") == 3
