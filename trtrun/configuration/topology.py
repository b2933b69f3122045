"""Who sits where, from the configuration's device lists.

It joins the configuration and `parallel.topology`, and knows neither hosts nor models.
"""

from __future__ import annotations

from parallel.errors import ParallelError
from parallel.topology import Topology
from trtrun.configuration.config import RuntimeConfig
from trtrun.errors import PlacementError


def make_topology(config: RuntimeConfig) -> Topology:
    """Place both engines of a configuration.

    Raises:
        PlacementError: the device lists do not fit together.
    """
    try:
        return Topology.from_devices(config.draft_devices, config.target.devices, config.launch.orchestrator_host)
    except ParallelError as error:
        raise PlacementError(str(error)) from None
