"""From the configuration's device lists to a Topology.

It does not know MPI: the topology follows from the lists alone, so the parent process, `trtrun plan` and every rank get
the same one.
"""

from __future__ import annotations

from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.config import RuntimeConfig
from trtrun.errors import TopologyError


def make_topology(config: RuntimeConfig) -> Topology:
    """Place both engines of a configuration.

    Raises:
        TopologyError: the device lists do not fit together.
    """
    try:
        return Topology.from_devices(config.draft_devices, config.target.devices)
    except ParallelError as error:
        raise TopologyError(str(error)) from None


def count_host_slots(topology: Topology) -> int:
    """CPU slots that share this host's cores and memory; GPU slots count too, their processes run here as well."""
    return len(topology.slots)
