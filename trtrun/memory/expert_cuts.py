"""What either cut of a model's experts over the ranks of a group would cost, told from shapes: for `trtrun plan`.

It knows plans of layers. It does not know how fast anything is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from trtrun.errors import CheckpointError
from trtrun.kvcache.sizing import format_bytes
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import count_bytes
from trtrun.loading.loading import shard_bytes
from trtrun.models.config import ModelConfig
from trtrun.models.experts_plan import ExpertsPlan, cut_by_experts, find_experts
from trtrun.weights.weight import Share


class HeldModel(NamedTuple):
    """A model as an engine holds it.

    Attributes:
        config: of it.
        tp_size: ranks of the engine.
        dtype: of activations.
        device: of the first rank.
        quantization: of weights that files have plainly.
    """

    config: ModelConfig
    tp_size: int
    dtype: torch.dtype
    device: torch.device
    quantization: str


def describe_expert_cuts(held: HeldModel) -> str | None:
    """Compare what a rank holds, what a token makes it read of experts, and what it sends for that, by both cuts; None
    where there are no experts, or one rank."""
    plans = [plan for layer in held.config.layers for plan in find_experts(layer)]
    if held.tp_size == 1 or not plans:
        return None
    is_set = plans[0].by_experts
    own, other = (_describe(held, by_experts=kind) for kind in (is_set, not is_set))
    names = ("by features", "by experts")
    value = "left out" if is_set else "true"
    return f"experts cut {names[is_set]}: {own}; {names[not is_set]} (expert_parallel {value}): {other}"


def _describe(held: HeldModel, *, by_experts: bool) -> str:
    layers = tuple(cut_by_experts(layer, by_experts=by_experts) for layer in held.config.layers)
    config, size = replace(held.config, layers=layers), held.tp_size
    plans = [plan for layer in layers for plan in find_experts(layer)]
    try:
        of_rank = (shard_bytes(config, rank, size, *held[2:]) for rank in range(size))
        weights, (mean, most) = max(of_rank), map(sum, zip(*(_bytes_read(plan, held) for plan in plans), strict=True))
    except CheckpointError as error:
        return f"not possible ({error})"
    read = format_bytes(mean) + (f", up to {format_bytes(most)}" if most > mean else "")
    sent = format_bytes(sum(_bytes_sent(plan, held) for plan in plans))
    return f"{format_bytes(weights)} of weights on a rank; of experts a token reads {read}, for which {sent} are sent"


def expert_bytes(plan: ExpertsPlan, held: HeldModel) -> int:
    """Bytes of one expert of a layer, or of those features of it that a rank holds."""
    share, default = Share(0, held.tp_size), QUANTIZATIONS.get(held.quantization)
    expert = 0
    for weight in (plan.gate_up(0), plan.down(0)):
        kept = held.config.quantization_of(weight, default)
        expert += count_bytes(kept.create(weight.cut(share), held.dtype, held.device.type))
    return expert


def _bytes_read(plan: ExpertsPlan, held: HeldModel) -> tuple[int, int]:
    """Bytes of a layer's experts that a token reads on a rank, on the mean and at most."""
    expert = expert_bytes(plan, held)
    if not plan.by_experts:
        return (plan.num_chosen * expert,) * 2
    last = Share(held.tp_size - 1, held.tp_size)  # which has as many as any
    return plan.num_chosen * expert // held.tp_size, min(plan.num_chosen, len(plan.experts.held(last))) * expert


def _bytes_sent(plan: ExpertsPlan, held: HeldModel) -> int:
    """Bytes that a rank sends for a token of a large round."""
    size, hidden = held.tp_size, plan.shape.hidden_size * held.dtype.itemsize
    if not plan.by_experts:
        return 2 * hidden * (size - 1) // size
    made = plan.num_chosen if held.device.type != "cpu" else plan.num_chosen / size
    return int((made + 1) * hidden * (size - 1) / size)
