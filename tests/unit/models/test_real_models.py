"""Small real models in float32: greedy texts are transformers', of prompts shorter and longer than windows, with and
without drafts. `scripts/dev/real_models.sh` makes them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from pipelines import make_llm, tokens_of

from trtrun import SamplingParams
from trtrun.models.config import read_model_config

FOLDER = os.environ.get("TRTRUN_REAL_MODELS", "")
NAMES = ("gemma3-270m", "smollm2-135m")
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time", "List three colours:\n1.")
LONG = "The history of computing began long before the modern machine. " * 600
LENGTHS = (600, 1300, 5000)
COUNT = 24

pytestmark = pytest.mark.skipif(not FOLDER, reason="needs real models: scripts/dev/real_models.sh, TRTRUN_REAL_MODELS")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_of_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(FOLDER) / name
    tokenizer = AutoTokenizer.from_pretrained(path)
    longest = read_model_config(path).max_position_embeddings - COUNT
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    prompts += [tokenizer(LONG).input_ids[: min(length, longest)] for length in LENGTHS]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            text = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=COUNT, pad_token_id=0
            )
            expected.append([tuple(text[0, len(prompt) :].tolist())])
    del model
    for method in ("none", "ngram", "token_recycling"):
        with make_llm(path, dtype="float32", speculation={"method": method}) as llm:
            assert tokens_of(llm.generate(prompts, SamplingParams(max_tokens=COUNT))) == expected, method
