"""Phi-3 and Phi-4: Llama's layers, whose files hold queries, keys and values in one tensor, and gate and up in one.

Wavelengths have factors for short and for long contexts, and only a part of each head may be rotated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import MOST_POSITIONS, ModelFamily, read_window
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape, NormPlan
from trtrun.models.rope_config import parse_rope
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    window, max_positions = read_window(values), min(values["max_position_embeddings"], MOST_POSITIONS)
    rotated = parse_rope(values, max_positions, shape.head_dim, in_part=True).rotated

    def norm(index: int, name: str) -> NormPlan:
        return NormPlan(f"model.layers.{index}.{name}", shape.hidden_size, shape.rms_norm_eps)

    return [
        DecoderPlan(
            norm(index, "input_layernorm"),
            AttentionPlan(f"model.layers.{index}.self_attn", shape, window, fused_qkv=True, rotated=rotated),
            norm(index, "post_attention_layernorm"),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, fused_gate_up=True),
        )
        for index in range(shape.num_layers)
    ]


PHI3 = MODEL_FAMILIES.register("Phi3ForCausalLM")(
    ModelFamily(
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "eos_token_id": 32000,
        },
        plan_layers=_plan_layers,
        model_type="phi3",
        rotates_in_part=True,
    )
)
