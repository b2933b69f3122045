"""Families by what transformers makes of them: logits and greedy texts, in shares, over chunks and windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from family_checkpoints import FAMILIES, write_family
from paged import PagedModel
from safetensors.torch import load_file, save_file
from test_model_logits import check_logits, prompt_of, reference_greedy

from trtrun.errors import CheckpointError
from trtrun.models.config import read_model_config


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path: Path, family: str, tp_size: int) -> None:
    check_logits(write_family(tmp_path, family, tie_word_embeddings=tp_size == 2), tp_size)


@pytest.mark.parametrize("family", FAMILIES)
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
    queries, keys = (weights[f"model.layers.1.self_attn.{name}_norm.weight"] for name in "qk")
    expected = Olmo2RMSNorm(64, eps=model.config.rms_norm_eps)
    heads, weight = torch.cat((x, x[:, :32]), dim=1), torch.cat((queries, keys))
    found = layer.attention.head_norm(heads.view(30, 6, 16)).flatten(1)
    for part in (slice(64), slice(64, 96)):
        expected.weight.data = weight[part]
        assert torch.equal(found[:, part], expected(heads[:, part]))


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
