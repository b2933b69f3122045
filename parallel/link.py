"""The link between the engines: draft tokens and probabilities one way, verdicts the other, device to device.

Packets have no header: both sides know every shape from the plan. How many tokens of each row are proposals, a draft
says beside its tokens. A packet without elements is not sent. The orchestrator is not involved, and where both ends are
one process nothing is sent at all. It works over any Communicator and knows no request, no model and no rule of
acceptance.

Tokens and probabilities are two messages, not one packed: the token ids go to every target rank and the probabilities,
which are megabytes, to one; packing would copy them twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from parallel.communicator import Communicator
from parallel.errors import LinkError
from parallel.topology import Topology


class Link:
    """One rank's end of the link between the draft and the target engine."""

    def __init__(self, topology: Topology, rank: int, communicator: Communicator | None) -> None:
        """Take this rank's end.

        Args:
            topology: who sits where.
            rank: this process's world rank; it holds a device.
            communicator: over all of topology.worker_ranks, in their order, for the link alone; the caller closes it.
                None where the job is one process.
        """
        workers = topology.worker_ranks
        if rank not in workers:
            raise LinkError(f"rank {rank} holds no device: only workers have an end of the link")
        if (communicator.size if communicator else 1) != len(workers):
            raise LinkError(f"the link needs a communicator over the {len(workers)} workers")
        self._communicator = communicator
        self._rank = rank
        self._group_rank = {world: index for index, world in enumerate(workers)}
        self._draft_leader = topology.draft_leader
        self._target_leader = topology.target_leader
        self._target_ranks = topology.target_ranks
        self._verdict_ranks = sorted({*topology.draft_ranks, *topology.target_ranks} - {topology.target_leader})
        self._local: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = deque()

    def send_draft(
        self, tokens: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None = None
    ) -> None:
        """Hand a round's draft to the target engine. On the draft leader.

        Args:
            tokens: [rows, draft_len] int64 on the device: to every target rank.
            draft_lens: [rows] int64 on the device, in one packet with the tokens: how many of them are proposals.
            draft_probs: [probability_rows, draft_len, vocab] float32 on the device, or None: to the target leader.
                Where this process is a target rank too, it gets these very tensors: do not overwrite them before the
                round's verification is done.
        """
        if self._rank != self._draft_leader:
            raise LinkError(f"rank {self._rank} sends a draft, but the draft leader is rank {self._draft_leader}")
        _check("tokens", tokens, 2, torch.int64)
        _check("draft_lens", draft_lens, 1, torch.int64)
        if draft_probs is not None:
            _check("draft_probs", draft_probs, 3, torch.float32)
        others = [rank for rank in self._target_ranks if rank != self._rank]
        if others:
            packet = torch.cat((draft_lens.unsqueeze(1), tokens), dim=1)
            for rank in others:
                self._send(packet, rank)
        if draft_probs is not None and self._target_leader != self._rank:
            self._send(draft_probs, self._target_leader)
        if self._rank in self._target_ranks:
            self._local.append((tokens, draft_lens, draft_probs if self._rank == self._target_leader else None))

    def receive_draft(
        self, rows: int, draft_len: int, probability_rows: int, vocab: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Get a round's draft. On every target rank, once for each send_draft; the shapes come from the plan.

        Returns:
            tokens: [rows, draft_len] int64 on the device.
            draft_lens: [rows] int64 on the device; from another process both are views of one packet.
            draft_probs: [probability_rows, draft_len, vocab] float32 on the target leader, None on other ranks and
                where the plan has no probability rows.
        """
        if self._rank not in self._target_ranks or self._draft_leader is None:
            raise LinkError(f"rank {self._rank} is given no drafts")
        wants_probs = self._rank == self._target_leader and probability_rows > 0
        if self._rank == self._draft_leader:
            return self._take_local((rows, draft_len), (probability_rows, draft_len, vocab) if wants_probs else None)
        packet = self._receive((rows, draft_len + 1), torch.int64, self._draft_leader)
        draft_lens, tokens = packet[:, 0], packet[:, 1:]
        if not wants_probs:
            return tokens, draft_lens, None
        probs = self._receive((probability_rows, draft_len, vocab), torch.float32, self._draft_leader)
        return tokens, draft_lens, probs

    def send_verdict(self, num_tokens: torch.Tensor, tokens: torch.Tensor) -> None:
        """Tell the draft ranks and the other target ranks what was kept. On the target leader.

        Args:
            num_tokens: [rows] int64 on the device.
            tokens: [rows, width] int64 on the device.
        """
        if self._rank != self._target_leader:
            raise LinkError(f"rank {self._rank} sends a verdict, but the target leader is rank {self._target_leader}")
        _check("num_tokens", num_tokens, 1, torch.int64)
        _check("tokens", tokens, 2, torch.int64)
        if not self._verdict_ranks:
            return
        packet = torch.cat((num_tokens.unsqueeze(1), tokens), dim=1)
        for rank in self._verdict_ranks:
            self._send(packet, rank)

    def receive_verdict(self, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Get a round's verdict. On every worker but the target leader, which has it already.

        Returns:
            num_tokens: [rows] int64 on the device.
            tokens: [rows, width] int64 on the device; both are views of one packet.
        """
        if self._rank == self._target_leader:
            raise LinkError(f"rank {self._rank} is the target leader: its own verification made the verdict")
        packet = self._receive((rows, width + 1), torch.int64, self._target_leader)
        return packet[:, 0], packet[:, 1:]

    def forget(self) -> None:
        """Drop what this process sent itself and never received, after a round that did not come to its end."""
        self._local.clear()

    def _send(self, tensor: torch.Tensor, rank: int) -> None:
        self._peers().send(tensor, self._group_rank[rank])

    def _receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> torch.Tensor:
        peers = self._peers()
        return peers.recv(torch.empty(shape, dtype=dtype, device=peers.device), self._group_rank[rank])

    def _peers(self) -> Communicator:
        if self._communicator is None:
            raise LinkError("the link has no communicator, but its other end is another process")
        return self._communicator

    def _take_local(
        self, shape: tuple[int, ...], probs_shape: tuple[int, ...] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what this process sent itself, after the same check of shapes that a transport makes."""
        if not self._local:
            raise LinkError(f"rank {self._rank} receives a draft before it has sent one to itself")
        tokens, draft_lens, draft_probs = self._local.popleft()
        found = (tuple(tokens.shape), None if draft_probs is None else tuple(draft_probs.shape))
        if found != (shape, probs_shape):
            raise LinkError(
                f"the plan's draft has shapes {shape} and {probs_shape}, but {found[0]} and {found[1]} were sent"
            )
        return tokens, draft_lens, draft_probs


def _check(name: str, tensor: torch.Tensor, dimensions: int, dtype: torch.dtype) -> None:
    if tensor.dim() != dimensions or tensor.dtype != dtype:
        raise LinkError(f"{name} must have {dimensions} dimensions of {dtype}, not {list(tensor.shape)} {tensor.dtype}")
