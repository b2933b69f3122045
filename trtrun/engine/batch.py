"""From a plan to the tensors of one forward: flattened tokens, positions and attention segments.

Every shape comes from the plan (numbers that the host knows); contents come from the rows' state on the device. It
knows rows and segments. It does not know models, sampling or who asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trtrun.core import PrefillChunk
from trtrun.engine.rows import RowState
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment, StepBatch
from trtrun.tensors import device_integers


@dataclass
class ForwardBatch:
    """Input of one forward.

    Attributes:
        tokens: [tokens] int64.
        positions: [tokens] int64, at least 0 (padding stands at 0 here and at -1 in its segment).
        attention: the segments.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch


def pad_chunks(rows: RowState, chunks: Sequence[PrefillChunk], width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chunks of prompts as rows with the same number of queries, so that the last query of each is its last token.

    Args:
        rows: the state of the rows.
        chunks: at least one.
        width: at least the length of each.

    Returns:
        tokens [chunks, width] int64, and positions [chunks, width] int64 with -1 for padding, which comes first.
    """
    values = [(chunk.row, chunk.start, chunk.start + chunk.length) for chunk in chunks]
    row, start, stop = device_integers(values, rows.device).unsqueeze(2).unbind(1)
    positions = stop - width + torch.arange(width, device=rows.device)
    positions = torch.where(positions >= start, positions, -1)
    return rows.token_ids[row, positions.clamp(min=0)].to(torch.int64), positions


class BatchBuilder:
    """Collects segments and makes one flattened batch of them."""

    def __init__(self, rows: RowState) -> None:
        self._rows = rows
        self._tokens: list[torch.Tensor] = []
        self._segments: list[AttentionSegment] = []
        self.num_tokens = 0

    def add_rows(self, rows: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, context: int) -> int:
        """Add rows with the same number of queries each.

        Args:
            rows: [R] int64 on the device.
            tokens: [R, Q] int64.
            positions: [R, Q] int64; -1 is padding.
            context: upper bound of the positions, plus one.

        Returns:
            The first token of the segment.
        """
        return self.add_tables(self._rows.tables(rows, -(-context // self._rows.block_size)), tokens, positions)

    def add_tables(self, tables: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> int:
        """`add_rows` for rows with block tables [R, blocks] int64, which cover all positions."""
        start = self.num_tokens
        count, queries = tokens.shape
        self._segments.append(AttentionSegment(start, count, queries, tables, positions))
        self._tokens.append(tokens.reshape(-1))
        self.num_tokens += count * queries
        return start

    def add_prefill(self, chunk: PrefillChunk) -> int:
        """Add one prefill chunk; returns its first token."""
        stop = chunk.start + chunk.length
        device = self._rows.device
        rows = torch.full((1,), chunk.row, dtype=torch.int64, device=device)
        tokens = self._rows.token_ids[chunk.row, chunk.start : stop].to(torch.int64).unsqueeze(0)
        positions = torch.arange(chunk.start, stop, device=device).unsqueeze(0)
        return self.add_rows(rows, tokens, positions, stop)

    def build_steps(self) -> list[StepBatch]:
        """The attention of the single segment, position by position: one forward of R tokens for each."""
        whole = AttentionBatch(self._segments, self._rows.block_size)
        return [StepBatch(whole, step) for step in range(self._segments[0].queries)]

    def build(self) -> ForwardBatch:
        """The flattened batch."""
        tokens = self._tokens[0] if len(self._tokens) == 1 else torch.cat(self._tokens)
        flat = [segment.positions.reshape(-1) for segment in self._segments]
        positions = (flat[0] if len(flat) == 1 else torch.cat(flat)).clamp(min=0)
        return ForwardBatch(tokens, positions, AttentionBatch(self._segments, self._rows.block_size))
