"""Texts over keys and values of 8 bits on a GPU: speculative ones are plain ones, bit for bit. All need a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from gpus import needs_gpu
from pipelines import make_llm, noisy_copy, prompt_of, run_alone, tokens_of

from trtrun import SamplingParams
from trtrun.api import llm_engine
from trtrun.attention.backend import GatherAttention
from trtrun.attention.latents import GatherLatents
from trtrun.memory import spaces

pytestmark = needs_gpu
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1376, "head_dim": 64, "num_attention_heads": 8}
CHAIN, TREE = {"draft_len": 4}, {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_speculative_texts_over_codes_are_plain_ones(
    tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows alone, 8, 32 and 64 of them: greedy and by seed, beside prompts in chunks, after preemption, over prefixes
    that were used before; chains and trees. All attention is the kernel's."""
    monkeypatch.setattr(GatherAttention, "forward", None)
    target = make_checkpoint(tmp_path / "target", dtype=dtype, **WIDE)
    draft = noisy_copy(tmp_path / "draft", target, 0.3)
    shared = prompt_of(100, seed=99)
    prompts = [
        (shared if number % 3 == 0 else []) + prompt_of(5 + 17 * (number % 9), number % 20) for number in range(64)
    ]
    sampling = [
        SamplingParams(
            max_tokens=40, temperature=(0.0, 0.8, 1.3)[number % 3], top_p=(1.0, 0.9)[number % 2], seed=number
        )
        for number in range(64)
    ]
    texts, preempted, accepted = [], 0, 0
    for rows, model, speculation in (
        (64, None, {}),
        (8, draft, CHAIN),
        (32, draft, CHAIN),
        (64, draft, CHAIN),
        (32, None, TREE),
    ):
        settings: dict[str, Any] = {
            "kv_cache": {"max_tokens": max(600, 55 * rows), "dtype": name},
            "scheduler": {"max_num_tokens": 192 + 10 * rows, "max_batch_size": rows},
            "speculation": speculation,
        }
        with make_llm(target, model, devices=(("cuda:0",), ("cuda:0",)), **settings) as llm:
            outputs = llm.generate(prompts, sampling)
            texts.append(tokens_of(outputs))
            preempted += sum(output.completions[0].statistics.num_preemptions for output in outputs)
            accepted += llm.statistics()["num_accepted_draft_tokens"]
            if model is not None:
                llm.set_speculation(False)
                assert run_alone(llm, prompts[:9], sampling[:9]) == texts[-1][:9], "plain, alone"
    assert all(found == texts[0] for found in texts) and preempted > 0 and accepted > 0


def test_no_round_over_codes_waits_for_a_graph_or_a_kernel(tmp_path: Path) -> None:
    """A start has made all of them."""
    target = make_checkpoint(tmp_path / "target", dtype=torch.bfloat16, **WIDE)
    draft = noisy_copy(tmp_path / "draft", target, 0.3)
    with make_llm(target, draft, devices=(("cuda:0",), ("cuda:0",)), kv_cache={"dtype": "fp8"}) as llm:
        llm.reset_statistics()
        llm.generate([prompt_of(70, number) for number in range(5)], SamplingParams(max_tokens=20))
        found = llm.statistics()
    assert (found["num_captures"], found["num_compilations"]) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["plain", "fp8", "int8"])
def test_speculative_texts_over_latents_are_plain_ones(
    tmp_path: Path, name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In graphs, rows alone and 24 of them, beside prompts in chunks, after preemption; chains and trees. All attention
    is the kernel's, and no round waits for a graph or a kernel."""
    monkeypatch.setattr(GatherLatents, "forward", None)
    target = write_family(tmp_path / "target", "deepseek_v3", dtype=dtype)
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    prompts = [prompt_of(5 + 17 * (number % 9), number % 20) for number in range(24)]
    sampling = [SamplingParams(max_tokens=40, temperature=0.8 * (number % 2), seed=number) for number in range(24)]
    texts, preempted, accepted = [], 0, 0
    for model, speculation in ((None, {}), (draft, CHAIN), (None, TREE)):
        settings: dict[str, Any] = {
            "kv_cache": {"max_tokens": 1200, "dtype": name},
            "scheduler": {"max_num_tokens": 432, "max_batch_size": 24},
            "speculation": speculation,
        }
        with make_llm(target, model, devices=(("cuda:0",), ("cuda:0",)), **settings) as llm:
            llm.reset_statistics()
            outputs = llm.generate(prompts, sampling)
            texts.append(tokens_of(outputs))
            found = llm.statistics()
            assert (found["num_captures"], found["num_compilations"]) == (0, 0)
            preempted += sum(output.completions[0].statistics.num_preemptions for output in outputs)
            accepted += found["num_accepted_draft_tokens"]
            llm.set_speculation(False)
            assert run_alone(llm, prompts[:5], sampling[:5]) == texts[-1][:5], "plain, alone"
    assert all(found == texts[0] for found in texts) and preempted > 0 and accepted > 0


@pytest.mark.parametrize("name", ["plain", "fp8"])
def test_texts_of_windows_are_those_of_layers_that_keep_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Layers with a window, some of all: prompts many times as long, by graphs and in chunks; plain, chains and
    trees."""
    target = make_checkpoint(
        tmp_path / "target",
        "Qwen2ForCausalLM",
        dtype=torch.bfloat16,
        sliding_window=128,
        use_sliding_window=True,
        max_window_layers=1,
        num_hidden_layers=5,
        max_position_embeddings=4096,
        **WIDE,
    )
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    prompts = [prompt_of(length, seed=length) for length in (3, 900, 130, 2000, 47, 300, 700, 1500)]
    sampling = [
        SamplingParams(max_tokens=100, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(8)
    ]
    texts = []
    for reuses, model, speculation in ((None, None, {}), (True, None, {}), (False, draft, CHAIN), (True, None, TREE)):
        settings: dict[str, Any] = {
            "kv_cache": {"max_tokens": 8192, "dtype": name, "enable_block_reuse": bool(reuses)},
            "scheduler": {"max_num_tokens": 512, "max_batch_size": 4},
            "speculation": speculation,
        }
        with monkeypatch.context() as patch:
            if reuses is None:
                for module in (spaces, llm_engine):
                    patch.setattr(module, "window_rule", lambda config, models: None)
            with make_llm(target, model, devices=(("cuda:0",), ("cuda:0",)), **settings) as llm:
                texts.append(tokens_of(llm.generate(prompts, sampling)))
    assert all(found == texts[0] for found in texts)
