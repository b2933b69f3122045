"""What else is done with a checkpoint of a family: engines and adapters work, and tools that know it not refuse it by
its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from adapters import make_adapter, merge_adapter
from engines import build_engine
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import make_llm, noisy_copy, prompt_of, tokens_of

from trtrun import SamplingParams
from trtrun.errors import TrtrunError
from trtrun.models.config import read_model_config
from trtrun.tools.conversion.source import open_source
from trtrun.tools.conversion.writers import write_ranks
from trtrun.tools.quantizing.plain_layer import known_plans

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
MODULES = {
    "apertus": ("q_proj", "up_proj", "down_proj"),
    "gemma3_text": ("q_proj", "gate_proj", "down_proj"),
    "granite": ("v_proj", "up_proj", "down_proj"),
    "mixtral": ("q_proj", "v_proj", "o_proj"),
    "olmo2": ("q_proj", "k_proj", "down_proj"),
    "olmoe": ("k_proj", "v_proj", "o_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj"),
    "qwen2_moe": ("q_proj", "k_proj", "o_proj"),
    "qwen3_moe": ("k_proj", "o_proj"),
    "smollm3": ("q_proj", "up_proj", "down_proj"),
}
"""What adapters change."""
ENDS = "TensorRT-LLM has no word for what {}ForCausalLM does at its ends"
REFUSALS = {
    "apertus": (
        "trtrun quantize does not know layers of ApertusForCausalLM: they have a XieluMLPPlan",
        "behind model.layers.0.self_attn stands a XieluMLPPlan, which is not known",
    ),
    "gemma3_text": ("trtrun quantize does not know the ends of Gemma3ForCausalLM", ENDS.format("Gemma3")),
    "granite": ("trtrun quantize does not know the ends of GraniteForCausalLM", ENDS.format("Granite")),
    "mixtral": (
        "trtrun quantize does not know layers of MixtralForCausalLM: they have a ExpertsPlan",
        "behind model.layers.0.self_attn stands a ExpertsPlan, which is not known",
    ),
    "olmo2": ("trtrun quantize does not know the ends of Olmo2ForCausalLM", ENDS.format("Olmo2")),
    "olmo3": ("trtrun quantize does not know the ends of Olmo3ForCausalLM", ENDS.format("Olmo3")),
    "phi3": (
        "trtrun quantize does not know the fused_qkv of Phi3ForCausalLM",
        "model.layers.0.self_attn lies in its files in another way than Llama's",
    ),
    "smollm3": ("trtrun quantize does not know the rope of SmolLM3ForCausalLM", "computes in another way than Llama's"),
}
"""What trtrun quantize and convert say."""


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("family", MODULES)
def test_an_engine_holds_the_checkpoints_bits(tmp_path: Path, family: str, tp_size: int) -> None:
    source = write_family(tmp_path / "source", family)
    engine = build_engine(source, tmp_path / "engine", tp_size)
    model, expected = (PagedModel(path, tp_size=tp_size) for path in (engine, source))
    assert torch.equal(model.forward(BATCH), expected.forward(BATCH))
    assert [one.shard_bytes for one in model.reports] == [one.shard_bytes for one in expected.reports]
    if tp_size == 1:  # of several each has rows of padding, and norms that others have, too
        assert expected.reports[0].bytes_read == expected.reports[0].shard_bytes


@pytest.mark.parametrize("family", MODULES)
def test_texts_with_an_adapter_are_those_of_what_it_is_merged_into(tmp_path: Path, family: str) -> None:
    whole = {"rope_parameters": {"rope_theta": 1e4}} if family == "phi3" else {}
    target = write_family(tmp_path / "target", family, **whole)
    adapter = make_adapter(tmp_path / "adapter", target, modules=MODULES[family])
    merged = merge_adapter(tmp_path / "merged", target, adapter)
    prompts = [prompt_of(length, seed=length) for length in (5, 23)]

    def texts(path: Path, name: str | None, **sections: object) -> list[tuple[int, ...]]:
        sampling = SamplingParams(max_tokens=20, ignore_eos=True, lora_name=name)
        with make_llm(path, None, **sections) as llm:
            return tokens_of(llm.generate(prompts, [sampling] * 2))

    found = texts(target, "own", adapters={"own": str(adapter)}, adapter_slots={"max_rank": 4})
    assert found == texts(merged, None) != texts(target, None)


@pytest.mark.parametrize("family", REFUSALS)
def test_speculative_texts_are_plain_ones(tmp_path: Path, family: str) -> None:
    target = write_family(tmp_path / "target", family, dtype=torch.bfloat16)
    draft = noisy_copy(tmp_path / "draft", target, 0.05)
    prompts = [prompt_of(length, seed=length) for length in (3, 20, 33, 8)]
    kinds = [SamplingParams(max_tokens=24, seed=row, temperature=0.8 * (row % 2), ignore_eos=True) for row in range(4)]
    sections = {"scheduler": {"max_batch_size": 3, "max_num_tokens": 40}, "speculation": {"draft_len": 3}}
    with make_llm(target, draft, **sections) as llm:
        found = tokens_of(llm.generate(prompts, kinds))
        assert llm.statistics()["num_accepted_draft_tokens"] > 10
        llm.set_speculation(False)
        assert found == tokens_of(llm.generate(prompts, kinds))


@pytest.mark.parametrize("family", REFUSALS)
def test_tools_refuse_what_they_do_not_know(tmp_path: Path, family: str) -> None:
    source, (of_quantize, of_convert) = write_family(tmp_path / "source", family), REFUSALS[family]
    with pytest.raises(TrtrunError, match=re.escape(of_quantize)):
        known_plans(read_model_config(source))
    (tmp_path / "ranks").mkdir()
    with pytest.raises(TrtrunError, match=re.escape(of_convert)):
        write_ranks(open_source(source, None), tmp_path / "ranks", 1, lambda done, total: None)
