"""Whether a job goes on when it loses its draft ranks, and why not: one answer for all who start, run and check it.

It knows the configuration and who sits where. How a loss is noticed is the heartbeat's business (`parallel.watchdog`).
"""

from __future__ import annotations

from parallel.mpi_rank import outlives_ranks
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig


def find_obstacle(config: RuntimeConfig, topology: Topology) -> str | None:
    """Why the loss of a draft rank ends the job, whatever its MPI can do; None where it need not."""
    if not topology.draft_ranks:
        return "no rank drafts"
    if set(topology.draft_ranks) & set(topology.target_ranks):
        return "draft and target share a device"
    if config.launch.on_draft_loss == "end":
        return "launch.on_draft_loss is end"
    if not _goes_on_alone(config):
        return "the target waits for the draft in every round"
    return None


def expendable_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks that the job can do without where its MPI outlives ranks: those of the draft, or none."""
    return () if find_obstacle(config, topology) else topology.draft_ranks


def expendable_hosts(config: RuntimeConfig, topology: Topology) -> frozenset[str]:
    """Hosts that the job can do without, too: those that have no other ranks than these."""
    ranks = expendable_ranks(config, topology)
    others = {topology.host(rank) for rank in range(topology.world_size) if rank not in ranks}
    return frozenset(topology.host(rank) for rank in ranks) - others


def unawaited_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks without which rounds go on, lost or not: those of a draft that the target does not wait for."""
    return topology.draft_ranks if _goes_on_alone(config) else ()


def losable_ranks(config: RuntimeConfig, topology: Topology) -> tuple[int, ...]:
    """World ranks that this job, as it was started, goes on without. On a rank of it."""
    return expendable_ranks(config, topology) if outlives_ranks() else ()


def describe_draft_loss(config: RuntimeConfig, topology: Topology) -> tuple[str, str] | None:
    """What the loss of a draft rank does to this job, as it was started. On a rank of it.

    Returns:
        "continue" or "end", and the reason for an end; None where there is no draft rank.
    """
    if not topology.draft_ranks:
        return None
    obstacle = find_obstacle(config, topology)
    if obstacle is None and not outlives_ranks():
        obstacle = "its MPI ends with any rank; Open MPI 5 with ULFM would go on"
    return ("end", obstacle) if obstacle else ("continue", "")


def _goes_on_alone(config: RuntimeConfig) -> bool:
    """Whether the target ranks of this job go on with plain steps where no draft comes."""
    return config.drafts_apart and not config.speculation.use_logits
