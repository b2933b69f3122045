"""Logits of heads, over the target's vocabulary: those of the tokens that the heads know, on the rank that decides.

It knows the group's communicator. It does not know what the states are that logits are made of.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel.communicator import Communicator

DECIDES = 0
"""The rank of the group whose logits count, as of the target's own head."""


class KnownLogits:
    """The vocabulary end of heads on one rank.

    Args:
        logits: [n, hidden] of the end to [n, their tokens] float32, their own or the target's.
        token_ids: [their tokens] int64 on the device: the target's ids of them; None where they are the same.
        vocab_size: of the target.
        communicator: of the target's tensor-parallel group.
    """

    def __init__(
        self,
        logits: Callable[[torch.Tensor], torch.Tensor],
        token_ids: torch.Tensor | None,
        vocab_size: int,
        communicator: Communicator,
    ) -> None:
        self._logits = logits
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._communicator = communicator

    def __call__(self, hidden: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """hidden [n, hidden] of the end → [n, vocab_size] float32, -inf of tokens that are not known; `bias`
        [n, their tokens] is added to them. None on ranks that do not decide. Collective over the group."""
        logits = self._logits(hidden)
        if self._communicator.rank != DECIDES:
            return None
        if bias is not None:
            logits = logits + bias
        if self._token_ids is None:
            return logits
        every = logits.new_full((len(logits), self._vocab_size), -torch.inf)
        return every.index_copy_(1, self._token_ids, logits)

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of the rank that decides, on all ranks: of the same shape and dtype. Collective over the group.

        As of Medusa's heads: ranks that propose different tokens would part for ever.
        """
        return tokens if self._communicator.size == 1 else self._communicator.broadcast(tokens, DECIDES)
