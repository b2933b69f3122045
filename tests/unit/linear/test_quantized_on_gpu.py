"""Targets of 4 bits, and of 8 in blocks, on a GPU: speculative texts are plain decoding's, to the token, whatever the
rows and the draft."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpus import needs_gpu
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of
from quantized_checkpoints import make_mixture_pair, make_pair

from trtrun import SamplingParams

GPU = (("cuda:0",), ("cuda:0",))


@needs_gpu
@pytest.mark.parametrize(
    ("name", "dtype", "family"),
    [
        ("fp8 block", "bfloat16", "qwen3_moe"),
        ("compressed-tensors FP8 dynamic", "bfloat16", "mixtral"),
        ("awq", "bfloat16", "qwen3_moe"),
        ("compressed-tensors MXFP4", "bfloat16", "mixtral"),
        ("compressed-tensors NVFP4", "bfloat16", "qwen3_moe"),
        ("compressed-tensors W4A16", "bfloat16", None),
        ("compressed-tensors W4A16", "float16", None),
        ("compressed-tensors W4A16 with zero points", "bfloat16", None),
        ("awq", "float16", None),
        ("gptq", "bfloat16", None),
        ("fp8 block", "bfloat16", None),
        ("compressed-tensors FP8 block", "float16", None),
    ],
)
def test_texts_are_plain_decodings(tmp_path: Path, name: str, dtype: str, family: str | None) -> None:
    """Of mixtures, too; in chunks, with reuse, and with fewer blocks than the rows want, so that some are preempted."""
    stored, dense = make_pair(tmp_path, name) if family is None else make_mixture_pair(tmp_path, family, name)
    draft = noisy_copy(tmp_path / "draft", dense, 0.05)
    prompts = [prompt_of(5 + 37 * (row % 5), seed=row % 50) for row in range(64)]
    sampling = [
        SamplingParams(max_tokens=40, temperature=0.8 * (row % 2), seed=row, ignore_eos=True) for row in range(64)
    ]
    settings = {
        "devices": GPU,
        "dtype": dtype,
        "kv_cache": {"max_tokens": 4096},
        "scheduler": {"max_batch_size": 64, "max_num_tokens": 320},
    }
    with make_llm(stored, **settings) as llm:
        expected = tokens_of(llm.generate(prompts, sampling))
        for rows in (1, 8, 32):
            assert tokens_of(llm.generate(prompts[:rows], sampling[:rows])) == expected[:rows]
    with make_llm(stored, draft, **settings) as llm:
        for rows in (1, 8, 32, 64):
            assert tokens_of(llm.generate(prompts[:rows], sampling[:rows])) == expected[:rows]
        assert llm.statistics()["num_accepted_draft_tokens"] > 100
