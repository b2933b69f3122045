"""Qwen3-Next and Qwen3.5 beyond what all families are tried for (test_families.py): heads of their real sizes, rows
that are preempted or begin behind others, how files have experts, and what config.json may not say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import configuration, make_llm, noisy_copy, run_alone, tokens_of
from quantized_checkpoints import FORMATS, store_in_format
from safetensors.torch import load_file, save_file
from test_model_invariance import check_chunks, check_company, dtype
from test_model_logits import check_logits, prompt_of

from trtrun import SamplingParams
from trtrun.errors import CheckpointError, TrtrunError
from trtrun.kvcache.row_states import RowStates
from trtrun.kvcache.specs import StateDtype, state_of
from trtrun.memory.spaces import num_snapshots, snapshot_bytes, state_space
from trtrun.models.config import read_model_config
from trtrun.start.job_spec import JobSpec
from trtrun.weights.weight import Share

__all__ = ["dtype"]

VOCABULARY = 19
BATCH = [[(0, 0, prompt_of(12))]]


def test_wide_heads_have_the_same_bits_in_any_company(tmp_path: Path, dtype: torch.dtype) -> None:
    """Keys as released, and values that are no multiple of a vector register."""
    wide = {"linear_key_head_dim": 128, "linear_value_head_dim": 47}
    path = write_family(tmp_path, "qwen3_5_text", dtype=dtype, **wide, num_hidden_layers=2)
    check_chunks(PagedModel(path, dtype, block_size=16))
    check_company(path, dtype)


@pytest.mark.parametrize(
    ("method", "kind", "of_states"), [("draft_target", "bfloat16", "float32"), ("ngram", "float32", "bfloat16")]
)
def test_drafted_texts_are_plain_ones_of_rows_that_begin_behind_others_and_are_preempted(
    tmp_path: Path, method: str, kind: str, of_states: str
) -> None:
    """Prompts are read in small chunks beside rows that decode, then come again with what followed."""
    target = write_family(
        tmp_path / "target",
        "qwen3_5_text",
        dtype=getattr(torch, kind),
        vocab_size=VOCABULARY,
        num_hidden_layers=2,
    )
    of_model = {"draft": noisy_copy(tmp_path / "draft", target, 0.05)} if method == "draft_target" else {}
    shared = prompt_of(40, 5, VOCABULARY)
    prompts = [[*shared[: 40 - 9 * row], *prompt_of(5 + row, row, VOCABULARY) * 2] for row in range(4)]
    kinds = [SamplingParams(max_tokens=24, temperature=0.8 * (row == 2), seed=row) for row in range(4)]
    cache = {"block_size": 4, "state_dtype": of_states}
    with make_llm(target, speculation={"method": "none"}, kv_cache={**cache, "enable_block_reuse": False}) as llm:
        alone = run_alone(llm, prompts, kinds)
        longer = [[*prompt, *text[0], 7] for prompt, text in zip(prompts, alone, strict=True)]
        longer_alone = run_alone(llm, longer, kinds)
    with make_llm(
        target,
        **of_model,
        dtype=kind,
        speculation={"method": method, "draft_len": 2},
        scheduler={"max_num_tokens": 24, "max_batch_size": 3},
        kv_cache={**cache, "max_tokens": 132},
    ) as llm:
        found = llm.generate(prompts, kinds)
        assert tokens_of(found) == alone
        again = llm.generate(longer, kinds)
        assert tokens_of(again) == longer_alone
        told = [one.statistics for output in [*found, *again] for one in output.completions]
        assert sum(one.num_preemptions for one in told) > 0
        assert max(one.num_cached_prompt_tokens for one in told) >= 12
        totals = llm.statistics()
        assert 0 < totals["num_accepted_draft_tokens"] < totals["num_draft_tokens"]
        llm.check_idle()


def test_experts_of_a_layer_may_lie_in_one_tensor(tmp_path: Path) -> None:
    """As released, and as transformers has them in memory; single ones as it saves them."""
    stacked, single = (
        write_family(tmp_path / name, "qwen3_5_moe", old_names=name == "single") for name in ("stacked", "single")
    )
    name = "model.language_model.layers.0.mlp.experts"
    assert f"{name}.gate_up_proj" in load_file(stacked / "model.safetensors")
    assert f"{name}.4.up_proj.weight" in load_file(single / "model.safetensors")
    check_logits(stacked, 2)
    assert torch.equal(*(PagedModel(path, tp_size=2).forward(BATCH) for path in (stacked, single)))


@pytest.mark.parametrize("features", [128, 100])
def test_experts_in_blocks_may_lie_in_one_tensor(tmp_path: Path, features: int) -> None:
    """With their scales in another; they are refused where gates and factors behind them share scales."""
    sizes = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), features)
    others: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_experts": 2}
    dense = write_family(tmp_path / "dense", "qwen3_5_moe_text", hidden_size=256, **sizes, **others)
    single, stacked = (Path(shutil.copytree(dense, tmp_path / name)) for name in ("single", "stacked"))
    store_in_format(dense, single, FORMATS["fp8 block"])
    shutil.copy(single / "config.json", stacked)
    tensors = load_file(single / "model.safetensors")
    for layer, end in ((layer, end) for layer in range(2) for end in ("", "_scale_inv")):
        experts = f"model.layers.{layer}.mlp.experts"
        gates, ups, downs = (
            [tensors.pop(f"{experts}.{expert}.{name}_proj.weight{end}") for expert in range(2)]
            for name in ("gate", "up", "down")
        )
        tensors[f"{experts}.gate_up_proj{end}"] = torch.cat((torch.stack(gates), torch.stack(ups)), 1)
        tensors[f"{experts}.down_proj{end}"] = torch.stack(downs)
    save_file(tensors, stacked / "model.safetensors", {"format": "pt"})
    if features == 128:
        assert torch.equal(*(PagedModel(path, tp_size=2).forward(BATCH) for path in (stacked, single)))
    else:
        with pytest.raises(CheckpointError, match=r"has no tensor '.*experts\.0\.gate_proj\.weight_scale_inv'"):
            PagedModel(stacked)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_set_aside_for_states_is_what_they_take(tmp_path: Path, dtype: StateDtype) -> None:
    path = write_family(tmp_path, "qwen3_5_text", num_hidden_layers=2)
    config = configuration(path, None, kv_cache={"state_dtype": dtype})
    models = JobSpec(config).models
    specs = [spec for layer in models.target.keeps(Share(0, 1)) if (spec := state_of(layer)) is not None]
    space = state_space(config, models, "target", 9)
    states = RowStates(dict(enumerate(specs)), space, 9, torch.device("cpu"))
    assert {layer.states[1].dtype for layer in states.layers.values()} == {getattr(torch, dtype)}
    in_copies = 4 * space.max_rows * max(spec.state_bytes("float32") for spec in specs)
    assert states.num_bytes == space.num_bytes(specs) - in_copies
    row = snapshot_bytes(config, models, "target") // num_snapshots(config, models)
    assert row == sum(part[0].numel() * part.itemsize for one in states.layers.values() for part in one.states)


def test_layers_that_draft_are_left_in_the_files(tmp_path: Path) -> None:
    path = write_family(tmp_path, "qwen3_next")
    expected, weights = PagedModel(path).forward(BATCH), load_file(path / "model.safetensors")
    weights |= {f"mtp.{name}.weight": torch.full((64,), 3.0) for name in ("norm", "layers.0.input_layernorm")}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(PagedModel(path).forward(BATCH), expected)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_keys_left_out_get_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    path = write_family(tmp_path, family)
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    kept = {name: values[name] for name in ("architectures", "model_type", "dtype")}
    (path / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    config, reference = read_model_config(path), AutoConfig.from_pretrained(path)
    for own, name in (
        *(
            (name, name)
            for name in ("vocab_size", "hidden_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
        ),
        *(("num_layers", "num_hidden_layers"), ("num_heads", "num_attention_heads")),
        ("num_kv_heads", "num_key_value_heads"),
    ):
        assert getattr(config, own) == getattr(reference, name), name
    of_nets = [index for index, kind in enumerate(reference.layer_types) if kind == "linear_attention"]
    assert config.layers_with_states == tuple(of_nets)
    assert config.rope.rotated == int(reference.head_dim * reference.rope_parameters["partial_rotary_factor"])
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    net: Any = config.layers[0]
    sizes = net.attention.key_heads, net.attention.value_heads, net.attention.key_dim, net.attention.kernel
    named = ("num_key_heads", "num_value_heads", "key_head_dim", "conv_kernel_dim")
    assert sizes == tuple(getattr(reference, f"linear_{name}") for name in named)
    if family != "qwen3_5_text":
        assert (net.mlp.num_experts, net.mlp.num_chosen) == (reference.num_experts, reference.num_experts_per_tok)
        assert net.mlp.num_features == reference.moe_intermediate_size
        assert net.mlp.num_shared_features == reference.shared_expert_intermediate_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 must be a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim 1 is not supported"),
        ({"linear_key_head_dim": 0}, "'linear_key_head_dim' must be a positive whole number, not 0"),
        ({"attn_output_gate": False}, "attn_output_gate false is not supported"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "unknown layer type 'sliding_attention'; known layer types: full_attention, linear_attention",
        ),
    ],
)
def test_what_the_layers_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write_family(tmp_path, "qwen3_5_text", num_hidden_layers=2) / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**values, **changes}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read_model_config(tmp_path)


def test_ranks_share_one_model_of_dummy_weights(tmp_path: Path) -> None:
    file = write_family(tmp_path, "qwen3_next") / "model.safetensors"
    file.unlink()
    found = [PagedModel(tmp_path, tp_size=size, load_format="dummy").forward(BATCH) for size in (1, 4)]
    assert torch.allclose(*found, rtol=1e-3, atol=1e-4) and found[0].std() > 1e-3


def test_value_heads_that_ranks_cannot_share_out_are_refused(tmp_path: Path) -> None:
    path = write_family(tmp_path, "qwen3_5_text", num_attention_heads=6, num_key_value_heads=3, vocab_size=204)
    with pytest.raises(TrtrunError, match=r"heads cannot be .* over 3 "):
        PagedModel(path, tp_size=3)
