"""config.json of TensorRT-LLM's checkpoints, in the words of Hugging Face's, and back.

Sources: TensorRT-LLM's docs/source/architecture/checkpoint.md and models/llama, models/qwen (config.py). It knows JSON
values. It does not know weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.registry import MODEL_FAMILIES

_RENAMED = {
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary_base",
    "rope_scaling": "rotary_scaling",
    "mlp_bias": "mlp_bias",
    "dtype": "dtype",
}
"""Key of Hugging Face → key of TensorRT-LLM."""

_KEPT = (
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "pard_token"),
)
"""Keys that TensorRT-LLM has no word for; its fields are extensible."""

_ARCHITECTURES = {"QWenForCausalLM": {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}}
"""Names of older checkpoints, by their `qwen_type`."""

ALGORITHMS = ("FP8", "W4A16_AWQ")
"""`quant_algo` of checkpoints that are read: their bytes are those of ModelOpt's exports."""

KV_ALGORITHMS = ("FP8", "INT8")


def is_tensorrt_llm(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a TensorRT-LLM checkpoint."""
    return "architectures" not in values and isinstance(values.get("architecture"), str)


def read_tp_size(values: Mapping[str, Any]) -> int:
    """Ranks that a checkpoint was cut for.

    Raises:
        CheckpointError: it was cut in another way, too.
    """
    mapping = values.get("mapping") or {}
    if not isinstance(mapping, dict):
        raise CheckpointError(f"'mapping' must be an object, not {shorten(mapping)}")
    for key in ("pp_size", "cp_size"):
        if mapping.get(key, 1) != 1:
            raise CheckpointError(
                f"'mapping' has {key} {shorten(mapping[key])}: only checkpoints that are cut by tp_size are supported; "
                "convert the model again without it"
            )
    size = mapping.get("tp_size", mapping.get("world_size", 1))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CheckpointError(f"'mapping' must have a positive whole number as tp_size, not {shorten(size)}")
    return size


def read_algorithm(values: Mapping[str, Any]) -> str | None:
    """`quant_algo`, one of ALGORITHMS; None of plain checkpoints.

    Raises:
        CheckpointError: it is another one.
    """
    section = values.get("quantization") or {}
    if not isinstance(section, dict):
        raise CheckpointError(f"'quantization' must be an object, not {shorten(section)}")
    algorithm, kv_algorithm = section.get("quant_algo"), section.get("kv_cache_quant_algo")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise CheckpointError(
            f"TensorRT-LLM weights with quant_algo {shorten(algorithm)} are not supported; known: "
            f"{', '.join(ALGORITHMS)}, and null"
        )
    if kv_algorithm is not None and kv_algorithm not in KV_ALGORITHMS:
        raise CheckpointError(
            f"kv_cache_quant_algo {shorten(kv_algorithm)} is not supported; known: {', '.join(KV_ALGORITHMS)}"
        )
    return algorithm


def to_hugging_face(values: Mapping[str, Any], plain_modules: Sequence[str]) -> dict[str, Any]:
    """What config.json would be in a Hugging Face directory.

    Args:
        values: of TensorRT-LLM's.
        plain_modules: that are not quantized, by Hugging Face's names.

    Raises:
        CheckpointError: it says something that is not supported.
    """
    read_tp_size(values)
    algorithm = read_algorithm(values)
    kind = values.get("position_embedding_type", "rope_gpt_neox")
    if not str(kind).startswith(("rope_gpt_neox", "yarn", "long_rope")):
        raise CheckpointError(f"position_embedding_type {shorten(kind)} is not supported; known: rope_gpt_neox")
    architecture = values["architecture"]
    architecture = _ARCHITECTURES.get(architecture, {}).get(str(values.get("qwen_type")), architecture)
    found = {ours: values[theirs] for ours, theirs in _RENAMED.items() if values.get(theirs) is not None}
    found |= {key: values[key] for key in _KEPT if key in values}
    found |= {"architectures": [architecture], "attention_bias": bool(values.get("attn_bias"))}
    if architecture in MODEL_FAMILIES and (model_type := MODEL_FAMILIES.get(architecture).model_type):
        found["model_type"] = model_type  # without it transformers opens no directory
    activation = values.get("hidden_act", "silu")
    found["hidden_act"] = "silu" if activation in ("silu", "swiglu") else activation
    section = values.get("quantization") or {}
    if section.get("kv_cache_quant_algo") is not None:
        found["kv_cache_quant_algo"] = section["kv_cache_quant_algo"]
    if algorithm is not None:
        found["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "ignore": list(plain_modules),
        }
        if algorithm == "W4A16_AWQ":
            found["quantization_config"]["group_size"] = section.get("group_size", 64)
    return found


def from_hugging_face(
    values: Mapping[str, Any], tp_size: int, dtype: str, quantization: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a TensorRT-LLM checkpoint.

    Args:
        values: of a Hugging Face directory, with every default filled in.
        tp_size: ranks that it is cut for.
        dtype: of what is plain.
        quantization: that section.
    """
    found = {theirs: values[ours] for ours, theirs in _RENAMED.items() if values.get(ours) is not None}
    found |= {key: values[key] for key in _KEPT if key in values}
    architecture = values["architectures"][0]
    if architecture.startswith("Qwen"):
        found["qwen_type"] = architecture.removesuffix("ForCausalLM").lower()
    return {
        "architecture": architecture,
        **found,
        "dtype": dtype,
        "logits_dtype": "float32",
        "position_embedding_type": "rope_gpt_neox",
        "hidden_act": "silu",
        "attn_bias": bool(values.get("attention_bias")) or architecture == "Qwen2ForCausalLM",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {"world_size": tp_size, "tp_size": tp_size, "pp_size": 1, "cp_size": 1, "gpus_per_node": 8},
        "quantization": dict(quantization),
    }
