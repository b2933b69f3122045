"""Rows for drafters that read the target's hidden states: where each guesses a token of the completion.

A head at place i knows the target's state there, from which the target makes token i + 1; depth h guesses token
i + 2 + h. Pure index arithmetic: it knows no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtrun.errors import ConfigError
from trtrun.tools.training.data import DataRow


@dataclass(frozen=True)
class HeadBatch:
    """Some rows for the target.

    Attributes:
        text: [rows, longest] int64, padded with 0.
        prompt_lengths, lengths: [rows] int64.
    """

    text: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor

    def places(self, depth: int) -> torch.Tensor:
        """[rows, longest] bool: hidden states from which this depth guesses a token of the completion."""
        position = torch.arange(self.text.shape[1], device=self.text.device) + 2 + depth
        return (position >= self.prompt_lengths[:, None]) & (position < self.lengths[:, None])


def check_long_enough(rows: Sequence[DataRow]) -> None:
    """Raise ConfigError where no row is long enough for a guess."""
    if rows and not any(len(row.tokens) > 2 for row in rows):
        raise ConfigError("the data has no row of three tokens: heads guess the second token behind what they read")


def pad_rows(rows: Sequence[DataRow], device: torch.device) -> HeadBatch:
    """The rows as tensors on a device."""
    text = torch.zeros(len(rows), max(len(row.tokens) for row in rows), dtype=torch.int64)
    for index, row in enumerate(rows):
        text[index, : len(row.tokens)] = torch.tensor(row.tokens)
    prompts = torch.tensor([row.prompt_length for row in rows], device=device)
    lengths = torch.tensor([len(row.tokens) for row in rows], device=device)
    return HeadBatch(text.to(device), prompts, lengths)


def tables_of(rows: Sequence[DataRow], batch: HeadBatch, right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tables as `DraftTraining.matches` gives them.

    Where t tokens are known, the newest has not been read by the target: heads see the hidden state before it.

    Args:
        rows: those of the batch.
        batch: see `pad_rows`.
        right: of each depth [places] bool: whether its guesses are the data's tokens, in the order of `batch.places`.
    """
    tables = [torch.zeros(len(row.tokens) - row.prompt_length, len(right), dtype=torch.bool) for row in rows]
    for depth, of_depth in enumerate(right):
        indexes, places = batch.places(depth).nonzero(as_tuple=True)
        for index, place, is_right in zip(indexes.tolist(), places.tolist(), of_depth.tolist(), strict=True):
            known = place + 2 - rows[index].prompt_length
            if known >= 0:
                tables[index][known, depth] = is_right
    return tables
