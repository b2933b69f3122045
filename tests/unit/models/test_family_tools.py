"""What else is done with a checkpoint of a family: engines and adapters work, and tools that know it not refuse it by
its name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from adapters import make_adapter, merge_adapter
from engines import build_engine
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import make_llm, prompt_of, tokens_of
from quantized_checkpoints import FORMATS, RATES, leave_plain, store_in_format

from trtrun import SamplingParams
from trtrun.errors import TrtrunError
from trtrun.models.config import read_model_config
from trtrun.tools.conversion.source import open_source
from trtrun.tools.conversion.writers import write_ranks
from trtrun.tools.quantizing.plain_layer import known_plans

BATCH = [[(0, 0, [5, 9, 77, 3]), (1, 0, [8, 8, 1, 190])]]
MODULES = {
    "apertus": ("q_proj", "up_proj", "down_proj"),
    "deepseek_v3": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    "gemma3_text": ("q_proj", "gate_proj", "down_proj"),
    "gemma4_small": ("q_proj", "per_layer_input_gate", "down_proj"),
    "gemma4_text": ("k_proj", "o_proj", "gate_proj"),
    "gpt_oss": ("q_proj", "v_proj", "o_proj"),
    "granite": ("v_proj", "up_proj", "down_proj"),
    "mixtral": ("q_proj", "v_proj", "o_proj"),
    "olmo2": ("q_proj", "k_proj", "down_proj"),
    "olmoe": ("k_proj", "v_proj", "o_proj"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj"),
    "qwen2_moe": ("q_proj", "k_proj", "o_proj"),
    "qwen3_moe": ("k_proj", "o_proj"),
    "seed_oss": ("k_proj", "o_proj", "gate_proj"),
    "smollm3": ("q_proj", "up_proj", "down_proj"),
}
"""What adapters change."""
ENDS, NORMS = "ends", "whose norms are not those of Llama"
EXPERTS = "stands a ExpertsPlan, which is not known"
ONE_TENSOR = "lies in its files in another way than Llama's"
REFUSALS: dict[str, tuple[str | None, str]] = {
    "apertus": ("layers of {} (XieluMLPPlan)", "stands a XieluMLPPlan, which is not known"),
    "deepseek_v2": ("layers of {} (LatentAttentionPlan)", "is a LatentAttentionPlan, which is not known"),
    "ernie4_5": ("{} (its interleaved)", ONE_TENSOR),
    "gemma2": ("{} (its ends)", ENDS),
    "gemma3_text": ("{} (its ends)", ENDS),
    "gemma4_small": ("{} (its ends)", "the layers of"),
    "glm4": ("{} (its attention_output_norm)", NORMS),
    "glm4_moe": ("{} (its rotated)", ONE_TENSOR),
    "gpt_oss": ("{} (its ends)", ENDS),
    "granite": ("{} (its ends)", ENDS),
    "hy_v3": ("{} (its routing)", EXPERTS),
    "minimax_m2": ("layers of {} (WholeNormAttentionPlan)", EXPERTS),
    "mixtral": (None, EXPERTS),
    "olmo2": ("{} (its ends)", ENDS),
    "olmo3": ("{} (its ends)", ENDS),
    "olmoe": ("layers of {} (WholeNormAttentionPlan)", EXPERTS),
    "phi3": ("{} (its fused_qkv)", ONE_TENSOR),
    "qwen2_moe": (None, EXPERTS),
    "qwen3_moe": (None, EXPERTS),
    "qwen3_5_text": ("{} (its ends)", ENDS),
    "smollm3": ("{} (its rope)", "computes in another way than Llama's"),
}
"""What trtrun quantize and convert say; None for what the first does."""


WIDE: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 224,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Sizes that groups and blocks of quantized formats divide."""
OF_INPUTS = {"global_head_dim": 128, "vocab_size_per_layer_input": 224, "hidden_size_per_layer_input": 128}


@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("family", [*MODULES, "glm4_moe", "minimax_m2", "qwen3_next"])
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
def test_tools_refuse_what_they_do_not_know(tmp_path: Path, family: str) -> None:
    """In a line that says what to do."""
    source = write_family(tmp_path / "source", family)
    config, (of_quantize, of_convert) = read_model_config(source), REFUSALS[family]
    if of_quantize is None:
        assert known_plans(config)
    else:
        said = f"trtrun quantize does not know {of_quantize.format(config.architecture)}: set target.quantization: fp8"
        with pytest.raises(TrtrunError, match=re.escape(said)):
            known_plans(config)
    (tmp_path / "ranks").mkdir()
    with pytest.raises(TrtrunError, match=r"^trtrun convert does not know the .*: run the directory itself") as caught:
        write_ranks(open_source(source, None), tmp_path / "ranks", 1, lambda done, total: None)
    assert of_convert in str(caught.value) and config.architecture in str(caught.value)


def test_layers_like_llamas_of_an_architecture_that_tensorrt_llm_does_not_know_are_not_converted(
    tmp_path: Path,
) -> None:
    source = write_family(tmp_path / "source", "seed_oss")
    with pytest.raises(TrtrunError, match="trtrun convert does not know the architecture of SeedOssForCausalLM"):
        write_ranks(open_source(source, None), tmp_path, 1, lambda done, total: None)
    assert known_plans(read_model_config(source))


@pytest.mark.parametrize("family", ["ernie4_5", "glm4", "glm4_moe", "qwen3_5_text"])
def test_adapters_are_refused_where_heads_are_held_in_another_order(tmp_path: Path, family: str) -> None:
    target = write_family(tmp_path / "target", family)
    adapter = make_adapter(tmp_path / "adapter", target, modules=("q_proj",))
    with pytest.raises(TrtrunError, match="are not supported where heads are rotated in part, or by neighbours"):
        make_llm(target, None, adapters={"own": str(adapter)})


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("deepseek_v3", "fp8 block"),
        ("ernie4_5", "gptq with act-order"),
        ("gemma3_text", "gptq with act-order"),
        ("gemma4_small", "compressed-tensors FP8 dynamic"),
        ("glm4", "awq"),
        ("glm4", "fp8 block"),
        ("glm4_moe", "fp8 block"),
        ("mixtral", "awq"),
        ("olmoe", "compressed-tensors FP8 dynamic"),
        ("qwen3_5", "fp8 block"),
        ("qwen3_5_moe", "fp8 block"),
        ("qwen3_5_moe_text", "modelopt NVFP4"),
        ("qwen3_moe", "fp8 block"),
        ("qwen3_next", "compressed-tensors W4A16 with zero points"),
        ("qwen3_next", "fp8 block"),
    ],
)
def test_checkpoints_that_others_have_quantized(tmp_path: Path, family: str, form: str) -> None:
    """Experts among them; routers are plain. Ranks hold rows of some heads in another order."""
    sizes = {**WIDE, **OF_INPUTS} if family == "gemma4_small" else WIDE
    dense, stored = write_family(tmp_path / "dense", family, **sizes), tmp_path / "stored"
    shutil.copytree(dense, stored)
    store_in_format(dense, stored, leave_plain(FORMATS[form], *RATES) if "qwen3_" in family else FORMATS[form])
    for tp_size in (1, 2):
        found, expected = (PagedModel(path, tp_size=tp_size).forward(BATCH) for path in (stored, dense))
        assert torch.equal(found, expected)
