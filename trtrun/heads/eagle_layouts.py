"""Heads of EAGLE-1, EAGLE-2 and EAGLE-3 as files have them.

EAGLE-1 and EAGLE-2 are of one kind, and differ in the trees that are drafted (Li et al. 2024, arXiv:2401.15077,
arXiv:2406.16858):

    fc.weight, layers.0.…                              the reference; sizes in config.json
    fusion_fc.weight, transformer.…                    speculators; sizes in transformer_layer_config
    the same as the first, with model. in front        vLLM; sizes in model

Beside them may be: fc.bias; embed_tokens.weight, else the target's embedding serves; lm_head.weight, else the target's;
layers.1.… and more, ordinary ones. The first layer has no input_layernorm, and nothing is normed behind the last: with
norms that a head was not trained with it hardly drafts. Where files have these two all the same, config.json must say
whether they count: runtimes wrote some that do not.

EAGLE-3 (Li et al. 2025, arXiv:2503.01840):

    fc.weight, midlayer.…, norm.weight, lm_head.weight, d2t, t2d      the reference, SpecForge; sizes in config.json
    the same, layers.0.… in midlayer's place                          speculators; sizes in transformer_layer_config
    the same, with model. in front                                    other trainers

Beside them may be: embed_tokens.weight, else the target's embedding serves; layers.1.… and more, ordinary ones;
input_norm.weight or fc_norm.0.weight …, norms before fc; norms of queries and keys per head; biases. Names and shapes
say how large the head is (eagle_tensors.py): what a config.json says of vocabularies and of the number of layers is
often another's. Layers may see a window, and have GELU where the target has it (layer_settings.py).

Trainers of all three copy the target's embedding as it is stored: a factor that the target has for it, as Gemma has,
does not count in heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.configuration.drafting.head_methods import Eagle3Section
from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError
from trtrun.heads.eagle_plan import EaglePlan, FusedLayerPlan, FusionPlan, JoinedLayerPlan
from trtrun.heads.eagle_tensors import HeadTensors, stem
from trtrun.heads.head_reading import list_outputs, read_boundaries, read_head
from trtrun.heads.heads import HEADS
from trtrun.models.config import ModelConfig, read_flag
from trtrun.models.layer_plan import ModelShape, NormPlan

_MORE_NORMS = r"(enorm|hnorm|(embedding|embed|hidden|pre_lm_head|lm_head)_layernorm)\.weight"
_BESIDE = re.compile(rf"(fc\.(weight|bias)|(norm|lm_head|embed_tokens)\.weight|token_map|{_MORE_NORMS})", re.ASCII)
_INPUT_NORM, _FINAL_NORM = "layers.0.input_layernorm.weight", "norm.weight"


@HEADS.register("eagle")
def read_eagle(path: Path, target: ModelConfig, section: SpeculationSection) -> EaglePlan:
    """Plan the head of a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    return read_head(path, target, "eagle", _BESIDE, _plan)


def _plan(head: HeadTensors) -> EaglePlan:
    target, hidden = head.target, head.hidden
    _refuse_others(head)
    if hidden != target.hidden_size or head.taken != 2 * hidden:
        raise CheckpointError(
            f"fc.weight has shape {[hidden, head.taken]}, but the target's hidden size is {target.hidden_size}, for "
            f"which it must be {[target.hidden_size, 2 * target.hidden_size]}: the head is for another target"
        )
    for flag in ("bias", "eagle_fc_bias", "fusion_bias"):  # of the reference, vLLM and speculators
        head.has("fc.bias", flag)
    shape = head.layers()
    has_input_norm, has_final_norm = _norms(head)
    return EaglePlan(
        name="EAGLE",
        reads="what leaves the target's final norm",
        embedding_and_head=head.embedding_and_head(),
        target_hidden_size=target.hidden_size,
        taps=(target.num_layers + 1,),
        stored=shape,
        fusion=None,
        first=JoinedLayerPlan(
            head.joining(2 * hidden),
            head.norm(_INPUT_NORM.removesuffix(".weight"), shape) if has_input_norm else None,
            *head.blocks(0, shape),
        ),
        layers=head.ordinary_layers(shape),
        final_norm=head.norm("norm", shape) if has_final_norm else None,
        norm_output=has_final_norm,  # as what it reads of the target is
        rope=head.rope(shape),
    )


def _refuse_others(head: HeadTensors) -> None:
    """What heads of this kind do not compute.

    Raises:
        CheckpointError: it does.
    """
    if "token_map" in head.names:
        raise CheckpointError("it has a token_map: EAGLE heads for a part of the target's tokens are not supported")
    more = next((name for name in head.names if re.fullmatch(_MORE_NORMS, name)), None)
    if more is not None or read_flag(head.values, "layernorms"):
        raise CheckpointError(
            f"it has {more or 'layernorms: true in its config.json'}: heads with norms around fc are not supported, "
            "only the papers'"
        )
    is_silent = _nested(head, "model").get("skip_output_norm") is None
    if is_silent and read_flag(_nested(head, "eagle_config"), "use_last_layernorm"):
        raise CheckpointError(
            "use_last_layernorm is true, which does not say what the next step reads: add skip_output_norm: false to "
            "config.json if it is what leaves that norm; others are not supported"
        )


def _norms(head: HeadTensors) -> tuple[bool, bool]:
    """Whether the first layer has a norm in front of attention, and whether there is one behind the last layer.

    Raises:
        CheckpointError: see `_counts`.
    """
    modelopt = _nested(head, "eagle_config")
    used = [modelopt.get("use_input_layernorm_in_first_layer"), modelopt.get("use_last_layernorm")]
    if isinstance(head.values.get("model"), Mapping) or head.values.get("layernorms") is False:
        used = [False, False]  # vLLM's and speculators' heads have none unless they say so
    return _counts(head, _INPUT_NORM, "skip_prenorm", used[0]), _counts(head, _FINAL_NORM, "skip_output_norm", used[1])


def _counts(head: HeadTensors, name: str, flag: str, used: object) -> bool:
    """Whether a norm counts: as vLLM's `flag` has it, or else as `used` is true or false.

    Raises:
        CheckpointError: config.json does not say so of one that is there, or calls for one that is not.
    """
    values = _nested(head, "model")
    counts = used if values.get(flag) is None else not read_flag(values, flag)
    if name not in head.names:
        if counts:
            raise CheckpointError(f"config.json calls for {name}, which is not there: the files are incomplete")
        return False
    if not isinstance(counts, bool):
        raise CheckpointError(
            f"it has {name}, which heads of EAGLE-1 and EAGLE-2 do not use, and config.json does not say whether this "
            f"one does: write {flag}: true there, or false if it was trained with that norm"
        )
    if not counts:
        head.left_out.add(head.names[name])
    return counts


def _nested(head: HeadTensors, key: str) -> Mapping[str, Any]:
    """What stands below a key of config.json, or else all of it."""
    values = head.values.get(key)
    return values if isinstance(values, Mapping) else head.values


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
