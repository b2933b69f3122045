"""`trtrun plan --hosts`: ways to put a job on its hosts, what a round sends over which link in each, and which round is
the shortest.

All times are estimates (layout_costs.py). It starts and measures nothing, and does not know how a layout is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from launch.jobs.plan.layout_costs import Assumed, Layout, LayoutCost, estimate_layout
from launch.jobs.plan.link_speeds import BETWEEN_HOSTS, IN_A_HOST, LinkSpeeds, given, read_check
from launch.jobs.terminal import output_console
from trtrun.configuration.config import RuntimeConfig
from trtrun.configuration.device_lists import host_of, kind_of
from trtrun.errors import ConfigError
from trtrun.kvcache.sizing import format_bytes
from trtrun.start.job_spec import JobSpec

MEMORY_BYTES_PER_S = {"cuda": 4.8e12, "cpu": 40e9}
"""Of one GPU, an H200 as NVIDIA names it; and of a host's CPU slots together, which varies most of all."""


class Figures(NamedTuple):
    """What the command line says about links and memory.

    Attributes:
        links: a file with the output of `trtrun check --json`; None without.
        link, within: names in BETWEEN_HOSTS and IN_A_HOST; None for the usual one of the devices' kind.
        latency_us, gbit: between hosts, in place of the named link's.
        memory_gbs: GB/s of a device's memory.
        gpu_gib: memory of each GPU that is not here.
        rows: of a round.
    """

    links: Path | None = None
    link: str | None = None
    within: str | None = None
    latency_us: float | None = None
    gbit: float | None = None
    memory_gbs: float | None = None
    gpu_gib: float | None = None
    rows: int = 1

    def assume(self, kind: str) -> Assumed:
        """What follows for devices of a kind. Of links what was measured is taken before what is named, and what is
        given before both.

        Raises:
            ConfigError: `links` is no report of a check.
        """
        usual = ("hdr", "nvlink") if kind == "cuda" else ("100gbe", "shared-memory")
        speeds = LinkSpeeds(BETWEEN_HOSTS[self.link or usual[0]], IN_A_HOST[self.within or usual[1]])
        if self.links is not None:
            speeds = read_check(self.links, speeds)
        if (self.latency_us, self.gbit) != (None, None):
            network = given(speeds.network, self.latency_us, self.gbit)
            speeds = LinkSpeeds(network, speeds.local, None, speeds.local_sums)
        memory = MEMORY_BYTES_PER_S[kind] if self.memory_gbs is None else self.memory_gbs * 1e9
        return Assumed(self.rows, speeds, memory, None if self.gpu_gib is None else int(self.gpu_gib * 2**30))


@dataclass(frozen=True)
class HostsPlan:
    """All layouts, and the choice.

    Attributes:
        assumed: what all times rest on.
        draft_len: of a round.
        layouts: in the order in which they were thought of.
        chosen: name of the best one.
        reason: one sentence.
    """

    assumed: Assumed
    draft_len: int
    layouts: tuple[LayoutCost, ...]
    chosen: str
    reason: str


def plan_hosts(config: RuntimeConfig, figures: Figures) -> HostsPlan:
    """Compare the layouts of a job on its hosts.

    Raises:
        ConfigError: the configuration names one host, or no layout is possible.
        TrtrunError: a model cannot be read.
    """
    devices = tuple(dict.fromkeys((*config.target.devices, *(config.draft.devices if config.draft else ()))))
    if len({host_of(device) for device in devices}) < 2:
        raise ConfigError("plan --hosts: the devices are on one host: name those of several (docs/launch.md, Devices)")
    has_experts = JobSpec(config).target.has_experts
    assumed = figures.assume(kind_of(devices[0]))
    costs = tuple(estimate_layout(config, layout, assumed) for layout in list_layouts(config, devices, has_experts))
    possible = [cost for cost in costs if not cost.problem and cost.fits is not False]
    if not possible:
        raise ConfigError(f"plan --hosts: no layout is possible: {costs[0].problem or 'none has room'}")
    best = min(possible, key=lambda cost: cost.round_s)
    reason = explain(best, possible)
    return HostsPlan(assumed, config.draft_len, costs, best.layout.name, reason)


def list_layouts(config: RuntimeConfig, devices: Sequence[str], has_experts: bool) -> Iterator[Layout]:
    """The layouts to compare, none twice; those with experts by both cuts.

    Args:
        config: of the job; its own layout comes first.
        devices: all that it names, with hosts.
        has_experts: whether the target has experts.
    """
    by_host: dict[str, list[str]] = {}
    for device in devices:
        by_host.setdefault(host_of(device), []).append(device)
    hosts = list(by_host)
    own = config.draft.devices if config.draft is not None else ()
    first, second = (tuple(by_host[host]) for host in hosts[:2])
    every, apart = tuple(devices), second[: len(own)]
    found = [("as configured", config.target.devices, own)]
    if own:
        found += [
            ("target and draft over all hosts", every, every),
            (f"target over all hosts, draft on those of {hosts[0]}", every, first),
            (f"target on {hosts[0]}, draft apart on {hosts[1]}", first, apart),
            (f"target and draft on {hosts[0]}", first, first),
        ]
    else:
        found += [("target over all hosts", every, ()), (f"target on {hosts[0]}", first, ())]
    seen = set()
    for name, target, draft in found:
        for by_experts in (False, True) if has_experts and len(target) > 1 else (None,):
            place = (target, draft, by_experts)
            if place not in seen:
                seen.add(place)
                cut = "" if by_experts is None else f", experts cut by {'experts' if by_experts else 'features'}"
                yield Layout(name + cut, target, draft, by_experts)


def explain(best: LayoutCost, possible: Sequence[LayoutCost]) -> str:
    """Why the best is the best, beside the next one that is placed otherwise."""
    others = [cost for cost in possible if cost is not best]
    if not others:
        return "no other layout is possible"
    other = min(others, key=lambda cost: cost.round_s)
    name, take = max(_PARTS.items(), key=lambda part: part[1](other) - part[1](best))
    return (
        f"its round takes {_ms(best.round_s)} where the next best, {other.layout.name}, takes {_ms(other.round_s)}; "
        f"{name} takes {_ms(take(best))} and {_ms(take(other))} of these"
    )


_PARTS: Mapping[str, Callable[[LayoutCost], float]] = {
    "reading the target's weights": lambda cost: cost.reading_s,
    "the exchange": lambda cost: cost.sent_s,
    "waiting for drafts": lambda cost: cost.round_s - cost.reading_s - cost.sent_s,
}


def print_hosts_plan(plan: HostsPlan, as_json: bool) -> None:
    """Show the layouts on standard output, as tables or as one JSON object."""
    if as_json:
        print(json.dumps(asdict(plan)))
        return
    console = output_console()
    layouts, sent = Table(title=None), Table(title=None)
    for name in ("layout", "weights a rank", "reading", "drafting", "exchanging", "round"):
        layouts.add_column(name, justify="left" if name == "layout" else "right")
    for name in ("layout", "what is sent", "over", "times a round", "each", "in all"):
        sent.add_column(name, justify="left" if name in ("layout", "what is sent", "over") else "right")
    for cost in plan.layouts:
        if cost.problem:
            continue
        times = (_ms(seconds) for seconds in (cost.reading_s, cost.drafting_s, cost.sent_s, cost.round_s))
        name = cost.layout.name + ("" if cost.fits is not False else " (no room)")
        layouts.add_row(name, format_bytes(cost.weight_bytes), *times)
        for index, item in enumerate(cost.traffic):
            cells = (item.what, item.over, str(item.times), f"{item.nbytes:,} B", _ms(item.seconds))
            sent.add_row("" if index else cost.layout.name, *cells)
    console.print(layouts)
    console.print(sent)
    for line in describe(plan):
        print(line)


def describe(plan: HostsPlan) -> Iterator[str]:
    """What the tables do not say, a line each."""
    rows, speeds = plan.assumed.rows, plan.assumed.speeds
    yield (
        f"estimates of a round of {rows} row{'' if rows == 1 else 's'} and {plan.draft_len} draft tokens: "
        f"weights are read at {plan.assumed.memory_bytes_per_s / 1e9:g} GB/s"
    )
    named = (
        ("between hosts", speeds.network),
        ("in a host", speeds.local),
        ("sums between hosts", speeds.network_sums),
        ("sums in a host", speeds.local_sums),
    )
    for name, speed in named:
        if speed is not None:
            yield f"  {name}: {speed.latency_s * 1e6:.1f} µs, {speed.bytes_per_s / 1e9:.1f} GB/s: {speed.source}"
    for cost in plan.layouts:
        if cost.problem:
            yield f"not possible: {cost.layout.name}: {cost.problem}"
    if any(cost.fits is None for cost in plan.layouts if not cost.problem):
        yield "whether weights fit is not known for all hosts; --gpu-gib would say what a GPU has"
    yield f"chosen: {plan.chosen}: {plan.reason}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
