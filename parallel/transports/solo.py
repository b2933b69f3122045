"""The group of one: every collective is the identity, on any device.

It knows no MPI, so a job of one process never starts it.
"""

from __future__ import annotations

import torch
from typing_extensions import override

from parallel.communicator import (
    Communicator,
    SumTiming,
    check_parts,
    check_peer,
    check_root,
    check_tensor,
    use_every_operation,
)


class SoloCommunicator(Communicator):
    """A Communicator of one rank; see the protocol for shapes and errors."""

    is_capturable = True
    sum_timings: tuple[SumTiming, ...] = ()

    def __init__(self, name: str = "solo", device: torch.device | None = None) -> None:
        """Make a group of this process alone, whose tensors live on `device` (default: the CPU)."""
        self.rank = 0
        self.size = 1
        self.name = name
        self.device = device or torch.device("cpu")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return `tensor`: the sum over one rank."""
        check_tensor(self, tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new [1, *tensor.shape] copy of `tensor`."""
        check_tensor(self, tensor)
        return tensor.unsqueeze(0).clone(memory_format=torch.contiguous_format)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new copy of `tensor`."""
        check_parts(self, tensor)
        return tensor.clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Return a new [1, *tensor.shape] copy of `tensor`."""
        check_root(self, root)
        return self.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Return `tensor`."""
        check_root(self, root)
        check_tensor(self, tensor)
        return tensor

    def send(self, tensor: torch.Tensor, destination: int) -> None:
        """Raise CommunicatorError: there is nobody to send to."""
        check_peer(self, destination)

    def recv(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Raise CommunicatorError: there is nobody to receive from."""
        check_peer(self, source)
        return tensor

    def barrier(self) -> None:
        """Return at once."""

    def warm_up(self) -> None:
        """Use every operation once."""
        use_every_operation(self)

    @override
    def abandon(self) -> None:
        """Do nothing: there is no other rank."""

    def close(self) -> None:
        """Nothing to give back."""
