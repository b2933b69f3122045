"""DFlash and DSpark heads as files have them (DFlash: arXiv:2602.06036; DSpark: DeepSpec).

    fc.weight, hidden_norm.weight, layers.0.…, norm.weight          DFlash, as its authors write it: embedding and head
                                                                    are the target's; dflash_config in config.json
    the same, with embed_tokens.weight, lm_head.weight, d2t, t2d    speculators; sizes in transformer_layer_config
    the same, with embed_tokens.weight, lm_head.weight,
    markov_head.markov_w1.weight, markov_head.markov_w2.weight,
    markov_head.gate_proj.weight and .bias,
    confidence_head.proj.weight and .bias                           DSpark, as DeepSpec writes it

Of which layers it reads the outputs `target_layer_ids` says, from 0, and -1 is the embedding; speculators'
`aux_hidden_state_layer_ids` count one more. What a confidence head says nobody asks: how many tokens are worth their
time, pacing knows from rounds. Names and shapes say how large the head is (eagle_tensors.py). It does without torch,
and does not know how a head computes (heads/dflash_head.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trtrun.configuration.drafting.speculation_section import SpeculationSection
from trtrun.errors import CheckpointError, shorten
from trtrun.heads.dflash_plan import DFlashPlan, MarkovPlan
from trtrun.heads.eagle_tensors import NAMES, HeadTensors, stem
from trtrun.heads.head_reading import list_outputs, read_head
from trtrun.heads.heads import HEADS
from trtrun.models.config import ModelConfig, read_flag
from trtrun.models.decoder_plan import DecoderPlan
from trtrun.models.layer_plan import ModelShape

_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_GATE = "markov_head.gate_proj.weight"
_BESIDE = re.compile(
    r"(fc\.(weight|bias)|(hidden_norm|norm|lm_head|embed_tokens)\.weight|d2t|t2d"
    r"|markov_head\.[a-z0-9_.]+|confidence_head\.proj\.(weight|bias))",
    re.ASCII,
)
_OF_DFLASH2 = re.compile(r"candidate_selector\.|layers\.\d+\.(attention|mlp)_conv\.")
_MASK_FILE = "mask_embedding.pt"


@HEADS.register("dflash")
@HEADS.register("dspark")
def read_dflash(path: Path, target: ModelConfig, section: SpeculationSection) -> DFlashPlan:
    """Plan the head of a directory.

    Raises:
        CheckpointError: see `heads.HEADS`.
    """
    if (path / _MASK_FILE).exists():
        raise CheckpointError(f"{path}: {_MASK_FILE} is a pickle file, which is not read: such heads are not supported")
    return read_head(path, target, section.method, _BESIDE, partial(_plan, section=section), refuse=_refuse_others)


def _plan(head: HeadTensors, section: SpeculationSection) -> DFlashPlan:
    values, target = _flat(head.values), head.target
    kind = _kind(head, values)
    if kind != section.method:
        raise CheckpointError(f"it is a head of {NAMES[kind]}: set speculation.method to {kind}")
    _refuse_settings(values)
    from_newest = kind == "dspark"
    for flag in ("sample_from_anchor", "shift_label"):
        if values.get(flag) is not None:
            from_newest = read_flag(values, flag)
    num_taps, shape, own = head.count_taps(), head.layers(), head.embedding_and_head(scales_embedding=True)
    taps = _read_boundaries(head.values, values, target.num_layers, num_taps)
    block = _whole(values, "block_size", 2)
    most = block if from_newest else block - 1
    if section.draft_len > most:
        raise CheckpointError(
            f"it was trained to draft {most} tokens at once: set speculation.draft_len to {most} or less, not "
            f"{section.draft_len}"
        )
    mask_token = _whole(values, "mask_token_id", 0)
    if mask_token >= target.vocab_size:
        raise CheckpointError(
            f"config.json: mask_token_id is {mask_token}, but the target has {target.vocab_size} tokens: the head is "
            "for another target"
        )
    head.left_out |= {name for own, name in head.names.items() if own.startswith("confidence_head.")}
    return DFlashPlan(
        name=NAMES[kind],
        reads=f"outputs of the target's layers {list_outputs(taps)}",
        embedding_and_head=own,
        target_hidden_size=target.hidden_size,
        taps=taps,
        stored=shape,
        fc=head.joining(head.taken),
        context_norm=head.norm("hidden_norm", shape),
        layers=_plan_layers(head, shape),
        final_norm=head.norm("norm", shape),
        rope=head.rope(shape),
        mask_token=mask_token,
        from_newest=from_newest,
        is_causal=read_flag(values, "causal" if values.get("is_causal") is None else "is_causal"),
        markov=_plan_markov(head, values, own.num_lines),
        num_logits=section.draft_len,
        block=block,
    )


def _plan_layers(head: HeadTensors, shape: ModelShape) -> tuple[DecoderPlan, ...]:
    if head.slides:
        raise CheckpointError("heads of this kind with sliding attention are not supported")
    return tuple(
        DecoderPlan(head.norm(f"layers.{index}.input_layernorm", shape), *head.blocks(index, shape))
        for index in range(shape.num_layers)
    )


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says, that of dflash_config in front."""
    nested = values.get("dflash_config")
    return {**values, **(nested if isinstance(nested, Mapping) else {})}


def _kind(head: HeadTensors, values: Mapping[str, Any]) -> str:
    said = [str(values.get(key)) for key in ("architectures", "speculators_model_type", "projector_type")]
    has_markov = any(own.startswith("markov_head.") for own in head.names)
    return "dspark" if has_markov or any("dspark" in one.lower() for one in said) else "dflash"


def _refuse_others(names: Sequence[str], values: Mapping[str, Any]) -> None:
    """Other heads, which have hidden_norm beside fc as well.

    Raises:
        CheckpointError: it is one.
    """
    said = f"{values.get('architectures')} {_flat(values).get('projector_type')}".lower()
    for kind in ("DFlash2", "Domino"):
        if kind.lower() in said or (kind == "DFlash2" and any(_OF_DFLASH2.match(name) for name in names)):
            raise CheckpointError(f"heads of {kind} are not supported, only DFlash and DSpark")


def _refuse_settings(values: Mapping[str, Any]) -> None:
    """What heads of these kinds may compute, and those here do not.

    Raises:
        CheckpointError: it does.
    """
    for flag in ("use_swa", "attention_sink_bias", "add_swa_attention_sink_bias", "use_sliding_window"):
        kinds = values.get("layer_types")
        if read_flag(values, flag) and not (flag == "use_sliding_window" and kinds):
            raise CheckpointError(f"config.json says {flag}: heads with sliding attention are not supported")
    if values.get("is_neox_style") is not None and not read_flag(values, "is_neox_style"):
        raise CheckpointError("config.json says is_neox_style false: heads that rotate otherwise are not supported")
    for factor in ("output_multiplier", "input_embedding_scale", "logit_scale"):
        if values.get(factor) not in (None, 1, 1.0):
            raise CheckpointError(f"config.json says {factor} {shorten(values[factor])}, which is not supported")
    if values.get("final_logit_softcapping"):
        raise CheckpointError("config.json says final_logit_softcapping, which is not supported")


def _read_boundaries(
    whole: Mapping[str, Any], values: Mapping[str, Any], num_layers: int, count: int
) -> tuple[int, ...]:
    """At which boundaries of the target it reads, in the order in which fc takes them.

    Raises:
        CheckpointError: they are not the target's, or not as many as fc takes.
    """
    of_target = values.get("num_target_layers")
    if of_target is not None and of_target != num_layers:
        raise CheckpointError(
            f"config.json says num_target_layers {shorten(of_target)}, but the target has {num_layers}: the head is "
            "for another target"
        )
    name, behind = "target_layer_ids", 1
    if values.get(name) is None and whole.get("aux_hidden_state_layer_ids") is not None:
        name, behind = "aux_hidden_state_layer_ids", 0
    ids = values.get(name)
    if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise CheckpointError(
            f"config.json: '{name}' must be the list of the target's layers that it reads, not {shorten(ids)}"
        )
    found = tuple(one + behind for one in ids)
    if len(found) != count:
        raise CheckpointError(
            f"config.json: '{name}' names {len(found)} layers, but fc.weight takes the hidden states of {count}"
        )
    wrong = next((one for one in found if not 0 <= one < num_layers), None)
    if wrong is not None:
        what = "the last one's output, which trainers take before or behind the final norm, is not read"
        raise CheckpointError(
            f"config.json: '{name}' means the output of layer {wrong - 1} of a target of {num_layers}; "
            f"{what if wrong == num_layers else 'the head is for another target'}"
        )
    if len(set(found)) < len(found):
        raise CheckpointError(f"config.json: '{name}' names a layer twice")
    return found


def _plan_markov(head: HeadTensors, values: Mapping[str, Any], num_lines: int) -> MarkovPlan | None:
    has_any = any(own.startswith("markov_head.") for own in head.names)
    rank = values.get("markov_rank")
    if not has_any:
        if rank:
            raise CheckpointError(f"config.json says markov_rank {shorten(rank)}, but there is no {_MARKOV[0]}")
        return None
    kind = values.get("markov_head_type", "vanilla")
    if kind not in ("vanilla", "gated"):
        raise CheckpointError(
            f"config.json says markov_head_type {shorten(kind)}: only vanilla and gated are supported"
        )
    size = head.shape(_MARKOV[0], 2)[1]
    head.shape(_MARKOV[1], 2)
    before, behind = (head.names[name] for name in _MARKOV)
    gate = None
    if kind == "gated":
        head.shape(_GATE, 2)
        gate = stem(head.names[_GATE])
    return MarkovPlan(before, behind, head.target.vocab_size, num_lines, size, head.hidden, gate)


def _whole(values: Mapping[str, Any], name: str, least: int) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise CheckpointError(f"config.json: '{name}' must be a whole number from {least} on, not {shorten(value)}")
    return value
