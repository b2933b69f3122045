"""Token embedding and vocabulary head, both cut along the vocabulary over a tensor-parallel group, and logits of draft
heads over the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from parallel.communicator import Communicator
from trtrun.kernels.torch.soft_cap import soft_cap
from trtrun.layers.ends import PLAIN_ENDS, ModelEnds
from trtrun.linear.layer import Linear


class VocabularyEmbedding:
    """Looks tokens up in this rank's rows; the group's sum is the whole embedding.

    Args:
        weight: [rows, hidden]: entries [first, first + rows) of the vocabulary.
        first: the first entry that the rank holds.
        communicator: of the tensor-parallel group.
        factor: what rows are multiplied by, rounded to their dtype.
    """

    def __init__(self, weight: torch.Tensor, first: int, communicator: Communicator, factor: float = 1.0) -> None:
        self.weight = weight
        self._first = first
        self._communicator = communicator
        self._factor = float(torch.tensor(factor, dtype=weight.dtype))

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [tokens] int64 → [tokens, hidden] in the weight's dtype, equal on all ranks."""
        rows = self.stored_rows(tokens)
        return rows if self._factor == 1.0 else rows.mul_(self._factor)

    def stored_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens [tokens] int64 → [tokens, hidden] in the weight's dtype, without the factor, equal on all ranks."""
        if self._communicator.size == 1:
            return self.weight.index_select(0, tokens)
        local = tokens - self._first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = self.weight.index_select(0, local.masked_fill(elsewhere, 0))
        return self._communicator.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0))


class VocabularyHead:
    """Logits of this rank's vocabulary entries, gathered over the group.

    Args:
        linear: hidden to this rank's share of the padded vocabulary, the same size on every rank.
        vocab_size: entries of the checkpoint; the padding behind them is cut off.
        communicator: of the tensor-parallel group.
        reader: the only rank of the group that reads the logits; None where all ranks do.
        ends: what becomes of the logits.
    """

    def __init__(
        self,
        linear: Linear,
        vocab_size: int,
        communicator: Communicator,
        reader: int | None = None,
        ends: ModelEnds = PLAIN_ENDS,
    ) -> None:
        self._linear = linear
        self._ends = ends
        self._vocab_size = vocab_size
        self._communicator = communicator
        self._reader = reader

    def __call__(self, hidden: torch.Tensor, *, widens: bool = True) -> torch.Tensor:
        """hidden [n, hidden] → [n, vocab_size] float32; or in the product's dtype, where nothing more is computed with
        them and none `widens` them.

        On ranks that do not read them it has the same shape, NaN everywhere, and takes no memory.
        """
        logits = self._linear(hidden)
        if self._communicator.size > 1:
            gathered = self._gather(logits.contiguous())
            if gathered is None:
                unread = torch.full((1, 1), torch.nan, dtype=torch.float32, device=hidden.device)
                return unread.expand(hidden.shape[0], self._vocab_size)
            logits = gathered.transpose(0, 1).reshape(hidden.shape[0], -1)
        logits = logits[:, : self._vocab_size]
        if widens or self._ends.changes_logits:
            logits = logits.float()
        if self._ends.logit_divisor != 1.0:
            logits = logits / self._ends.logit_divisor
        cap = self._ends.logit_soft_cap
        return logits if cap is None else soft_cap(logits, cap)

    @property
    def is_read(self) -> bool:
        """Whether this rank reads the logits."""
        return self._communicator.size == 1 or self._reader in (None, self._communicator.rank)

    def _gather(self, logits: torch.Tensor) -> torch.Tensor | None:
        if self._reader is None:
            return self._communicator.all_gather(logits)
        return self._communicator.gather(logits, self._reader)


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
