"""SmolLM3: Llama's layers, of which each fourth knows no position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.layers.rope import NO_ROTATION
from trtrun.models.attention_plan import AttentionPlan
from trtrun.models.config import FULL, SLIDING, ModelFamily, read_flag, read_layer_types, read_window
from trtrun.models.decoder_plan import DecoderPlan, GatedMLPPlan
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.registry import MODEL_FAMILIES


def _plan_layers(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[LayerPlan]:
    has_bias, mlp_bias = read_flag(values, "attention_bias"), read_flag(values, "mlp_bias")
    rotates = _read_rotation(shape, values)
    window = read_window(values) if read_flag(values, "use_sliding_window") else None
    kinds = read_layer_types(values, [FULL if does else SLIDING for does in rotates])
    return [
        DecoderPlan.of_layer(
            index,
            AttentionPlan(
                f"model.layers.{index}.self_attn",
                shape,
                window if kinds[index] == SLIDING else None,
                has_bias,
                has_bias,
                rope=None if rotates[index] else NO_ROTATION,
            ),
            GatedMLPPlan(f"model.layers.{index}.mlp", shape, has_bias=mlp_bias),
        )
        for index in range(shape.num_layers)
    ]


def _read_rotation(shape: ModelShape, values: Mapping[str, Any]) -> Sequence[bool]:
    """Whether each layer rotates."""
    said = values.get("no_rope_layers")
    if said is None:
        interval = values["no_rope_layer_interval"]
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise CheckpointError(f"'no_rope_layer_interval' must be a positive whole number, not {shorten(interval)}")
        return [(index + 1) % interval != 0 for index in range(shape.num_layers)]
    if not isinstance(said, list) or len(said) < shape.num_layers or any(number not in (0, 1) for number in said):
        raise CheckpointError(f"'no_rope_layers' must be a list with 1 or 0 for each layer, not {shorten(said)}")
    return [bool(number) for number in said]


SMOLLM3 = MODEL_FAMILIES.register("SmolLM3ForCausalLM")(
    ModelFamily(
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "sliding_window": None,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128001,
        },
        plan_layers=_plan_layers,
        model_type="smollm3",
    )
)
