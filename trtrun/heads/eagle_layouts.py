"""Heads of EAGLE-1 and EAGLE-2 as files have them: both are of one kind, and differ in the trees that are drafted (Li
et al. 2024, arXiv:2401.15077, arXiv:2406.16858).

    fc.weight, layers.0.…                              the reference; sizes in config.json
    fusion_fc.weight, transformer.…                    speculators; sizes in transformer_layer_config
    the same as the first, with model. in front        vLLM; sizes in model

Beside them may be: fc.bias; embed_tokens.weight, else the target's embedding serves; lm_head.weight, else the target's;
layers.1.… and more, ordinary ones. The first layer has no input_layernorm, and nothing is normed behind the last: with
norms that a head was not trained with it hardly drafts. Where files have these two all the same, config.json must say
whether they count: runtimes wrote some that do not. It does without torch, and does not know how a head computes
(heads/eagle_head.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError
from trtrun.heads.eagle_plan import EaglePlan, JoinedLayerPlan
from trtrun.heads.eagle_tensors import HeadTensors
from trtrun.heads.head_reading import read_head
from trtrun.heads.heads import HEADS
from trtrun.models.config import ModelConfig, read_flag

_MORE_NORMS = r"(enorm|hnorm|(embedding|embed|hidden|pre_lm_head|lm_head)_layernorm)\.weight"
_BESIDE = re.compile(
    rf"(fc\.(weight|bias)|(norm|lm_head|embed_tokens)\.weight|token_map|{_MORE_NORMS})", re.ASCII
)
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
