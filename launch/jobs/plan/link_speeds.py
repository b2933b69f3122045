"""How fast messages between ranks are, for estimates: as `trtrun check` has measured it, as the user says, or what is
published of a kind of link.

It knows latencies and bytes a second. It does not know what is sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.jobs.placement.links import Carries
from trtrun.errors import ConfigError


@dataclass(frozen=True)
class LinkSpeed:
    """One kind of link, or what a sum over a whole group takes.

    Attributes:
        latency_s: seconds of a short message one way; of a sum, until every rank has it.
        bytes_per_s: of long messages one way; of a sum, the tensor's bytes over its time.
        source: where the figures come from.
        collective_s: seconds that each collective of GPUs takes beside its messages.
    """

    latency_s: float
    bytes_per_s: float
    source: str
    collective_s: float = 0.0

    def seconds(self, messages: float, nbytes: float) -> float:
        """What messages one behind the other take, with so many bytes in all."""
        return self.latency_s * messages + nbytes / self.bytes_per_s


_NCCL_S = 6.6e-6
"""What a ring of short messages takes beside its steps, in NCCL's model of itself (src/graph/tuning.cc, baseLat)."""

BETWEEN_HOSTS: Mapping[str, LinkSpeed] = {
    "hdr": LinkSpeed(1.6e-6, 23.5e9, "InfiniBand HDR: OSU 5.6.2 on Azure's HBv2, 8 bytes and 4 MiB over MPI", _NCCL_S),
    "ndr": LinkSpeed(1.6e-6, 50e9, "InfiniBand NDR: 400 Gbit/s as named, the latency of HDR", _NCCL_S),
    "slingshot": LinkSpeed(
        2.9e-6, 23.2e9, "Slingshot 11: OSU 7.5 between GPUs of two nodes, Cray MPICH (EESSI, May 2026)", _NCCL_S
    ),
    "100gbe": LinkSpeed(
        10e-6, 5.25e9, "100 GbE over TCP: MPI's latency as tuned by Cisco, 42 Gbit/s a core (SIGCOMM 2021)", _NCCL_S
    ),
}
"""Links of one network port."""

IN_A_HOST: Mapping[str, LinkSpeed] = {
    "nvlink": LinkSpeed(2.8e-6, 245e9, "NVLink: sums over two H200 (docs/lab/2026-11-gpus.md)"),
    "pcie": LinkSpeed(1.0e-6, 64e9, "PCIe 5.0: 16 lanes as named, latency by NCCL's model", _NCCL_S),
    "shared-memory": LinkSpeed(4.3e-6, 8.7e9, "shared memory: trtrun check on two cores"),
}


@dataclass(frozen=True)
class LinkSpeeds:
    """All links of a job.

    Attributes:
        network: between hosts.
        local: inside a host.
        network_sums, local_sums: of a tensor-parallel group over several hosts, or inside one, where one was measured.
    """

    network: LinkSpeed
    local: LinkSpeed
    network_sums: LinkSpeed | None = None
    local_sums: LinkSpeed | None = None


def given(speed: LinkSpeed, latency_us: float | None, gbit: float | None) -> LinkSpeed:
    """The link with what the user says of it."""
    if latency_us is None and gbit is None:
        return speed
    return replace(
        speed,
        latency_s=speed.latency_s if latency_us is None else latency_us * 1e-6,
        bytes_per_s=speed.bytes_per_s if gbit is None else gbit * 1e9 / 8,
        source="as given" if None not in (latency_us, gbit) else f"as given; else {speed.source}",
    )


def read_check(path: Path, speeds: LinkSpeeds) -> LinkSpeeds:
    """Speeds with what `trtrun check --json` has printed into a file in place of what they say.

    The slowest link of a kind stands for all.

    Raises:
        ConfigError: the file cannot be read, or is no such report.
    """
    try:
        report = json.loads(path.read_text())
        links = [link for link in report["links"] if link["timing"] is not None]
        source = f"measured ({path.name})"
        network, local = (_pairs(_over(links, kind), source) for kind in (True, False))
        network_sums, local_sums = (_sums(_over(links, kind), source) for kind in (True, False))
    except OSError as error:
        raise ConfigError(f"--links {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"--links {path}: not what trtrun check --json prints") from None
    return LinkSpeeds(network or speeds.network, local or speeds.local, network_sums, local_sums)


def _over(links: Sequence[Mapping[str, Any]], network: bool) -> list[Mapping[str, Any]]:
    return [link for link in links if ("network" in link["transport"]) == network]


def _pairs(links: Sequence[Mapping[str, Any]], source: str) -> LinkSpeed | None:
    """The slowest link of two ranks. Plans and reports pass Python: they count where nothing else was timed."""
    pairs = [link for link in links if not link["carries"].endswith("all_reduce")]
    return _slowest([link for link in pairs if link["carries"] != Carries.CONTROL] or pairs, source)


def _sums(links: Sequence[Mapping[str, Any]], source: str) -> LinkSpeed | None:
    return _slowest([link for link in links if link["carries"] == Carries.TARGET_SUMS], source)


def _slowest(links: Sequence[Mapping[str, Any]], source: str) -> LinkSpeed | None:
    timings = [link["timing"] for link in links]
    if not timings:
        return None
    latency, speed = (max(item["latency_s"] for item in timings), min(item["bytes_per_s"] for item in timings))
    return LinkSpeed(float(latency), float(speed), source)
