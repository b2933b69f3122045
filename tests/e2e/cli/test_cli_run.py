"""`trtrun run` through the real command: one process, three ranks, files, streams, refused rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import MPIRUN, ONE_PROCESS, THREE_RANKS, Configs, Run, command_words, write_rows
from output_rows import read_rows

PROMPTS = ["def main(", "import os\n", "x", "The quick brown fox", "\u00e4\u4f60\u597d \U0001f600"]
COLUMNS = [
    "index",
    "text",
    "token_ids",
    "finish_reason",
    "num_rounds",
    "num_draft_tokens",
    "num_accepted_draft_tokens",
    "mean_acceptance_length",
    "draft_hit_rate",
    "time_to_first_token_s",
    "time_s",
    "error",
    "input_hash",
]


def prompts_file(folder: Path, rows: list[Any] | None = None) -> Path:
    return write_rows(folder / "prompts.jsonl", rows or [{"prompt": prompt, "max_tokens": 12} for prompt in PROMPTS])


@pytest.fixture(scope="module")
def reference(pair: Path) -> list[list[int]]:
    """What transformers writes, greedily, with the target alone."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
        with torch.inference_mode():
            output = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=12, pad_token_id=0
            )
        texts.append(output[0, tokens.shape[1] :].tolist())
    return texts


@pytest.mark.parametrize("devices", [ONE_PROCESS, THREE_RANKS], ids=["one-process", "three-ranks"])
def test_rows_are_what_transformers_writes(
    config: Configs, trtrun: Run, tmp_path: Path, reference: list[list[int]], devices: dict[str, list[str]]
) -> None:
    output = tmp_path / "out.jsonl"
    done = trtrun("run", "--config", config(devices), "--prompts", prompts_file(tmp_path), "--output", output)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    rows = read_rows(output)
    assert [list(row) for row in rows] == [COLUMNS] * len(PROMPTS)
    assert [row["index"] for row in rows] == list(range(len(PROMPTS)))
    assert [row["token_ids"] for row in rows] == reference
    for row in rows:
        assert row["error"] is None
        assert row["finish_reason"] == "length"
        assert row["num_accepted_draft_tokens"] <= row["num_draft_tokens"]
        assert 1 <= row["mean_acceptance_length"] <= 5
        assert 0 < row["time_to_first_token_s"] <= row["time_s"]
    assert sum(row["num_accepted_draft_tokens"] for row in rows) > 0
    assert "5 prompts, 60 tokens" in done.stderr


def test_started_by_mpirun_the_command_takes_its_roles(
    config: Configs, trtrun: Run, tmp_path: Path, reference: list[list[int]]
) -> None:
    output = tmp_path / "out.jsonl"
    words = [*MPIRUN, "-n", "3", *command_words()]
    done = trtrun(
        "run", "--config", config(THREE_RANKS), "--prompts", prompts_file(tmp_path), "--output", output, words=words
    )
    assert done.returncode == 0, done.stderr
    assert [row["token_ids"] for row in read_rows(output)] == reference


def test_speculation_none_has_no_draft_and_the_same_tokens(
    config: Configs, trtrun: Run, tmp_path: Path, reference: list[list[int]]
) -> None:
    output = tmp_path / "out.jsonl"
    file = config({"target": ["cpu:0"], "draft": ["cpu:1"]}, draft={"model": str(tmp_path / "nowhere")})
    done = trtrun(
        "run", "--config", file, "--prompts", prompts_file(tmp_path), "--output", output, "--speculation", "none"
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(output)
    assert [row["token_ids"] for row in rows] == reference
    assert {row["num_draft_tokens"] for row in rows} == {0}


def test_prompt_lookup_has_no_draft_and_the_same_tokens(
    config: Configs, trtrun: Run, tmp_path: Path, reference: list[list[int]]
) -> None:
    """Over two target ranks, with a draft section that names no directory."""
    output = tmp_path / "out.jsonl"
    file = config(THREE_RANKS, draft={"model": str(tmp_path / "nowhere")})
    words = ("--speculation", "ngram", "--set", "speculation.prompt_lookup_max=1")
    done = trtrun("run", "--config", file, "--prompts", prompts_file(tmp_path), "--output", output, *words)
    assert done.returncode == 0, done.stderr
    rows = read_rows(output)
    assert [row["token_ids"] for row in rows] == reference
    for row in rows:
        assert row["num_accepted_draft_tokens"] <= row["num_draft_tokens"] <= 4 * row["num_rounds"]
    assert sum(row["num_draft_tokens"] for row in rows) > 0


def test_a_bad_row_is_refused_alone(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    rows = [
        {"prompt": "good", "max_tokens": 3},
        {"prompt": "bad", "temperature": -1},
        "{not json",
        {"promt": "bad"},
        "",
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 2},
        {"prompt": "both", "prompt_token_ids": [1]},
        {"prompt_token_ids": [1, 99999]},
        {"prompt_token_ids": []},
        {"prompt": "good", "max_tokens": 1, "stop_token_ids": [5]},
    ]
    output = tmp_path / "out.jsonl"
    done = trtrun("run", "--config", config(ONE_PROCESS), "--prompts", prompts_file(tmp_path, rows), "--output", output)
    assert done.returncode == 4
    written = read_rows(output)
    assert [row["index"] for row in written] == list(range(9))
    assert [len(row["token_ids"]) for row in written] == [3, 0, 0, 0, 2, 0, 0, 0, 1]
    errors = {row["index"]: row["error"] for row in written if row["error"]}
    assert sorted(errors) == [1, 2, 3, 5, 6, 7]
    assert "temperature must be 0 or between 1e-30 and 1e30, not -1" in errors[1]
    assert "unknown key 'promt' (did you mean 'prompt'?)" in errors[3]
    assert 'one of "prompt", "prompt_token_ids" and "messages"' in errors[5]
    assert "99999" in errors[6]
    for index in errors:
        assert f"row {index} (line {index + 1 + (index > 3)}) refused: " in done.stderr


@pytest.mark.parametrize("devices", [ONE_PROCESS, THREE_RANKS], ids=["one-process", "three-ranks"])
def test_what_no_rank_could_carry_costs_its_row_alone(
    config: Configs, trtrun: Run, tmp_path: Path, devices: dict[str, list[str]]
) -> None:
    rows = [
        {"prompt": "good", "max_tokens": 3},
        {"prompt_token_ids": [5] * 10, "max_tokens": 10**30, "ignore_eos": True},
        {"prompt_token_ids": [5] * 10, "max_tokens": 2**63 - 1, "min_tokens": 2**63 - 1},
        {"prompt": "x", "max_tokens": 3, "temperature": 1, "seed": 3, "top_k": 10**30},
        '{"prompt": "a\\ud800b"}',
        {"prompt": "x", "temperature": 10**400},
        {"prompt": "x", "bad_words": ["\ud800"]},
        '{"prompt": ' + "[" * 950 + "]" * 950 + "}",
        {"prompt": "good", "max_tokens": 3},
    ]
    output, file = tmp_path / "out.jsonl", config(devices, scheduler={"max_seq_len": 40})
    done = trtrun("run", "--config", file, "--prompts", prompts_file(tmp_path, rows), "--output", output)
    assert done.returncode == 4, done.stderr
    assert "Traceback" not in done.stderr
    written = read_rows(output)
    assert [len(row["token_ids"]) for row in written] == [3, 30, 30, 3, 0, 0, 0, 0, 3]
    assert [row["index"] for row in written if row["error"]] == [4, 5, 6, 7]
    assert written[0]["token_ids"] == written[8]["token_ids"]


def test_many_refusals_are_a_few_lines_and_a_count(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    rows = [{"promt": "bad"}] * 500 + [{"prompt": "good", "max_tokens": 2}] + [{"promt": "bad"}] * 500
    output = tmp_path / "out.jsonl"
    done = trtrun("run", "--config", config(ONE_PROCESS), "--prompts", prompts_file(tmp_path, rows), "--output", output)
    assert done.returncode == 4
    lines = done.stderr.splitlines()
    assert len(lines) == 22
    assert lines[0].startswith("trtrun: row 0 (line 1) refused: unknown key 'promt'")
    assert lines[-2] == "trtrun: 980 more rows were refused: the `error` of each output row says why"
    assert [row["error"] is None for row in read_rows(output)].count(True) == 1


def test_one_prompt_streams_its_text(config: Configs, trtrun: Run) -> None:
    arguments = ("run", "--config", config(ONE_PROCESS), "--prompt", "def main(", "--max-tokens", 16)
    streamed = trtrun(*arguments)
    listed = trtrun(*arguments, "--output", "-")
    assert (streamed.returncode, listed.returncode) == (0, 0)
    text = json.loads(listed.stdout)["text"] + "\n"
    assert streamed.stdout == text.replace("\r\n", "\n").replace("\r", "\n")  # as subprocess reads it


def test_options_are_defaults_that_rows_override(config: Configs, trtrun: Run, tmp_path: Path) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a", "seed": 5}, {"prompt": "a"}, {"prompt": "a", "max_tokens": 3, "n": 2}]
    output = tmp_path / "out.jsonl"
    done = trtrun(
        *("run", "--config", config(ONE_PROCESS), "--prompts", prompts_file(tmp_path, rows), "--output", output),
        *("--temperature", 1.5, "--seed", 4, "--max-tokens", 9, "--prompt", "a"),
    )
    assert done.returncode == 0, done.stderr
    written = read_rows(output)
    assert [len(row["token_ids"]) for row in written] == [9, 9, 9, 9, 3]
    assert written[0]["token_ids"] == written[1]["token_ids"] == written[3]["token_ids"]
    assert written[2]["token_ids"] != written[0]["token_ids"]
    assert [len(completion["token_ids"]) for completion in written[4]["completions"]] == [3, 3]
    assert written[4]["completions"][0]["token_ids"] == written[4]["token_ids"]


def test_texts_of_several_prompts_are_printed(config: Configs, trtrun: Run) -> None:
    done = trtrun("run", "--config", config(ONE_PROCESS), "--prompt", "a", "--prompt", "b", "--max-tokens", 4)
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("---")] == ["--- 0 (length)", "--- 1 (length)"]
