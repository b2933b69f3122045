"""What becomes of weights that a checkpoint has quantized, and how keys and values are kept, in words: for the plan,
and for lines of the log at start.

It knows shapes and formats. It does not know who says it to whom.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trtrun.configuration.engine_directory import read_engine
from trtrun.kvcache.formats import ByteKV, choose_format
from trtrun.kvcache.sizing import format_bytes
from trtrun.kvcache.specs import latent_of
from trtrun.kvcache.store import KVStore
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import count_bytes
from trtrun.linear.stored.layout import StoredLinear
from trtrun.loading.weight_check import held_weights
from trtrun.models.config import ModelConfig
from trtrun.tensors import dtype_name
from trtrun.weights.weight import Share


def describe_weights(path: Path, config: ModelConfig, share: Share, dtype: torch.dtype, device_type: str) -> str | None:
    """What there is to say of a model's weights: of an engine what it was built for, of a quantized checkpoint see
    `describe_stored`; None of a plain one.

    Raises:
        CheckpointError: an engine is damaged; or as of `describe_stored`.
    """
    engine = read_engine(path)
    return engine.describe() if engine is not None else describe_stored(config, share, dtype, device_type)


def describe_stored(config: ModelConfig, share: Share, dtype: torch.dtype, device_type: str) -> str | None:
    """How a rank holds what the checkpoint has quantized, and in how many bytes; None where it is not quantized.

    Args:
        config: of the model.
        share: the rank's place.
        dtype: of activations.
        device_type: "cpu" or "cuda".

    Raises:
        CheckpointError: the model cannot be shared out over so many ranks.
    """
    if config.quant_method is None:
        return None
    sizes: dict[tuple[bool, str], int] = {}
    roundings: set[str] = set()
    for weight, held in held_weights(config, share, QUANTIZATIONS.get("none")):
        if not isinstance(held, StoredLinear):
            continue
        codes, said = held.codes(weight, dtype, device_type), f"{held.layout.name} weights stay as they are"
        if codes is None:
            why = held.why_dense(weight, dtype, device_type)
            said = f"{held.layout.name} weights become {dtype_name(dtype)} as they are read"
            said += "" if why is None else f", as {why}"
        elif held.layout.rounds_activations:
            roundings.add("by 128 numbers of a token" if codes == "fp8_block" else "by token")
        kind = codes is None, said
        sizes[kind] = sizes.get(kind, 0) + count_bytes(held.create(weight, dtype, device_type))
    if not sizes:
        return None
    held_so = "; ".join(f"{kind[1]}: {format_bytes(sizes[kind])}" for kind in sorted(sizes))
    how = " or ".join(sorted(roundings))
    activations = f"rounded to E4M3 {how}, where the checkpoint was made for that" if roundings else "not rounded"
    return f"{held_so} on a rank; activations are {activations}"


def describe_kept(config: ModelConfig, kv_dtype: str, share: Share, dtype: torch.dtype, device_type: str) -> str | None:
    """How a rank keeps keys and values, or latents; None where it keeps keys and values as the model has them, and the
    checkpoint says nothing else.

    Args:
        config: of the model.
        kv_dtype: `kv_cache.dtype`.
        share: the rank's place.
        dtype: of activations.
        device_type: "cpu" or "cuda".

    Raises:
        CheckpointError: the model cannot be shared out over so many ranks.
        ConfigError: there is no format of that name.
    """
    made, scheme = choose_format(kv_dtype, config.kv_scheme), config.kv_scheme
    layers = config.keeps(share)
    token, plain = (KVStore.bytes_per_block(layers, 1, dtype, kept) for kept in (made, choose_format("plain")))
    kinds, of_heads = "keys and values", " and head"
    if latent_of(layers) is not None:
        kinds, of_heads = "latents, the same on each rank,", ""
    if not isinstance(made, ByteKV):
        if latent_of(layers) is not None:
            return f"{kinds} are kept: {format_bytes(plain)} a token on a rank"
        if scheme is None or made is not choose_format("plain"):
            return None
        return f"keys and values are kept plain, though the checkpoint was made for {scheme.dtype}"
    whose = "the checkpoint's scales" if made.has_layer_scales else f"a scale for each token{of_heads}"
    where = "" if device_type in made.kernels else "; no kernel reads them here: attention is plain torch, and slower"
    beside = f"{format_bytes(token)} a token on a rank in place of {format_bytes(plain)}"
    return f"{kinds} are kept in {made.kind}, with {whose}: {beside}{where}"
