"""Clients of tensorrtllm_backend 0.18.0, unmodified, against a served pair, where TRTRUN_TEST_TENSORRTLLM_BACKEND names
a checkout of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published_commands import Document
from servers import PATIENCE, Server

from trtrun import LLM, SamplingParams

VARIABLE = "TRTRUN_TEST_TENSORRTLLM_BACKEND"
CHECKOUT = Path(os.environ.get(VARIABLE, ""))
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(VARIABLE not in os.environ, reason=f"needs tensorrtllm_backend: name a checkout by {VARIABLE}"),
]
MODELS = ["--draft-tensorrt-llm-model-name=tensorrt_llm_draft", "--target-tensorrt-llm-model-name=tensorrt_llm"]
ROWS = [
    {"input": "What is Ubuntu operation system?", "instruction": "Answer the question shortly.", "output": "a " * 20},
    {"input": "def main(", "instruction": "x):", "output": "a " * 20},
]


def run(script: str, *words: str) -> str:
    """What a script says."""
    done = subprocess.run(
        [sys.executable, str(CHECKOUT / script), *words], capture_output=True, text=True, timeout=4 * PATIENCE
    )
    assert done.returncode == 0 and "Received an error" not in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "more", [[], ["--stop-words", "return", "--bad-words", "self", "None"]], ids=["plain", "words"]
)
def test_the_client_that_drafts_itself(server: Server, llm: LLM, more: list[str]) -> None:
    prompt = "What is Ubuntu operation system?"
    text = run(
        "inflight_batcher_llm/client/e2e_grpc_speculative_decoding_client.py",
        f"--url-target={server.grpc_address}", *MODELS, "--output-len=40", "--num-draft-tokens=4", "--end-id=0",
        "--pad-id=0", "--prompt", prompt, *more,
    )  # fmt: skip
    if not more:
        assert llm.tokenizer is not None
        (completion,) = llm.generate([prompt], SamplingParams(max_tokens=40))[0].completions
        whole = llm.tokenizer.decode([*llm.tokenizer.encode(prompt), *completion.token_ids])
        assert text == f"Final text:\n {whole}\n"


@pytest.mark.parametrize(
    "more",
    [
        ["--execute-bls-speculative-decoding", "--use-draft-logits", "--verbose"],
        ["--execute-bls-speculative-decoding"],
        [],
        ["--stop-words", "for", "import", "--bad-words", "self"],
        ["--repetition-penalty=1.2"],
        ["--execute-bls-speculative-decoding", "--presence-penalty=0.3", "--frequency-penalty=0.1"],
    ],
    ids=["bls with logits", "bls", "client", "words", "client with a penalty", "bls with penalties"],
)
def test_its_test_of_speculative_decoding(server: Server, tmp_path: Path, more: list[str]) -> None:
    dataset = tmp_path / "input_data.json"
    dataset.write_text(json.dumps(ROWS))
    url = server.grpc_address
    said = run(
        "tools/inflight_batcher_llm/speculative_decoding_test.py", "--max-input-len=2500", f"--dataset={dataset}",
        f"--url-control={url}", f"--url-target={url}", f"--url-draft={url}", *MODELS,
        "--bls-speculative-tensorrt-llm-model-name=tensorrt_llm_bls", "--num-draft-tokens=4", *more,
    )  # fmt: skip
    assert said.count("Outputs match") == len(ROWS) and f"failed/total: 0/{len(ROWS)}" in said, said


def test_its_command_lines_as_published(server: Server, tmp_path: Path) -> None:
    """Both clients of the page on draft-target models, from a folder that has the clone."""
    rows = [{"input": "What is Ubuntu operation system?", "instruction": "Answer the question shortly.", "output": " "}]
    (tmp_path / "input_data.json").write_text(json.dumps(rows))
    for folder in ("inflight_batcher_llm", "tools"):
        (tmp_path / folder).symlink_to(CHECKOUT / folder)
    variables = dict.fromkeys(("DRAFT_MODEL_PATH", "TARGET_MODEL_PATH"), "llama")
    document = Document("draft_target_model.txt", variables, {"localhost:8001": server.grpc_address})
    lines = [words for words in document.commands() if words[0] == "python3" and server.grpc_address in str(words)]
    assert len(lines) == 2
    for line in lines:
        words = [sys.executable, *line[1:]]
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE, check=False)
        assert done.returncode == 0 and "Received an error" not in done.stdout, done.stdout + done.stderr
        assert done.stdout.strip()
