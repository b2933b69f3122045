"""EAGLE-3 heads as files have them (Li et al. 2025, arXiv:2503.01840).

    fc.weight, midlayer.…, norm.weight, lm_head.weight, d2t, t2d      the reference, SpecForge; sizes in config.json
    the same, layers.0.… in midlayer's place                          speculators; sizes in transformer_layer_config
    the same, with model. in front                                    other trainers

Beside them may be: embed_tokens.weight, else the target's embedding serves; layers.1.… and more, ordinary ones;
input_norm.weight or fc_norm.0.weight …, norms before fc; norms of queries and keys per head; biases. Names and shapes
say how large the head is (eagle_tensors.py): what a config.json says of vocabularies and of the number of layers is
often another's. It does without torch, and does not know how a head computes (heads/eagle_head.py).
"""

from __future__ import annotations

import re
from pathlib import Path

from trtrun.configuration.drafting.head_methods import Eagle3Section
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError
from trtrun.heads.eagle3_boundaries import list_outputs, read_boundaries
from trtrun.heads.eagle_plan import EaglePlan, FusedLayerPlan, FusionPlan
from trtrun.heads.eagle_tensors import HeadTensors, stem
from trtrun.heads.head_reading import read_head
from trtrun.heads.heads import HEADS
from trtrun.models.config import ModelConfig, read_flag
from trtrun.models.layer_plan import ModelShape, NormPlan

_BESIDE_EAGLE3 = re.compile(
    r"(fc\.(weight|bias)|fc_norm\.\d\.weight|(input_norm|norm|lm_head|embed_tokens)\.weight|d2t|t2d)", re.ASCII
)


@HEADS.register("eagle3")
def read_eagle3(path: Path, target: ModelConfig, section: SpeculationSection) -> EaglePlan:
    """Plan the head of a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    assert isinstance(section, Eagle3Section)
    return read_head(path, target, "eagle3", _BESIDE_EAGLE3, lambda head: _plan_eagle3(head, section))


def _plan_eagle3(head: HeadTensors, section: Eagle3Section) -> EaglePlan:
    target = head.target
    if "layers.0.hidden_norm.weight" not in head.names:
        raise CheckpointError("it has no layers.0.hidden_norm.weight: the files are incomplete")
    num_taps = head.count_taps()
    shape = head.layers()
    taps = read_boundaries(head.values, target.num_layers, num_taps, section.eagle3_layers_to_capture)
    return EaglePlan(
        name="EAGLE-3",
        reads=f"outputs of the target's layers {list_outputs(taps)}",
        embedding_and_head=head.embedding_and_head(),
        target_hidden_size=target.hidden_size,
        taps=taps,
        stored=shape,
        fusion=_plan_fusion(head, num_taps, shape.rms_norm_eps),
        first=_plan_first(head, shape),
        layers=head.ordinary_layers(shape),
        final_norm=head.norm("norm", shape),
        norm_output=read_flag(head.values, "norm_output"),
        rope=head.rope(shape),
    )


def _plan_fusion(head: HeadTensors, num_taps: int, eps: float) -> FusionPlan:
    has_joint = head.has("input_norm.weight", "norm_before_fc")
    has_own = head.has("fc_norm.0.weight", "fc_norm")
    if has_joint and has_own:
        raise CheckpointError("it has norms of two kinds before fc, input_norm.weight and fc_norm.0.weight")
    joint = NormPlan(stem(head.names["input_norm.weight"]), head.taken, eps) if has_joint else None
    apart = [f"fc_norm.{tap}.weight" for tap in range(num_taps if has_own else 0)]
    norms = tuple(NormPlan(stem(head.names.get(name, name)), head.target.hidden_size, eps) for name in apart)
    return FusionPlan(head.joining(head.taken), norms, joint)


def _plan_first(head: HeadTensors, shape: ModelShape) -> FusedLayerPlan:
    return FusedLayerPlan(
        head.norm("layers.0.input_layernorm", shape),
        head.norm("layers.0.hidden_norm", shape),
        *head.blocks(0, shape, 2 * shape.hidden_size),
        read_flag(head.values, "norm_before_residual"),
    )
