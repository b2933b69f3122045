"""Errors of the parallel package: every message is one line that says what is wrong and what to do.

This module knows no other module; the packages above translate these errors for their users.
"""

from __future__ import annotations


class ParallelError(Exception):
    """Base of all errors that this package raises on purpose."""


class TopologyError(ParallelError):
    """Device lists do not make a topology, or the MPI world has another size than the topology."""


class ShardingError(ParallelError):
    """A size cannot be divided over the ranks of a tensor-parallel group."""


class CommunicatorError(ParallelError):
    """A tensor or a rank that the communicator cannot serve."""


class ControlPlaneError(ParallelError):
    """A control message on the wrong rank, or one that did not arrive in time."""


class HeartbeatError(ParallelError):
    """A rank cannot reach rank 0 by TCP."""


class LinkError(ParallelError):
    """A packet between the engines that has another shape than the plan says, or that this rank may not send."""
