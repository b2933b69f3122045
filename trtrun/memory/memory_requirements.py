"""What a configuration asks of a device in bytes: the functions that engines at start and `trtrun plan` share.

Pure functions of the configuration and of config.json. They know no rank and no free memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from trtrun.attention.latents import check_latents
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.drafting.drafting_methods import METHODS
from trtrun.configuration.engine_sections import ModelSection
from trtrun.engine.rows import RowState
from trtrun.errors import ConfigError
from trtrun.heads.heads import HeadsPlan
from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.formats import ByteKV, KVFormat, choose_format
from trtrun.kvcache.specs import LayerSpecs, latent_of, state_of
from trtrun.kvcache.store import KVStore
from trtrun.loading.model_settings import JobModels, resolve_dtype_name
from trtrun.lora.lora_loading import adapter_bytes, adapter_working_bytes
from trtrun.memory.spaces import (
    adapter_space,
    guess_space,
    head_space,
    layers_in_places,
    path_space,
    state_space,
)
from trtrun.memory.working_memory import EngineForm, RoundShape, head_rank_bytes, working_bytes
from trtrun.models.config import ModelConfig
from trtrun.models.layer_plan import ModelShape
from trtrun.scheduling.planning import most_catch_up
from trtrun.tensors import DTYPES
from trtrun.weights.weight import Share

_TRANSLATED_LOGITS = 8
"""Copies of a round's logits in another vocabulary: as they are, changed, and the temporaries of choosing."""

_ROUNDS_UNDER_WAY = 2
"""Rounds, of the largest, whose hidden states may be on their way to a head on a rank of its own."""


@dataclass(frozen=True)
class HiddenKind:
    """What a head on a rank of its own is told of each token: hidden states, numbers of each, and their dtype."""

    shape: tuple[int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, config: RuntimeConfig, target: ModelConfig, heads: HeadsPlan | None) -> HiddenKind | None:
        """Find the kind of a configuration; None without such a head."""
        if heads is None or not config.heads_apart:
            return None
        return cls((len(heads.taps), target.hidden_size), resolve_dtype(config.target, target))

    def bytes_under_way(self, models: JobModels) -> int:
        """Bytes that may be on their way at once."""
        taps, numbers = self.shape
        return _ROUNDS_UNDER_WAY * models.most_tokens * taps * numbers * self.dtype.itemsize


def resolve_dtype(section: ModelSection, config: ModelConfig) -> torch.dtype:
    """The dtype to compute in: the section's, or the checkpoint's for `auto`."""
    return DTYPES[resolve_dtype_name(section, config)]


def adapter_slots_bytes(
    config: RuntimeConfig, role: str, section: ModelSection, model: ModelConfig, tp_rank: int
) -> int:
    """Bytes of that room on one rank of the engine."""
    space = adapter_space(config, role)
    if space is None:
        return 0
    return adapter_bytes(model, tp_rank, len(section.devices), space, resolve_dtype(section, model))


def round_shape(config: RuntimeConfig, models: JobModels) -> RoundShape:
    """The largest round that `config` allows with these models."""
    stored, in_parallel = config.kv_cache.max_tokens, models.mask_token is not None
    return RoundShape(
        max_rows=config.scheduler.max_batch_size,
        max_tokens=models.most_tokens,
        draft_len=config.draft_len,
        max_paths=config.max_paths,
        draft_nodes=config.draft_size(config.draft_len).nodes,
        most_fed=max(1, config.speculation.most_fed),
        max_seq_len=models.context if stored is None else min(models.context, stored),
        block_size=config.kv_cache.block_size,
        use_logits=config.speculation.use_logits and config.has_draft_engine,
        num_guesses=guess_space(config, 0).most_guesses,
        most_catch_up=most_catch_up(config.draft_len, drafts_in_parallel=in_parallel),
        in_parallel=in_parallel,
    )


def target_taps(config: RuntimeConfig, model: ModelConfig, heads: HeadsPlan | None) -> Sequence[int]:
    """At which boundaries of the target's residual stream the drafter reads hidden states."""
    if heads is not None:
        return heads.taps
    return METHODS[config.speculation.method].find_taps(config.speculation, model.num_layers)


def engine_working_bytes(
    config: RuntimeConfig,
    models: JobModels,
    role: str,
    tp_rank: int,
    device: torch.device,
    heads: HeadsPlan | None = None,
) -> int:
    """Upper bound of what rounds need on one rank of an engine beside weights and KV, blocks of guesses and of paths
    among it, and what the heads need that draft on the target's ranks, or what is on its way to those elsewhere."""
    section, model = config.draft if role == "draft" else config.target, models.of_role(role)
    assert section is not None, "the job has no draft model"
    dtype = resolve_dtype(section, model)
    heads = heads if role == "target" else None
    heads_here = heads
    blocks = (guess_space if role == "draft" else path_space)(config, 0).num_blocks
    beside = blocks * kv_bytes_per_block(config, model, len(section.devices), dtype)
    beside += state_bytes(config, models, role)
    space = adapter_space(config, role)
    if space is not None:
        lines = models.most_tokens
        beside += adapter_working_bytes(model, tp_rank, len(section.devices), space, dtype, lines)
    if (told := HiddenKind.of(config, model, heads)) is not None:
        beside, heads_here = beside + told.bytes_under_way(models), None
    if heads_here is not None and heads_here.stored is not None:
        of_heads = kv_bytes_per_block(config, heads_here.stored, len(section.devices), dtype)
        beside += head_space(config, 0).num_blocks * of_heads
    speculation = config.speculation
    if role == config.drafting_role:
        beside += speculation.search_bytes
        beside += speculation.kept_bytes(model.vocab_size, config.scheduler.max_batch_size)
    if role == "draft":
        beside += translation_bytes(config, models)
    form = EngineForm(
        model,
        Share(tp_rank, len(section.devices)),
        dtype,
        device.type,
        verifies=role == "target",
        quantization=section.quantization,
        graphs=config.cuda_graphs and device.type == "cuda",
        num_taps=len(target_taps(config, model, heads)) if role == "target" else 0,
        kv_in_place=reads_in_place(config, model, device.type, dtype),
        heads=heads_here,
    )
    return beside + working_bytes(round_shape(config, models), form)


def translation_bytes(config: RuntimeConfig, models: JobModels) -> int:
    """Upper bound of what rounds of a draft with another tokenizer need on each of its ranks beside those of other
    drafts: logits in the target's vocabulary and behind it, and rows of its tokens. 0 where the tokenizers are the
    same."""
    if not config.translates_drafts:
        return 0
    rows, width = config.scheduler.max_batch_size, models.target.vocab_size + models.of_role("draft").vocab_size
    logits = _TRANSLATED_LOGITS + (4 * config.draft_len if config.speculation.use_logits else 0)
    of_rows = RowState.num_bytes(rows, models.context, config.kv_cache.block_size, config.draft_len)
    return rows * width * torch.float32.itemsize * logits + of_rows + width * torch.int64.itemsize


def head_working_bytes(config: RuntimeConfig, models: JobModels, heads: HeadsPlan, device: torch.device) -> int:
    """Upper bound of what rounds need on the rank of a head beside its weights and KV, blocks of trees and of guesses
    among it."""
    assert heads.stored is not None, "heads that keep nothing sit on the target's ranks"
    dtype, speculation = resolve_dtype(config.target, models.target), config.speculation
    blocks = head_space(config, 0).num_blocks + guess_space(config, 0).num_blocks
    beside = blocks * kv_bytes_per_block(config, heads.stored, 1, dtype) + speculation.search_bytes
    beside += speculation.kept_bytes(models.target.vocab_size, config.scheduler.max_batch_size)
    form = EngineForm(
        models.target,
        Share(0, 1),
        dtype,
        device.type,
        graphs=config.cuda_graphs and device.type == "cuda",
        kv_in_place=reads_in_place(config, heads.stored, device.type, dtype),
        heads=heads,
    )
    return beside + head_rank_bytes(round_shape(config, models), form)


class StoreBytes(NamedTuple):
    """Bytes of one block, and of one place of layers with windows, 0 where these have none."""

    per_block: int
    per_place: int

    def plus(self, other: StoreBytes) -> StoreBytes:
        """Add those of another store."""
        return StoreBytes(self.per_block + other.per_block, self.per_place + other.per_place)


def store_bytes(
    config: RuntimeConfig, models: JobModels, role: str, heads: HeadsPlan | None, dtype: torch.dtype
) -> StoreBytes:
    """Bytes of one rank's store of an engine, and of the heads beside it where these keep keys and values."""
    section, model = config.draft if role == "draft" else config.target, models.of_role(role)
    assert section is not None
    shape, of_heads = (len(section.devices), dtype), 0
    if heads is not None and heads.stored is not None:
        of_heads = kv_bytes_per_block(config, heads.stored, *shape)
    layers = model.keeps(Share(0, shape[0]))
    windowed = layers_in_places(config, models, role) or (False,) * len(layers)
    of_blocks, of_places = (
        _block_bytes(
            config, model, [specs for specs, one in zip(layers, windowed, strict=True) if one is wanted], dtype
        )
        for wanted in (False, True)
    )
    return StoreBytes(of_blocks + of_heads, of_places)


def kv_format_of(config: RuntimeConfig, model: ModelShape) -> KVFormat:
    """How the store of a model, or of heads, keeps keys and values.

    Raises:
        ConfigError: kv_cache.dtype is unknown.
    """
    return choose_format(config.kv_cache.dtype, model.kv_scheme if isinstance(model, ModelConfig) else None)


def reads_in_place(
    config: RuntimeConfig, model: ModelShape, device_type: str, dtype: torch.dtype | None = None
) -> bool:
    """Whether kernels of the device read that store where it lies.

    Raises:
        ConfigError: kv_cache.dtype is unknown, or not for models of `dtype` on such a device.
    """
    kept = kv_format_of(config, model)
    if dtype is not None:
        kept.check(dtype, device_type)
        if (latent := latent_of(model.keeps(Share(0, 1)))) is not None:
            check_latents(kept, device_type, latent.head_dim)
        _check_kernels(config, kept, device_type, dtype)
    return device_type in kept.kernels


def _check_kernels(config: RuntimeConfig, kept: KVFormat, device_type: str, dtype: torch.dtype) -> None:
    """Codes of 8 bits turn over where torch gives a float32 other last bits among other rows: other tokens were seen.

    Raises:
        ConfigError: they would be made so.
    """
    if device_type != "cpu" or dtype is not torch.float32 or not isinstance(kept, ByteKV):
        return
    if operations_of(device_type).name(dtype) == "torch":
        raise ConfigError(
            f"kv_cache.dtype: {config.kv_cache.dtype} keeps keys and values in 8 bits, which in float32 needs trtrun's "
            "own kernels on the CPU; here is neither AVX2 nor NEON, or no GNU OpenMP or llvmlite for them: write "
            "kv_cache.dtype: plain, or dtype: bfloat16"
        )


def kv_bytes_per_block(config: RuntimeConfig, model: ModelShape, tp_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in all layers, on one rank of an engine with `tp_size` ranks.

    Raises:
        ConfigError: kv_cache.dtype is unknown.
    """
    return _block_bytes(config, model, model.keeps(Share(0, tp_size)), dtype)


def _block_bytes(config: RuntimeConfig, model: ModelShape, layers: Sequence[LayerSpecs], dtype: torch.dtype) -> int:
    """Bytes of one block in some layers of a model."""
    return KVStore.bytes_per_block(layers, config.kv_cache.block_size, dtype, kv_format_of(config, model))


def state_bytes(config: RuntimeConfig, models: JobModels, role: str) -> int:
    """Bytes of the states that layers of an engine keep of rows, on one of its ranks; 0 where none does."""
    section = config.draft if role == "draft" else config.target
    assert section is not None, "the job has no draft model"
    kept = [state_of(specs) for specs in models.of_role(role).keeps(Share(0, len(section.devices)))]
    return state_space(config, models, role, 0).num_bytes([spec for spec in kept if spec is not None])
