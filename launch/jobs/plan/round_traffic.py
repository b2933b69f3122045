"""What ranks send each other in one round, from shapes alone, and how long that takes on the round's path.

One formula for all: latency × messages + bytes / bandwidth, and what NCCL takes for a collective by itself. Bytes are
those that come into one host, or into one rank where all ranks are on one. It knows tensor-parallel groups, experts and
messages. It does not know weights, and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launch.jobs.plan.link_speeds import LinkSpeed, LinkSpeeds
from trtrun.core.nouns import RoundPlan
from trtrun.wire.messages import encode_packet
from trtrun.wire.plans import encode_plan
from trtrun.wire.reports import ReportArrays, RoundTimes

GATHERED_BYTES = 256 << 10
"""The largest tensor that is summed from all ranks' whole ones; of larger ones each rank sums a slice."""

_DRAFT_COLUMNS = 5
"""Of a draft's packet, beside its tokens."""


@dataclass(frozen=True)
class Traffic:
    """What is sent again and again in a round, and how long the round waits for it.

    Attributes:
        what: for people.
        over: "network" or "host".
        times: how often in a round.
        nbytes: that each brings over the link.
        seconds: all together.
    """

    what: str
    over: str
    times: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Group:
    """An engine's ranks and what they exchange in a forward.

    Attributes:
        role: "target" or "draft".
        hosts: the number of its ranks on each host, the leader's first.
        hidden: numbers of a hidden state.
        vocab: entries of the vocabulary.
        itemsize: bytes of a number.
        sums: all_reduces of a forward.
        chosen: how many whole experts of other ranks a token goes through, layer by layer; those in features are sums.
        on_gpus: whether tensors are on GPUs, where nothing is packed.
    """

    role: str
    hosts: tuple[int, ...]
    hidden: int
    vocab: int
    itemsize: int
    sums: int
    chosen: tuple[int, ...] = ()
    on_gpus: bool = True

    @property
    def ranks(self) -> int:
        """Ranks in all."""
        return sum(self.hosts)

    @property
    def is_far(self) -> bool:
        """Whether it has ranks on several hosts."""
        return len(self.hosts) > 1

    @property
    def over(self) -> str:
        """What its tensors go over: "network" or "host"."""
        return "network" if self.is_far else "host"

    @property
    def places(self) -> int:
        """Where bytes come into: hosts, where there are several, else ranks."""
        return len(self.hosts) if self.is_far else self.ranks

    @property
    def outside(self) -> int:
        """Ranks from which tensors come to the leader: of other hosts, where there are any."""
        return self.ranks - (self.hosts[0] if self.is_far else 1)


def forward_traffic(group: Group, tokens: int, sampled: int, steps: int, speeds: LinkSpeeds) -> Iterator[Traffic]:
    """What a group's ranks exchange in `steps` forwards of `tokens` each, of which `sampled` places want logits."""
    if group.ranks == 1:
        return
    state = tokens * group.hidden * group.itemsize
    times = steps * group.sums
    nbytes, seconds = _sum(group, state, speeds)
    yield Traffic(f"{group.role} all_reduce", group.over, times, nbytes, times * seconds)
    if group.chosen:
        exchanges = [_exchange(group, state, chosen, speeds) for chosen in group.chosen]
        nbytes, total = round(sum(size for size, _ in exchanges) / len(exchanges)), sum(took for _, took in exchanges)
        yield Traffic(f"{group.role} experts", group.over, steps * len(exchanges), nbytes, steps * total)
    nbytes = group.outside * sampled * -(-group.vocab // group.ranks) * group.itemsize
    yield Traffic(f"{group.role} logits", group.over, steps, nbytes, steps * _collective(group, 1, nbytes, speeds))


def verdict_traffic(group: Group, rows: int, draft_len: int, speeds: LinkSpeeds) -> Iterator[Traffic]:
    """The target leader tells its other ranks what is kept."""
    if group.ranks > 1:
        nbytes = rows * (draft_len + 2) * 8
        yield Traffic("verdict", group.over, 1, nbytes, _collective(group, 1, nbytes, speeds))


def handover_traffic(rows: int, draft_len: int, probs: int, link: LinkSpeed, over: str) -> Iterator[Traffic]:
    """Between a draft and a target on ranks of their own: the draft one way and the verdict the other.

    Args:
        rows, draft_len: of the round.
        probs: numbers in draft_probs, 0 where they do not travel.
        link: between the leaders.
        over: "network" or "host".
    """
    packets = [("draft tokens", _DRAFT_COLUMNS + draft_len), ("verdict to the draft", draft_len + 2)]
    for what, width in packets:
        nbytes = len(encode_packet(0, np.zeros((rows, width), dtype=np.int64)))
        yield Traffic(what, over, 1, nbytes, link.seconds(1, nbytes))
    if probs:
        yield Traffic("draft_probs", over, 1, 4 * probs, link.seconds(1, 4 * probs))


def control_traffic(rows: int, draft_len: int, away: int, reports: bool, link: LinkSpeed) -> Iterator[Traffic]:
    """Plans to so many ranks of other hosts than rank 0's, and the report, where it comes from one."""
    if away:
        of_rows = np.zeros(rows, dtype=np.int32)
        plan = encode_plan(RoundPlan(0, (), (), np.zeros((0, 3), dtype=np.int32), (), of_rows, of_rows, of_rows, 0))
        yield Traffic("plans", "network", away, len(plan), link.seconds(1, away * len(plan)))
    if reports:
        of_rows, tokens = np.zeros(rows, dtype=np.int64), np.zeros((rows, draft_len + 1), dtype=np.int64)
        nbytes = len(ReportArrays(0, RoundTimes(), of_rows, of_rows, tokens).encode())
        yield Traffic("report", "network", 1, nbytes, link.seconds(1, nbytes))


def total_seconds(traffic: Sequence[Traffic]) -> float:
    """Seconds of all of it."""
    return sum(item.seconds for item in traffic)


def _sum(group: Group, nbytes: int, speeds: LinkSpeeds) -> tuple[int, float]:
    """Bytes and seconds of one sum of a tensor. Half types are added up in the order of the ranks, so whole tensors or
    slices travel; of a group of two on GPUs NCCL's own sum moves as much."""
    if nbytes <= GATHERED_BYTES:
        moved, steps = group.outside * nbytes, 1
    else:
        moved, steps = 2 * group.outside * nbytes // group.places, 2
    measured = speeds.network_sums if group.is_far else speeds.local_sums
    if measured is not None:
        return moved, measured.seconds(1, nbytes)
    return moved, _collective(group, steps, moved, speeds)


def _exchange(group: Group, state: int, chosen: int, speeds: LinkSpeeds) -> tuple[int, float]:
    """Bytes and seconds of one layer whose experts lie whole on ranks: what they made goes to the ranks that add up
    columns of it, and these are gathered."""
    made = state * chosen if group.on_gpus else state * chosen // group.ranks
    parts = group.outside * made // group.places
    columns = group.outside * state // group.ranks
    return parts + columns, _collective(group, 1, parts, speeds) + _collective(group, 1, columns, speeds)


def _collective(group: Group, steps: int, nbytes: int, speeds: LinkSpeeds) -> float:
    """Seconds of one collective in which tensors go from everyone to everyone `steps` times, past each other host."""
    link, hosts = (speeds.network, len(group.hosts)) if group.is_far else (speeds.local, 2)
    by_itself = link.collective_s if group.on_gpus else 0.0
    return by_itself + link.seconds(steps * (hosts - 1), nbytes)
