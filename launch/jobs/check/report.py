"""What a check found, as tables, as JSON and as lines. It measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from launch.jobs.check.inventory import RankInventory
from launch.jobs.placement.links import Carries, RankLink, show_ranks
from launch.jobs.terminal import output_console
from parallel.communicator import SumTiming
from parallel.probe import Timing
from parallel.topology import Topology
from trtrun.kvcache.sizing import format_bytes
from trtrun.start.job_spec import DraftTranslation

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class LinkReport:
    """One link, or all links of a group that sums together.

    Attributes:
        carries: what travels.
        ranks: world ranks.
        transport: how.
        faults: what came through wrong.
        timing: None where nothing was timed.
        is_tried: whether messages went over it; not inside one process.
        sums: of a group that chooses how it sums: what it measured for each size of message.
    """

    carries: str
    ranks: tuple[int, ...]
    transport: str
    faults: tuple[str, ...]
    timing: Timing | None
    is_tried: bool = True
    sums: tuple[SumTiming, ...] = ()

    @classmethod
    def of(cls, link: RankLink, faults: Sequence[str], timing: Timing | None) -> LinkReport:
        """A link that was tried."""
        return cls(link.carries, link.ranks, link.transport, tuple(faults), timing)

    @classmethod
    def of_group(
        cls, links: Sequence[RankLink], faults: Sequence[str], timing: Timing, sums: Sequence[SumTiming] = ()
    ) -> LinkReport:
        """All links of one group, tried together."""
        ranks = tuple(sorted({rank for link in links for rank in link.ranks}))
        transports = " + ".join(dict.fromkeys(link.transport for link in links))
        return cls(links[0].carries, ranks, transports, tuple(faults), timing, sums=tuple(sums))

    @classmethod
    def untried(cls, link: RankLink) -> LinkReport:
        """A link inside one process."""
        return cls(link.carries, link.ranks, link.transport, (), None, is_tried=False)


@dataclass(frozen=True)
class CheckReport:
    """A check that went through to its end.

    Attributes:
        ranks: every rank's inventory.
        roles, devices: of every rank, in the same order.
        links: all that were tried.
        seconds: from the start of rank 0's process to the end of the check.
        draft_loss: what the loss of a draft rank does to the job, "continue" or "end", and the reason for an end; None
            where there is no draft rank.
        translation: of a draft with another tokenizer than the target's; None where they are the same.
    """

    ranks: tuple[RankInventory, ...]
    roles: tuple[str, ...]
    devices: tuple[str, ...]
    links: tuple[LinkReport, ...]
    seconds: float
    draft_loss: tuple[str, str] | None = None
    translation: DraftTranslation | None = None

    @classmethod
    def make(
        cls,
        topology: Topology,
        inventories: Sequence[RankInventory],
        links: Sequence[LinkReport],
        seconds: float,
        draft_loss: tuple[str, str] | None = None,
        translation: DraftTranslation | None = None,
    ) -> CheckReport:
        """Put together what was found."""
        slots = [topology.slot(rank.rank) for rank in inventories]
        return cls(
            ranks=tuple(inventories),
            roles=tuple("+".join(topology.roles(rank.rank)) for rank in inventories),
            devices=tuple(slot.device if slot is not None else "host" for slot in slots),
            links=tuple(links),
            seconds=seconds,
            draft_loss=draft_loss,
            translation=translation,
        )

    @property
    def failures(self) -> tuple[str, ...]:
        """What came through wrong, one line each. A pair of ranks that several links share is told once."""
        return tuple(dict.fromkeys(f"{fault} ({link.transport})" for link in self.links for fault in link.faults))

    @property
    def versions(self) -> dict[str, str]:
        """Versions, the same on all ranks that have them."""
        return {name: version for rank in self.ranks for name, version in rank.versions.items()}

    @property
    def surroundings(self) -> list[str]:
        """What carries messages and what is lost with it, one line each; where ranks differ, with their numbers."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            for line in rank.surroundings.describe() if rank.surroundings is not None else ():
                found.setdefault(line, []).append(rank.rank)
        every = len(self.ranks)
        return [line if len(ranks) == every else f"rank {show_ranks(ranks)}: {line}" for line, ranks in found.items()]


def print_report(report: CheckReport) -> None:
    """Show tables of the ranks and the links on standard output."""
    from rich.table import Table  # not at the top: the short check before every run shows none

    ranks = Table(title=None)
    for name in ("rank", "host", "device", "role", "shard", "free", "KV tokens"):
        ranks.add_column(name, justify="left" if name in ("host", "device", "role") else "right", no_wrap=True)
    for rank, role, device in zip(report.ranks, report.roles, report.devices, strict=True):
        sizes = (rank.shard_bytes, rank.free_bytes)
        cells = [format_bytes(size) if size else "-" for size in sizes]
        ranks.add_row(str(rank.rank), rank.host, device, role, *cells, str(rank.kv_tokens or "-"))
    links = Table(title=None)
    for name in ("what travels", "ranks", "over", "messages", "latency", "bandwidth"):
        links.add_column(name, justify="right" if name in ("latency", "bandwidth") else "left")
    for link in report.links:
        wrong = "wrong" if link.faults else "right" if link.is_tried else "-"
        links.add_row(link.carries, show_link(link), link.transport, wrong, *_show_timing(link.timing))
    console = output_console()
    console.print(ranks)
    console.print(links)
    for link in report.links:
        if link.sums:
            console.print(_sum_table(link))
    same = ": the same on all ranks" if len(report.ranks) > 1 else ""
    print(", ".join(f"{name} {version}" for name, version in report.versions.items()) + same)
    for line in report.surroundings:
        print(line)
    if report.draft_loss is not None:
        what, why = report.draft_loss
        print(f"a lost draft rank {f'ends the job: {why}' if what == 'end' else 'costs drafts only: the job goes on'}")
    if report.translation is not None:
        print(report.translation.describe())
    if compared := sum(rank.compared_bytes for rank in report.ranks):
        print(f"{format_bytes(compared)} of engines are as they were built")
    hosts = len({rank.host for rank in report.ranks})
    state = "failed" if report.failures else "ready"
    number = f"{len(report.ranks)} ranks" if len(report.ranks) > 1 else "1 process"
    print(f"{number} on {hosts} host{'s' if hosts > 1 else ''}: {state}, after {report.seconds:.1f} s")


def report_json(report: CheckReport | None, problems: Sequence[str] = ()) -> str:
    """One JSON object: `problems` where the ranks do not fit together, else what was found."""
    if report is None:
        return json.dumps({"ok": False, "problems": list(problems)})
    return json.dumps(
        {
            "ok": not report.failures,
            "world_size": len(report.ranks),
            "seconds": round(report.seconds, 3),
            "versions": report.versions,
            "ranks": [
                {**rank.to_dict(), "role": role, "device": device}
                for rank, role, device in zip(report.ranks, report.roles, report.devices, strict=True)
            ],
            "on_draft_loss": report.draft_loss[0] if report.draft_loss is not None else None,
            "why_draft_loss_ends": (report.draft_loss[1] or None) if report.draft_loss is not None else None,
            "translation": asdict(report.translation) if report.translation is not None else None,
            "links": [asdict(link) for link in report.links],
            "problems": list(report.failures),
        }
    )


def show_link(link: LinkReport) -> str:
    """Its ranks: "1→2", "2, 3"."""
    if len(link.ranks) != 2 or link.carries.endswith("all_reduce"):
        return show_ranks(link.ranks)
    return f"{link.ranks[0]}{'↔' if link.carries in (Carries.CONTROL, Carries.HEARTBEAT) else '→'}{link.ranks[1]}"


def _sum_table(link: LinkReport) -> Table:
    """How long each way of summing takes, a row for a size of message."""
    from rich.table import Table

    ways = list(dict.fromkeys(way for timing in link.sums for way in timing.microseconds))
    table = Table(title=None)
    table.add_column(f"{link.carries}, µs", justify="right", no_wrap=True)
    for way in ways:
        table.add_column(way, justify="right")
    table.add_column("used")
    for timing in link.sums:
        times = [f"{timing.microseconds[way]:.1f}" if way in timing.microseconds else "-" for way in ways]
        table.add_row(f"{timing.nbytes >> 10} KiB", *times, timing.way)
    return table


def _show_timing(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return "-", "-"
    return f"{timing.latency_s * 1e6:.1f} µs", f"{timing.bytes_per_s / 1e9:.2f} GB/s"
