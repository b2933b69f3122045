"""LlamaForCausalLM (Llama 1 to 3): the plain decoder, with optional biases. It knows no weights."""

from __future__ import annotations

from trtrun.models.config import ModelFamily, attention_bias, no_windows, read_flag
from trtrun.registry import MODEL_FAMILIES

LLAMA = MODEL_FAMILIES.register("LlamaForCausalLM")(
    ModelFamily(
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2},
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=lambda values: read_flag(values, "mlp_bias"),
        sliding_windows=no_windows,
    )
)
