"""Medusa's heads on one rank of a target: from a hidden state to logits of several positions behind it.

Head h of Cai et al. 2024 (arXiv:2401.10774): residual blocks x + SiLU(W x + b), then a matrix to the vocabulary, the
head's own or the target's. Blocks are computed on every rank; matrices are cut over the vocabulary, and logits are
gathered on the rank that decides, the group's first. It does not know tensors' names, rows or which tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import silu

from parallel.communicator import Communicator
from trtrun.linear.layer import Linear
from trtrun.tensors import inference

_DECIDES = 0
"""The rank of the group whose logits count, as of the target's own head."""


class MedusaHeads:
    """The heads that are used.

    Attributes:
        num_heads: how many.
        hidden_size, dtype: of the states that they read.
    """

    def __init__(
        self,
        num_heads: int,
        hidden_size: int,
        dtype: torch.dtype,
        blocks: Sequence[Sequence[Linear]],
        matrices: Sequence[Linear],
        target_logits: Callable[[torch.Tensor], torch.Tensor],
        communicator: Communicator,
        vocab_size: int,
        num_lines: int,
        token_map: torch.Tensor | None,
    ) -> None:
        """Put layers together.

        Args:
            num_heads: that are used.
            hidden_size, dtype: of the target's activations.
            blocks: by place in a head: first one layer [num_heads * hidden, hidden] for all heads, then one for each.
            matrices: [share of the lines, hidden] of each head; none where `target_logits` serves.
            target_logits: hidden [n, hidden] to [n, vocab_size], as `CausalLM.logits`.
            communicator: of the target's tensor-parallel group.
            vocab_size: of the target.
            num_lines: of the matrices, over all ranks.
            token_map: [num_lines] int64 on the device: the target's id of each line; None where they are the same.
        """
        self.num_heads = num_heads
        self.hidden_size = hidden_size
        self.dtype = dtype
        self._blocks = blocks
        self._matrices = matrices
        self._target_logits = target_logits
        self._communicator = communicator
        self._vocab_size = vocab_size
        self._num_lines = num_lines
        self._token_map = token_map

    @property
    def decides(self) -> bool:
        """Whether this rank has the logits."""
        return self._communicator.rank == _DECIDES

    @inference
    def logits(self, hidden: torch.Tensor, count: int) -> torch.Tensor | None:
        """What the first `count` heads say. Collective over the group.

        Args:
            hidden: [rows, hidden] in the target's dtype on its device, behind the final norm; equal on all ranks.
            count: from 1 to num_heads.

        Returns:
            [rows, count, vocab_size] float32, -inf where the heads do not know a token; None on ranks that do not
            decide.
        """
        states = self._states(hidden)[:, :count]
        rows = hidden.shape[0]
        if not self._matrices:
            logits = self._target_logits(states.flatten(0, 1))
            return logits.view(rows, count, -1) if self.decides else None
        logits = torch.stack([self._matrices[head](states[:, head].contiguous()) for head in range(count)], dim=1)
        if self._communicator.size > 1:
            gathered = self._communicator.gather(logits.contiguous(), _DECIDES)
            if gathered is None:
                return None
            logits = gathered.permute(1, 2, 0, 3).flatten(2)
        logits = logits[..., : self._num_lines].float()
        if self._token_map is None:
            return logits
        every = logits.new_full((rows, count, self._vocab_size), -torch.inf)
        return every.index_copy_(2, self._token_map, logits)

    def share(self, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens of the rank that decides, on all ranks: of the same shape and dtype. Collective over the group.

        Ranks that propose different tokens would part for ever, so none of them relies on sums and ties being the same
        on its device as on the others'.
        """
        return tokens if self._communicator.size == 1 else self._communicator.broadcast(tokens, _DECIDES)

    def _states(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, num_heads, hidden]: what the heads' matrices multiply."""
        rows, width = hidden.shape
        states = hidden.unsqueeze(1).expand(-1, self.num_heads, -1)
        for place, layers in enumerate(self._blocks):
            if place == 0:
                changed = layers[0](hidden).view(rows, self.num_heads, width)
            else:
                changed = torch.stack(
                    [layers[head](states[:, head].contiguous()) for head in range(self.num_heads)], dim=1
                )
            states = states + silu(changed)
        return states
