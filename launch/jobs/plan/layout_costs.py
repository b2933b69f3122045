"""What a round takes in one layout of a job over hosts: weights read from memory, and what the ranks exchange.

It knows the configuration with other devices in it, as `trtrun plan` reads it. It does not know which layouts there
are, or arithmetic, which bounds rounds of many rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from launch.jobs.placement.allocation import is_local
from launch.jobs.placement.devices import count_host_slots
from launch.jobs.placement.memory import JobMemory, ModelShards
from launch.jobs.plan.link_speeds import LinkSpeeds
from launch.jobs.plan.round_traffic import (
    Group,
    Traffic,
    control_traffic,
    forward_traffic,
    handover_traffic,
    total_seconds,
    verdict_traffic,
)
from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import host_of, kind_of
from trtrun.errors import ConfigError, TrtrunError
from trtrun.kvcache.sizing import free_bytes_of_slot
from trtrun.memory.expert_cuts import HeldModel, expert_bytes
from trtrun.models.experts_plan import find_experts
from trtrun.start.job_spec import JobSpec

HIT_RATES = ((1, 0.99), (8, 0.90), (32, 0.70))
"""Rows, and how many of their verdicts were guessed by drafting ahead (docs/performance.md, four GPUs)."""


class Assumed(NamedTuple):
    """What estimates rest on.

    Attributes:
        rows: of a round.
        speeds: of links.
        memory_bytes_per_s: of a GPU, or of a host's CPU slots together.
        gpu_bytes: memory of each GPU; None where those that are here say it.
    """

    rows: int
    speeds: LinkSpeeds
    memory_bytes_per_s: float
    gpu_bytes: int | None = None


@dataclass(frozen=True)
class Layout:
    """One way to place the job.

    Attributes:
        name: for people.
        target, draft: devices, by tensor-parallel index.
        by_experts: whether the target's experts lie whole on ranks; None where it has none.
    """

    name: str
    target: tuple[str, ...]
    draft: tuple[str, ...]
    by_experts: bool | None = None


@dataclass(frozen=True)
class LayoutCost:
    """What one round of a layout takes, in seconds.

    Attributes:
        layout: which one.
        problem: why it cannot be; empty where it can, as far as is known.
        weight_bytes: most of a rank.
        reading_s, drafting_s: the target's weights read once; drafting, with what its ranks exchange.
        sent_s: what the round waits for of what the target's ranks and both engines exchange.
        round_s: all of it; less what is drafted ahead.
        traffic: what is sent.
        fits: whether weights and a row have room; None where memory is not known.
    """

    layout: Layout
    problem: str = ""
    weight_bytes: int = 0
    reading_s: float = 0.0
    drafting_s: float = 0.0
    sent_s: float = 0.0
    round_s: float = 0.0
    traffic: tuple[Traffic, ...] = ()
    fits: bool | None = None


def estimate_layout(config: RuntimeConfig, layout: Layout, assumed: Assumed) -> LayoutCost:
    """What a layout takes, or why it cannot be."""
    try:
        memory = JobMemory.read(JobSpec(_placed(config, layout)))
        fits = _has_room(memory, assumed.gpu_bytes)
        weights = [memory.shard_bytes(rank) for rank in memory.topology.worker_ranks]
    except (TrtrunError, ParallelError) as error:
        return LayoutCost(layout, problem=str(error))
    rows, speeds, draft_len = assumed.rows, assumed.speeds, memory.config.draft_len
    target = _group(memory.topology, "target", memory.target)
    tokens = rows * (draft_len + 1)
    per_device = assumed.memory_bytes_per_s / (max(target.hosts) if not target.on_gpus else 1)
    reading = _bytes_read(memory.target, max(bytes_of[1] for bytes_of in weights), tokens) / per_device
    verifying = [*forward_traffic(target, tokens, tokens, 1, speeds), *verdict_traffic(target, rows, draft_len, speeds)]
    drafting, sent_drafting = _drafting(memory, max(bytes_of[0] for bytes_of in weights), rows, per_device, speeds)
    handover = list(_handover(memory, rows, speeds))
    control = list(_control(memory, rows, speeds))
    sent = total_seconds(verifying) + total_seconds(handover)
    if not memory.config.plans_ahead:
        sent += total_seconds(control)
    drafted = drafting + total_seconds(sent_drafting)
    return LayoutCost(
        layout,
        weight_bytes=max(map(sum, weights)),
        reading_s=reading,
        drafting_s=drafted,
        sent_s=sent,
        round_s=_round_seconds(memory.config, rows, drafted, reading, sent),
        traffic=(*sent_drafting, *handover, *verifying, *control),
        fits=fits,
    )


def _round_seconds(config: RuntimeConfig, rows: int, drafting: float, reading: float, sent: float) -> float:
    """One behind the other; where the draft is made ahead, the longer of both as often as verdicts are guessed."""
    one_by_one = drafting + reading + sent
    if not config.drafts_ahead:
        return one_by_one
    hits = next((rate for most, rate in HIT_RATES if rows <= most), HIT_RATES[-1][1])
    return hits * max(drafting, reading + sent) + (1 - hits) * one_by_one


def _placed(config: RuntimeConfig, layout: Layout) -> RuntimeConfig:
    """The configuration with other devices."""
    target: dict[str, object] = {"devices": layout.target}
    if layout.by_experts is not None:
        target["expert_parallel"] = layout.by_experts
    changes: dict[str, object] = {"target": config.target.model_copy(update=target)}
    if config.draft is not None:
        changes["draft"] = config.draft.model_copy(update={"devices": layout.draft})
    launch = config.launch.model_copy(update={"orchestrator_host": host_of(layout.target[0])})
    return config.model_copy(update={**changes, "launch": launch})


def _has_room(memory: JobMemory, gpu_bytes: int | None) -> bool | None:
    """Whether weights, a round and a row fit on every rank; None where nothing is known of some."""
    topology, known = memory.topology, True
    for rank in topology.worker_ranks:
        slot = topology.slot(rank)
        assert slot is not None
        is_gpu = slot.device.startswith("cuda")
        if is_gpu and gpu_bytes is not None:
            free = gpu_bytes
        elif is_local(slot.host) and (not is_gpu or torch.cuda.is_available()):
            free = free_bytes_of_slot(slot.device, count_host_slots(topology, slot.host))
        else:
            known = False
            continue
        try:
            memory.count_blocks(rank, free, slot.device)
        except ConfigError:
            return False
    return True if known else None


def _group(topology: Topology, role: str, shards: ModelShards) -> Group:
    """An engine's ranks, and what a forward of it exchanges."""
    ranks = topology.target_ranks if role == "target" else topology.draft_ranks
    counts = Counter(map(topology.host, ranks))
    model = shards.model
    sums, chosen = 1, list[int]()  # the embedding is summed, too
    for layer in model.layers:
        plans = list(find_experts(layer))
        whole = [plan for plan in plans if plan.by_experts]
        chosen += [plan.num_chosen for plan in whole]
        shared = sum(1 for plan in plans if plan.num_shared_features)
        sums += 1 + (len(plans) - len(whole) + shared if plans else 1)
    on_gpus = kind_of(shards.section.devices[0]) == "cuda"
    width, item = model.hidden_size, shards.dtype.itemsize
    return Group(role, tuple(counts.values()), width, model.vocab_size, item, sums, tuple(chosen), on_gpus)


def _bytes_read(shards: ModelShards, held: int, tokens: int) -> float:
    """Bytes of `held` that a forward of so many tokens reads: all, but for experts that no token chooses, as if each
    were as likely."""
    kind = torch.device(kind_of(shards.section.devices[0]))
    model = HeldModel(shards.model, shards.tp_size, shards.dtype, kind, shards.section.quantization)
    unread = 0.0
    for layer in shards.model.layers:
        for plan in find_experts(layer):
            on_rank = plan.num_experts / (shards.tp_size if plan.by_experts else 1)
            missed = (1 - plan.num_chosen / plan.num_experts) ** tokens
            unread += missed * on_rank * expert_bytes(plan, model)
    return held - unread


def _drafting(
    memory: JobMemory, held: int, rows: int, memory_speed: float, speeds: LinkSpeeds
) -> tuple[float, list[Traffic]]:
    """Seconds of reading what drafts, once for each step, and what its ranks exchange."""
    draft_len, draft = memory.config.draft_len, memory.draft
    if not draft_len or not held:
        return 0.0, []
    if draft is None:
        return draft_len * held / memory_speed, []
    in_parallel = draft.model.mask_token is not None
    steps, tokens = (1, rows * 2 * draft_len) if in_parallel else (draft_len, rows)
    group = _group(memory.topology, "draft", draft)
    traffic = list(forward_traffic(group, tokens, rows * draft_len // steps, steps, speeds))
    return steps * held / memory_speed, traffic


def _handover(memory: JobMemory, rows: int, speeds: LinkSpeeds) -> Iterator[Traffic]:
    config, topology = memory.config, memory.topology
    if config.draft is None or not config.drafts_apart or topology.draft_leader is None:
        return
    is_far = topology.host(topology.draft_leader) != topology.host(topology.target_leader)
    probs = rows * config.draft_len * memory.target.model.vocab_size if config.speculation.use_logits else 0
    link, over = (speeds.network, "network") if is_far else (speeds.local, "host")
    yield from handover_traffic(rows, config.draft_len, probs, link, over)


def _control(memory: JobMemory, rows: int, speeds: LinkSpeeds) -> Iterator[Traffic]:
    topology = memory.topology
    home = topology.orchestrator_host
    away = sum(topology.host(rank) != home for rank in topology.worker_ranks)
    reports = topology.host(topology.target_leader) != home
    yield from control_traffic(rows, memory.config.draft_len, away, reports, speeds.network)
