"""What is added without touching a file of the product: start here when you add something of the kind.

A drafting method of each placement is in tests/helpers/own_drafters.py, one of them with a store that it fills from the
target's hidden states (tests/unit/engine/test_taps.py compares these). One that has draft ranks of its own needs real
ranks and is tested in tests/ranks/test_own_drafters.py; one that proposes trees is in tests/helpers/branching.py. A KV
format is in tests/helpers/own_kv_format.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from own_drafters import own_methods
from own_kv_format import own_kv_format
from pipelines import configuration, make_llm, noisy_copy, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.errors import ConfigError
from trtrun.memory.memory_requirements import kv_bytes_per_block
from trtrun.models.config import read_model_config


@pytest.fixture(autouse=True)
def methods() -> Iterator[None]:
    with own_methods():
        yield


@pytest.mark.parametrize(("method", "fewest"), [("repeating", 1), ("recalling", 1), ("stepping", 60)])
def test_a_drafting_method_is_a_class_and_two_table_entries(tmp_path: Path, method: str, fewest: int) -> None:
    """On target ranks, and on draft ranks that share their devices: texts are plain decoding's, drafts are accepted."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = noisy_copy(tmp_path / "draft", target, 0.02) if method == "stepping" else None
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 40)]
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=index, temperature=0.8 * (index % 2)) for index in range(6)
    ]
    sections = {
        "speculation": {"method": method, "draft_len": 3},
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
        "kv_cache": {"max_tokens": 160, "block_size": 8},
    }
    with make_llm(target, draft, **sections) as llm:
        found = tokens_of(llm.generate(prompts, sampling))
        accepted = llm.statistics()["num_accepted_draft_tokens"]
        llm.check_idle()
        llm.set_speculation(False)
        assert found == tokens_of(llm.generate(prompts, sampling))
    assert accepted >= fewest


def test_what_a_method_says_of_itself_is_held_to(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    with pytest.raises(ConfigError, match=r"draft: missing, though speculation\.method is stepping"):
        make_llm(target, None, speculation={"method": "stepping"})
    with pytest.raises(ConfigError, match="use_logits does not go with method repeating"):
        make_llm(target, None, speculation={"method": "repeating", "use_logits": True})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kv_format_is_a_class_and_a_name(tmp_path: Path, dtype: str) -> None:
    """Speculative texts, drafted ahead of time or as trees, are plain decoding's with the same format: preempted rows
    and prefixes in use twice among them. The store takes the bytes that the format says."""
    target = make_checkpoint(tmp_path / "target", seed=1)
    draft = noisy_copy(tmp_path / "draft", target, 0.02)
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8, 5, 40)]
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=index, temperature=0.8 * (index % 2), logprobs=0)
        for index in range(6)
    ]
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "draft_len": 3, "max_paths": 3}
    sections = {
        "scheduler": {"max_batch_size": 3, "max_num_tokens": 40},
        "kv_cache": {"max_tokens": 112, "block_size": 8, "dtype": "rounded"},
    }
    found = []
    with own_kv_format():
        for model, speculation in ((None, {}), (draft, {"draft_len": 3}), (None, ngram)):
            with make_llm(target, model, speculation=speculation, dtype=dtype, **sections) as llm:
                store = next(llm.engine.orchestrator._ranks._worker.target._store.parts())[0]  # type: ignore[attr-defined]
                for _ in range(2):
                    outputs = llm.generate(prompts, sampling)
                    found.append(tokens_of(outputs))
                llm.check_idle()
        config, shapes = configuration(target, None, dtype=dtype, **sections), read_model_config(target)
        assert store.dtype is torch.int8 and store.shape[-1] == shapes.head_dim + 4
        size = shapes.num_layers * 2 * shapes.num_kv_heads * 8 * (shapes.head_dim + 4)
        assert kv_bytes_per_block(config, shapes, 1, getattr(torch, dtype)) == size
    assert all(texts == found[0] for texts in found)
    with make_llm(target, None, dtype=dtype) as llm:
        plain = llm.generate(prompts, sampling)
    values = [next(entry.logprob for entry in one.completions[0].logprobs or ()) for one in (*outputs, *plain)]
    assert values[:6] == pytest.approx(values[6:], abs=0.2) and values[:6] != values[6:]


def test_an_unknown_kv_format_is_refused(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", seed=1)
    with pytest.raises(ConfigError, match=r"unknown kv_cache\.dtype 'rounded'; known: auto"):
        make_llm(target, None, kv_cache={"dtype": "rounded"})
