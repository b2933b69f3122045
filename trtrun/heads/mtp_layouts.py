"""Heads for multi-token prediction (MTP, DeepSeek-V3: arXiv:2412.19437), which lie in the target's own files.

    mtp.fc, mtp.pre_fc_norm_embedding, mtp.pre_fc_norm_hidden, mtp.layers.0.…, mtp.norm           Qwen3-Next, Qwen3.5
    model.layers.N.{eh_proj, enorm, hnorm, shared_head.norm} and those of a layer, behind N layers   DeepSeek, GLM-4.5

The target's family plans them, and its embedding and vocabulary head serve. A head reads what leaves the target's final
norm; a step behind a drafted token reads what left its own final norm, as in transformers and SGLang (vLLM takes what
enters that norm in GLM-4.5). Where files have several such layers the first one drafts all tokens.

It does without torch, and does not know how a head computes (heads/eagle_head.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError
from trtrun.heads.eagle_plan import EaglePlan, MTPLayerPlan
from trtrun.heads.embedding_and_head import EmbeddingAndHeadPlan
from trtrun.heads.head_plan import JoiningPlan
from trtrun.heads.heads import HEADS
from trtrun.kvcache.specs import LayerSpecs
from trtrun.linear.quantization.base import FLOATS
from trtrun.models.config import ModelConfig
from trtrun.models.experts_plan import cut_by_experts, find_experts
from trtrun.models.installed_families import find_family
from trtrun.models.layer_plan import LayerPlan, ModelShape
from trtrun.weights.checkpoint import TORCH_NAMES
from trtrun.weights.rank_files import open_checkpoint
from trtrun.weights.weight import Share


@dataclass(frozen=True)
class _ShapeOfLayer(ModelShape):
    """Sizes of a target, and its layer that drafts, which says what it keeps."""

    layer: LayerPlan

    @override
    def keeps(self, share: Share) -> Sequence[LayerSpecs]:
        return [self.layer.keeps(share)]


@HEADS.register("mtp")
def read_mtp(path: Path, target: ModelConfig, section: SpeculationSection) -> EaglePlan:
    """Plan the head in the target's files, by its config.json, and where they are quantized by their headers.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    family = find_family(target.architecture)
    sizes: dict[str, Any] = {field.name: getattr(target, field.name) for field in fields(ModelShape)}
    mtp = family.plan_mtp(ModelShape(**sizes), {**family.defaults, **target.values})
    if mtp is None:
        raise CheckpointError(
            f"{path}: {target.architecture} has no layers that draft, or none that are known here: set "
            "speculation.method to another"
        )
    if any(plan.by_experts for layer in target.layers for plan in find_experts(layer)):
        mtp = cut_by_experts(mtp)
    hidden = target.hidden_size
    plan = EaglePlan(
        name="MTP",
        reads="what leaves the target's final norm",
        embedding_and_head=EmbeddingAndHeadPlan(
            files=None,
            target_vocab_size=target.vocab_size,
            hidden_size=hidden,
            embedding=None,
            head=None,
            num_lines=target.vocab_size,
            scales_embedding=True,
        ),
        target_hidden_size=hidden,
        taps=(target.num_layers + 1,),
        stored=_ShapeOfLayer(**{**sizes, "num_layers": 1}, layer=mtp.layer),
        layers=(),
        rope=target.rope,
        fusion=None,
        first=MTPLayerPlan(JoiningPlan(mtp.joining, None, 2 * hidden, hidden), mtp),
        final_norm=mtp.final_norm,
        norm_output=True,
        files_of=target,
    )
    return plan if target.stored is None else replace(plan, plain=_find_plain(path, plan))


def _find_plain(path: Path, plan: EaglePlan) -> frozenset[str]:
    """Names of its matrices that a quantized target's files have in a float dtype. Many have the layer so, or a part of
    it, and do not say it: DeepSeek-V3 eh_proj, and what was quantized by libraries that do not know of it, all."""
    try:
        files = open_checkpoint(path)
    except CheckpointError:  # whoever reads weights says what is wrong with them
        return frozenset()
    names = (part.name for weight in plan.own_weights() for part in weight.parts)
    return frozenset(name for name in names if name in files and TORCH_NAMES.get(files.dtype_code(name)) in FLOATS)
