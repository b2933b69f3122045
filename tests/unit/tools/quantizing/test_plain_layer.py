"""The plain layer that calibration runs is transformers', and what it shows of itself is what its products get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoints import make_checkpoint
from family_checkpoints import write_family
from quantizing_runs import ON_CPU, random_texts, tensors_of
from transformers import AutoModelForCausalLM

from trtrun.models.config import read_model_config
from trtrun.tools.quantizing.layer_quantizer import LayerQuantizer
from trtrun.tools.quantizing.plain_layer import SITES, rms_norm
from trtrun.tools.quantizing.settings import QuantizingSettings

MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"attention_bias": True, "rope": {"rope_type": "linear", "factor": 3.0}},
    "MistralForCausalLM": {"sliding_window": 7},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "Qwen3ForCausalLM": {},
}


@pytest.mark.parametrize("architecture", [*MODELS, "mixtral", "qwen2_moe", "qwen3_moe"])
def test_hidden_states_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    """Mixtures' experts show nothing: no format looks at what each is given."""
    if architecture in MODELS:
        path = make_checkpoint(tmp_path / "model", architecture, **MODELS[architecture])
    else:
        path = write_family(tmp_path / "model", architecture)
    config, tensors = read_model_config(path), tensors_of(path)
    tokens = torch.tensor(random_texts(1, length=30) + random_texts(1, 5, length=30))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = reference(tokens).logits
    quantizer = LayerQuantizer(config, QuantizingSettings("fp8"), ON_CPU, torch.float32, 30)
    hidden = F.embedding(tokens, tensors["model.embed_tokens.weight"])
    seen: dict[str, torch.Tensor] = {}
    for plan in config.layers:
        (layer,) = quantizer.plain(plan, tensors)  # type: ignore[arg-type]
        hidden = layer.forward(hidden, seen.__setitem__)
    logits = F.linear(rms_norm(hidden, tensors["model.norm.weight"], config.rms_norm_eps), tensors["lm_head.weight"])
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()
    if architecture not in MODELS:
        return
    assert {site: seen[site].shape[-1] for site in SITES} == {
        "attention": config.hidden_size,
        "output": config.num_heads * config.head_dim,
        "mlp": config.hidden_size,
        "down": config.intermediate_size,
    }
    assert seen["keys"].shape == seen["values"].shape == (2, config.num_kv_heads, 30, config.head_dim)
    cached = reference(tokens, use_cache=True).past_key_values
    assert torch.allclose(seen["keys"][:, :, -4:], cached.layers[-1].keys[:, :, -4:], atol=1e-4)
