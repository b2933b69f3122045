"""What the kernels of a rank follow from, and the memory of its rounds: by it a start finds what an earlier one left.

A pure function of the configuration and of config.json: `trtrun plan` asks it, too. It knows no cache and no kernel.
"""

from __future__ import annotations

from collections.abc import Iterable

from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.model_sections import ModelSection
from trtrun.heads.heads import HeadsPlan
from trtrun.weights.quantization_config import configuration_bytes


def kinds_of_kernels(
    config: RuntimeConfig, parts: Iterable[tuple[str, ModelSection, int, int]], heads: HeadsPlan | None
) -> list[object]:
    """Values whose `repr` tells one start of a rank from all that need other kernels or other memory.

    Args:
        config: of the job.
        parts: the rank's engines: role, section, and rank and size of the tensor-parallel group.
        heads: that draft from what the target computes; None on ranks that have nothing to do with them.
    """
    told = [
        (role, section.dtype, section.quantization, rank, size, *configuration_bytes(section.model))
        for role, section, rank, size in parts
    ]
    sections = (config.speculation, config.kv_cache, config.scheduler)
    held = heads.weights if heads is not None else ()
    of_heads: list[object] = [(part.name, part.shape) for weight in held for part in weight.parts]
    of_heads += [heads.stored, heads.taps] if heads is not None else []
    if heads is not None and config.heads_apart:  # a rank of theirs has no engine that would tell it
        of_heads += [config.target.dtype, *configuration_bytes(config.target.model)]
    named = [section.model_dump_json() for section in sections]
    if config.num_adapter_slots:
        most = f"{config.num_adapter_slots} slots of rank {config.adapter_slots.max_rank}"
        named.append(f"{most}, the draft's too" if config.draft_adapters else most)
    translated = [config.draft.vocabulary] if config.draft is not None and config.draft.is_translated else []
    return [*named, config.cuda_graphs, config.drafts_apart, of_heads, *translated, *told]
