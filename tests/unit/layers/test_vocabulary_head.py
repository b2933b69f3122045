"""Logits of a vocabulary that is cut over ranks: whole where they are read, and nothing of them elsewhere."""

from __future__ import annotations

import pytest
import torch
from paged import LockStepCommunicator, LockStepGroup

from parallel.transports.solo import SoloCommunicator
from trtrun.layers.embedding import VocabularyHead
from trtrun.layers.ends import ModelEnds
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS

VOCAB, HIDDEN, ROWS, RANKS = 10, 4, 3, 2
"""The ranks hold 6 entries each: the last two are padding."""


class Counting(LockStepCommunicator):
    """Knows what its rank got."""

    received = 0

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.received += self.size * tensor.numel()
        return super().all_gather(tensor)

    def gather(self, tensor: torch.Tensor, root: int) -> torch.Tensor | None:  # type: ignore[override]
        self.received += self.size * tensor.numel() if self.rank == root else 0
        return super().gather(tensor, root)


def share(weight: torch.Tensor, rank: int) -> Linear:
    own = weight[6 * rank : 6 * rank + 6].clone()
    return Linear(own.shape, QUANTIZATIONS.get("none"), {"weight": own})


@pytest.mark.parametrize("reader", [None, 0, 1])
def test_logits_go_to_the_rank_that_reads_them_and_to_no_other(reader: int | None) -> None:
    weight = torch.randn(12, HIDDEN)
    hidden = torch.randn(ROWS, HIDDEN)
    group = LockStepGroup(RANKS)
    communicators = [Counting(group, rank) for rank in range(RANKS)]
    results = group.run(lambda rank: VocabularyHead(share(weight, rank), VOCAB, communicators[rank], reader)(hidden))
    for rank, logits in enumerate(results):
        assert logits.shape == (ROWS, VOCAB) and logits.dtype == torch.float32
        if reader in (None, rank):
            torch.testing.assert_close(logits, (hidden @ weight.T)[:, :VOCAB])
        else:
            assert communicators[rank].received == 0
            assert logits.isnan().all()
            assert logits.untyped_storage().nbytes() == 4


@pytest.mark.parametrize(
    ("ends", "dtype"),
    [
        (ModelEnds(), torch.bfloat16),
        (ModelEnds(logit_divisor=3.0), torch.float32),
        (ModelEnds(logit_soft_cap=2.0), torch.float32),
    ],
)
def test_logits_are_widened_where_something_is_computed_with_them(ends: ModelEnds, dtype: torch.dtype) -> None:
    weight, hidden = torch.randn(6, HIDDEN).bfloat16(), torch.randn(ROWS, HIDDEN).bfloat16()
    head = VocabularyHead(share(weight, 0), 5, SoloCommunicator(), ends=ends)
    wide, narrow = head(hidden), head(hidden, widens=False)
    assert (wide.dtype, narrow.dtype) == (torch.float32, dtype)
    assert torch.equal(narrow.float(), wide)
