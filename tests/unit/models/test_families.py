"""Families by what transformers makes of them: logits and greedy texts, in shares, over chunks and windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILIES, NESTED, write_family
from paged import PagedModel
from pipelines import make_llm, noisy_copy, run_alone, tokens_of
from safetensors.torch import load_file, save_file
from test_model_invariance import check_chunks, dtype
from test_model_logits import check_logits, prompt_of, reference_greedy

from trtrun import SamplingParams
from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config

__all__ = ["dtype"]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", [*FAMILIES, *NESTED])
def test_logits_equal_transformers(tmp_path: Path, family: str, tp_size: int) -> None:
    check_logits(write_family(tmp_path, family, tie_word_embeddings=tp_size == 2), tp_size)


@pytest.mark.parametrize("family", [*FAMILIES, *NESTED])
def test_greedy_text_equals_transformers(tmp_path: Path, family: str) -> None:
    path = write_family(tmp_path, family, seed=3)
    prompt = prompt_of(13, seed=3)
    model = PagedModel(path)
    logits, text = model.forward([[(0, 0, prompt)]]), []
    for position in range(len(prompt), len(prompt) + 40):
        text.append(int(logits[-1].argmax()))
        logits = model.forward([[(0, position, text[-1:])]])
    assert text == reference_greedy(path, prompt, 40)
    assert len(set(text)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokens_bits_do_not_depend_on_its_company(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    check_chunks(PagedModel(write_family(tmp_path, family, dtype=dtype), dtype, block_size=16))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_5_text"])
def test_drafted_texts_are_plain_ones(tmp_path: Path, family: str) -> None:
    """In bfloat16, of rows that run together, with a draft model of the family and with texts' own, among preempted
    rows. test_qwen3_next.py has the one that is left out."""
    target = write_family(tmp_path / "target", family, dtype=torch.bfloat16)
    draft = noisy_copy(tmp_path / "draft", target, 0.1)
    prompts = [prompt_of(length, seed=length) * 2 for length in (3, 17, 29)]
    sampling = [SamplingParams(max_tokens=24), *[SamplingParams(max_tokens=24, temperature=0.8, seed=1)] * 2]
    with make_llm(target, speculation={"method": "none"}, dtype="bfloat16") as llm:
        alone = run_alone(llm, prompts, sampling)
    for method in ("none", "draft_target", "ngram"):
        of_model = {"draft": draft} if method == "draft_target" else {}
        with make_llm(
            target, **of_model, speculation={"method": method}, dtype="bfloat16", kv_cache={"max_tokens": 160}
        ) as llm:
            outputs = llm.generate(prompts, sampling)
            assert tokens_of(outputs) == alone, method
            preempted = sum(output.completions[0].statistics.num_preemptions for output in outputs)
            assert preempted or family == "ministral3", "whose windows leave room"
            assert method != "draft_target" or llm.statistics()["num_accepted_draft_tokens"] > 3


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_keys_left_out_get_the_defaults_of_transformers(tmp_path: Path, family: str) -> None:
    """As files of transformers 4 leave them out: types of layers above all."""
    from transformers import AutoConfig

    file = write_family(tmp_path, family, num_hidden_layers=13, layer_types=None) / "config.json"
    kept = ("architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act")
    values = {key: value for key, value in json.loads(file.read_text("utf-8")).items() if key in kept}
    file.write_text(json.dumps({**values, "hidden_act": "gelu_pytorch_tanh", "dtype": "float32"}), "utf-8")
    config, reference = read_model_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    window, head = reference.sliding_window, reference.final_logit_softcapping
    assert config.windows == tuple(window if "sliding" in kind else None for kind in reference.layer_types)
    assert (config.vocab_size, config.head_dim) == (reference.vocab_size, reference.head_dim)
    assert (config.num_heads, config.num_kv_heads) == (reference.num_attention_heads, reference.num_key_value_heads)
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.tie_word_embeddings and config.ends.logit_soft_cap == head
    attention = [layer.attention for layer in config.layers]  # type: ignore[attr-defined]
    assert {plan.soft_cap for plan in attention} == {reference.attn_logit_softcapping}
    assert {plan.scale for plan in attention} == {reference.query_pre_attn_scalar**-0.5}


def test_rope_scaling_of_olmo3_is_of_layers_that_see_all(tmp_path: Path) -> None:
    """As transformers 4 wrote it, beside what transformers 5 writes."""
    path = write_family(tmp_path, "olmo3")
    ropes, file = read_model_config(path).ropes, tmp_path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values.pop("layer_types")[2:] == ["sliding_attention", "full_attention", "sliding_attention"]
    scaling = values.pop("rope_parameters")["full_attention"]
    theta = scaling.pop("rope_theta")
    file.write_text(json.dumps({**values, "rope_theta": theta, "rope_scaling": scaling}), encoding="utf-8")
    config = read_model_config(path)
    assert (config.ropes, config.windows) == (ropes, (6, 6, 6, None, 6))
    assert [rope.rope_type for rope in ropes] == ["default", "default", "default", "yarn", "default"]
    check_logits(path)


def test_norms_of_olmo_round_once(tmp_path: Path) -> None:
    """In half precision the weight is multiplied with before the result is rounded."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    model = PagedModel(write_family(tmp_path, "olmo2", dtype=torch.bfloat16), torch.bfloat16).models[0]
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = load_file(tmp_path / "model.safetensors")
    layer = model._layers[1]
    for norm, name in (
        (layer.attention_output_norm, "layers.1.post_attention_layernorm"),
        (layer.mlp_output_norm, "layers.1.post_feedforward_layernorm"),
        (model._final_norm, "norm"),
    ):
        expected = Olmo2RMSNorm(64, eps=model.config.rms_norm_eps)
        expected.weight.data = weights[f"model.{name}.weight"]
        assert torch.equal(norm(x), expected(x))


def test_norms_of_queries_and_keys_round_as_transformers_does(tmp_path: Path) -> None:
    """Once in OLMo 2, and twice in OLMoE."""
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
    from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm

    heads = torch.randn(30, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    for family, kind in (("olmo2", Olmo2RMSNorm), ("olmoe", OlmoeRMSNorm)):
        path = write_family(tmp_path / family, family, dtype=torch.bfloat16)
        weights = load_file(path / "model.safetensors")
        layer = PagedModel(path, torch.bfloat16).models[0]._layers[1]
        found = layer.attention.head_norm(heads.view(30, 6, 16)).flatten(1)
        for name, part in (("q", slice(64)), ("k", slice(64, 96))):
            expected = kind(part.stop - (part.start or 0), eps=1e-5)
            expected.weight.data = weights[f"model.layers.1.self_attn.{name}_norm.weight"]
            assert torch.equal(found[:, part], expected(heads[:, part])), (family, name)


def test_biases_of_experts_scores_are_not_rounded(tmp_path: Path) -> None:
    """They differ by less than bfloat16 tells apart."""
    path = write_family(tmp_path, "glm4_moe", dtype=torch.bfloat16)
    weights, name = load_file(path / "model.safetensors"), "model.layers.1.mlp.gate.e_score_correction_bias"
    weights[name] = 30 + torch.arange(8) * 1e-3
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    mlp = PagedModel(path, torch.bfloat16).models[0]._layers[1].mlp
    assert mlp._choose(torch.zeros(1, 8)).experts.tolist() == [[7, 6, 5]]


def test_numbers_of_apertus_activation_may_be_in_the_file_or_not(tmp_path: Path) -> None:
    """Those of the file count; where it has none they are the usual ones."""
    path, batch = write_family(tmp_path, "apertus"), [[(0, 0, prompt_of(12))]]
    usual = PagedModel(path).forward(batch)
    weights = load_file(path / "model.safetensors")
    numbers = [name for name in weights if name.endswith((".act_fn.beta", ".act_fn.eps"))]
    assert len(numbers) == 2 * 5 and weights[numbers[0]].shape == ()
    save_file({name: value for name, value in weights.items() if name not in numbers}, path / "model.safetensors")
    assert torch.equal(PagedModel(path).forward(batch), usual)
    other = {name: torch.tensor(0.7 if name.endswith("beta") else -0.3) for name in numbers}
    save_file({**weights, **other}, path / "model.safetensors", {"format": "pt"})
    check_logits(path)
    assert not torch.equal(PagedModel(path).forward(batch), usual)


def test_an_activation_that_is_not_apertus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_act 'silu' is not supported; known: xielu"):
        read_model_config(write_family(tmp_path, "apertus", hidden_act="silu"))


def test_apertus_rotates_as_llama3_where_config_json_does_not_say(tmp_path: Path) -> None:
    path = write_family(tmp_path, "apertus", rope_parameters=None)
    rope, file = read_model_config(path).rope, path / "config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    assert values.pop("rope_parameters")["factor"] == 8.0
    file.write_text(json.dumps(values), encoding="utf-8")
    assert read_model_config(path).rope == rope
