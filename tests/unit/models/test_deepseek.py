"""DeepSeek's models beyond what all families are tried for: other forms of them, what is kept of a token, in 8 bits as
well, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_checkpoints import write_family
from paged import PagedModel
from pipelines import configuration, make_llm, noisy_copy, tokens_of
from safetensors.torch import load_file, save_file
from test_model_logits import check_logits, prompt_of

from trtrun import SamplingParams
from trtrun.attention.latents import check_latents
from trtrun.errors import CheckpointError, ConfigError
from trtrun.kvcache.formats import KVScheme, choose_format
from trtrun.kvcache.specs import PagedLatent
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.loading.stored_report import describe_kept
from trtrun.memory.memory_requirements import kv_bytes_per_block, reads_in_place
from trtrun.models.config import read_model_config
from trtrun.weights.weight import Share


def edit(path: Path, **changes: Any) -> Path:
    """Change keys of its config.json."""
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), **changes}), "utf-8")
    return path


@pytest.mark.parametrize(
    ("family", "values"),
    [
        (
            "deepseek_v2",
            {
                "q_lora_rank": 36,
                "topk_method": "group_limited_greedy",
                "n_group": 3,
                "topk_group": 2,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 40.0,
                    "mscale": 0.707,
                    "mscale_all_dim": 0.707,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        (
            "deepseek_v3",
            {"q_lora_rank": None, "attention_bias": False, "rope_interleave": False, "norm_topk_prob": False},
        ),
    ],
)
def test_other_forms_are_those_of_transformers(tmp_path: Path, family: str, values: dict[str, Any]) -> None:
    check_logits(write_family(tmp_path, family, **values))


def test_kimi_has_the_layers_of_deepseek_v3_and_what_files_leave_out(tmp_path: Path) -> None:
    """One group, as Kimi-K2's config.json has it; without keys that transformers 4 does not write."""
    path = write_family(tmp_path, "deepseek_v3", n_group=1, topk_group=1)
    expected = PagedModel(path).forward([[(0, 0, prompt_of(9))]])
    edit(path, model_type="kimi_k2", topk_method="noaux_tc", scoring_func="sigmoid", moe_layer_freq=1, head_dim=None)
    assert torch.equal(PagedModel(path).forward([[(0, 0, prompt_of(9))]]), expected)


def test_a_token_keeps_one_latent_on_every_rank(tmp_path: Path) -> None:
    config = read_model_config(write_family(tmp_path, "deepseek_v2", num_hidden_layers=4))
    for ranks in (1, 4):
        assert list(config.keeps(Share(ranks - 1, ranks))) == [(PagedLatent(44 + 12),)] * 4
        said = describe_kept(config, "auto", Share(0, ranks), torch.bfloat16, "cuda")
        assert said == f"latents, the same on each rank, are kept: {56 * 4 * 2} B a token on a rank"


def test_matrices_of_heads_are_dense_where_others_keep_their_codes(tmp_path: Path) -> None:
    """Of block FP8 on GPUs: what makes keys and values of latents is multiplied into queries and outputs."""
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "q_lora_rank": 128}
    path = write_family(tmp_path, "deepseek_v3", hidden_size=128, **sizes)
    edit(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    config, plain = read_model_config(path), QUANTIZATIONS.get("none")
    held = {
        part.name.rpartition("self_attn.")[2]: set(
            config.quantization_of(weight, plain).create(weight.cut(Share(1, 2)), torch.bfloat16, "cuda")
        )
        for weight in config.layers[0].attention.weights()  # type: ignore[attr-defined]
        for part in weight.parts
    }
    codes = {"codes", "block_scale"}
    assert held["kv_b_proj.weight"] == {"weight"} and held["q_a_proj.weight"] == held["q_b_proj.weight"] == codes
    assert held["kv_a_proj_with_mqa.weight"] == held["o_proj.weight"] == codes


def test_routers_compute_in_float32(tmp_path: Path) -> None:
    """Scores of bfloat16 would tie, and biases of experts with them."""
    path = write_family(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    mlp = PagedModel(path, torch.bfloat16).models[0]._layers[1].mlp
    weights = load_file(path / "model.safetensors")
    weight, x = weights["model.layers.1.mlp.gate.weight"], torch.randn(9, 64).bfloat16()
    logits, bias = mlp._router(x), torch.tensor([1.0, 1.001, 1.002, 0, 0, 0, 0, 0])
    assert logits.dtype is torch.float32 and (logits - x.double() @ weight.double().T).abs().max() < 1e-5
    weights["model.layers.1.mlp.gate.e_score_correction_bias"] = bias
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(PagedModel(path, torch.bfloat16).models[0]._layers[1].mlp._choose.keywords["bias"], bias)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_latents_of_8_bits(tmp_path: Path, kind: str) -> None:
    """Near what they are of, and with a draft that is kept so, too, the texts of plain decoding."""
    target = write_family(tmp_path / "target", "deepseek_v3", dtype=torch.bfloat16)
    prompts, sampling = [prompt_of(length, seed=length) for length in (3, 17, 29)], [SamplingParams(max_tokens=40)] * 3
    batch = [[(0, 0, prompts[1])]]
    plain, coded = (PagedModel(target, kv_format=name).forward(batch) for name in ("plain", kind))
    assert 0 < (coded[0] - plain[0]).abs().max() < 0.2 * plain[0].abs().max()
    draft, settings = noisy_copy(tmp_path / "draft", target, 0.05), {"dtype": "bfloat16", "kv_cache": {"dtype": kind}}
    with make_llm(target, draft, **settings) as llm:
        found = tokens_of(llm.generate(prompts, sampling))
        assert llm.statistics()["num_accepted_draft_tokens"] > 10
        llm.set_speculation(False)
        assert found == tokens_of(llm.generate(prompts, sampling))


def test_formats_that_latents_are_not_kept_in_are_refused() -> None:
    for device_type in ("cpu", "cuda"):
        with pytest.raises(ConfigError, match=r"have no scales of layers, which the checkpoint has"):
            check_latents(choose_format("auto", KVScheme("fp8", True)), device_type, 576)
        check_latents(choose_format("fp8", KVScheme("int8", True)), device_type, 576)
    with pytest.raises(ConfigError, match=r"of 575 numbers .* in pairs: write kv_cache\.dtype: plain"):
        check_latents(choose_format("fp8"), "cuda", 575)
    check_latents(choose_format("fp8"), "cpu", 575)
    check_latents(choose_format("plain"), "cuda", 575)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_latents_of_8_bits_are_said_and_reckoned_with(tmp_path: Path, device_type: str) -> None:
    """A byte a number and a scale a token, which kernels of GPUs read where they are."""
    path = write_family(tmp_path, "deepseek_v2", num_hidden_layers=4)
    config, model = configuration(path, None, kv_cache={"dtype": "fp8", "block_size": 16}), read_model_config(path)
    said = describe_kept(model, "fp8", Share(0, 2), torch.bfloat16, device_type)
    kept = "latents, the same on each rank, are kept in fp8, with a scale for each token: 240 B a token on a rank"
    slow = "; no kernel reads them here: attention is plain torch, and slower" if device_type == "cpu" else ""
    assert said == f"{kept} in place of {56 * 4 * 2} B{slow}"
    assert kv_bytes_per_block(config, model, 2, torch.bfloat16) == 240 * 16
    assert reads_in_place(config, model, device_type, torch.bfloat16) == (device_type == "cuda")
    if device_type == "cuda":
        with pytest.raises(ConfigError, match="in bfloat16 or float16, not in float32"):
            reads_in_place(config, model, device_type, torch.float32)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads 2 must be num_attention_heads 4"),
        ("deepseek_v2", {"attention_bias": True}, "'attention_bias' true is not supported without q_lora_rank"),
        ("deepseek_v2", {"norm_topk_prob": True}, "'norm_topk_prob' true is not supported"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "softmax with greedy or group_limited_greedy"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "'n_group' must be a positive whole number"),
        ("deepseek_v2", {"kv_lora_rank": None}, "'kv_lora_rank' must be a positive whole number"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "known: sigmoid with noaux_tc"),
        ("deepseek_v3", {"topk_group": 1}, "cannot choose 3 of 8 experts in 1 of 4 groups"),
        ("deepseek_v3", {"n_group": 8, "topk_group": 4}, "8 groups .* of 8 experts have less than 2 each"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "'first_k_dense_replace' must be a number of layers"),
        ("deepseek_v3", {"mlp_bias": True}, "'mlp_bias' true is not supported"),
        ("deepseek_v3", {"qk_rope_head_dim": None}, "'qk_rope_head_dim' must be a positive whole number"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "'mlp_layer_types' must be 'dense' or 'sparse' for each"),
    ],
)
def test_what_config_json_may_not_ask_for(tmp_path: Path, family: str, changes: dict[str, Any], said: str) -> None:
    path = edit(write_family(tmp_path, family), **changes)
    with pytest.raises(CheckpointError, match=said):
        read_model_config(path)
