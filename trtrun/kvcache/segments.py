"""Which tokens of a forward see which keys: segments of rows, and the indices that all layers share; and with which
adapter the keys and values of each block are made.

It knows block tables and positions as tensors. It does not know requests or phases, or how attention is computed.

A forward's tokens lie in segments: R rows with Q query positions each. A decode row of a plain round has Q = 1, a row
under verification Q = draft_len + 1, a prefill chunk is one row with Q = its length. All shapes come from numbers that
the host knows; what each row sees comes from `positions` on the device, so nothing is copied back to the host and a
forward can become a CUDA graph.

Indices count in one layer's store, [2, blocks, kv_heads, block, head]: keys first, then values.

A block is shared between rows of the same adapter alone (`BlockTable`), so that a row's first block says which adapter
the row computes with: the batch's block tables, which graphs read in any case, are all that a forward needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional
from typing_extensions import override

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.tensors import device_integers

_REGISTER = 16
"""Numbers of float32 that a processor adds at a time, at most."""

StoreShape = tuple[int, int]
"""Blocks and KV heads of a store."""


@dataclass
class AttentionSegment:
    """R rows with Q query positions each, at tokens [start, start + R * Q) of the flattened batch, row by row.

    Attributes:
        start: first token of the segment.
        rows: R.
        queries: Q.
        block_tables: [R, context_blocks] int64 on the device; unused entries are 0, the null block. It covers every
            position that the segment reads or writes.
        positions: [R, Q] int64 on the device: where each token stands in its row. -1 is padding: it writes to the
            null block, and its output has no meaning.
    """

    start: int
    rows: int
    queries: int
    block_tables: torch.Tensor
    positions: torch.Tensor

    @property
    def stop(self) -> int:
        """One past the last token of the segment."""
        return self.start + self.rows * self.queries

    def write_index(self, store: StoreShape, block_size: int) -> torch.Tensor:
        """[R, Q, kv_heads] int64: where each token's keys go in [blocks * kv_heads * block, head]."""
        positions = self.positions.clamp(min=0)
        block = self.block_tables.gather(1, positions // block_size)
        block = torch.where(self.positions < 0, NULL_BLOCK, block)
        heads = torch.arange(store[1], device=positions.device)
        return (block.unsqueeze(-1) * store[1] + heads) * block_size + (positions % block_size).unsqueeze(-1)


@dataclass(frozen=True)
class Forks:
    """Which tokens of a forward attention meets more than once: nodes of draft trees, one for each path through them.

    Every path is a row of its own to attention, with its keys one behind the other, as if it were a chain; to all else
    of a model a node is one token.

    Attributes:
        nodes: [places] int64: the token of the flattened batch at each place of the segments.
        places: [tokens] int64: a place of each token.
    """

    nodes: torch.Tensor
    places: torch.Tensor


@dataclass
class AttentionBatch:
    """The segments of one forward, and the indices that all its layers share.

    Attributes:
        segments: in token order, covering the flattened batch without gaps; with forks they cover the places.
        block_size: tokens a block.
        forks: None where every token has one place, in order.
    """

    segments: Sequence[AttentionSegment]
    block_size: int
    forks: Forks | None = None
    _write: dict[StoreShape, torch.Tensor] = field(default_factory=dict)
    _groups: dict[int, list[ContextGroup]] = field(default_factory=dict)

    def write_index(self, store: StoreShape) -> torch.Tensor:
        """[2 * tokens * kv_heads] int64: where the tokens' keys, then their values, go in [2 * … * block, head]."""
        index = self._write.get(store)
        if index is None:
            parts = [segment.write_index(store, self.block_size).reshape(-1) for segment in self.segments]
            index = self._write[store] = with_values(torch.cat(parts), store, self.block_size)
        return index

    def with_tables(self, change: Callable[[torch.Tensor], torch.Tensor]) -> AttentionBatch:
        """A batch of the same tokens with other block tables."""
        segments = [replace(segment, block_tables=change(segment.block_tables)) for segment in self.segments]
        return AttentionBatch(segments, self.block_size, self.forks)

    def groups(self, number: int) -> Sequence[ContextGroup]:
        """The rows of segment `number`, gathered by how long their contexts are.

        One group where shapes must be known without reading the device. On the CPU, reading positions costs nothing,
        and rows with short contexts do not pay for one long row beside them.
        """
        groups = self._groups.get(number)
        if groups is None:
            segment = self.segments[number]
            if segment.positions.device.type == "cpu":
                groups = _group_by_context(segment, self.block_size)
            else:
                groups = [ContextGroup(None, segment.block_tables, segment.positions, self.block_size)]
            self._groups[number] = groups
        return groups


@dataclass
class ContextGroup:
    """Rows of one segment whose contexts are gathered with one width, and the indices that all layers share.

    Attributes:
        rows: [R] int64 indices into the segment's rows; None for all of them.
        block_tables: [R, context_blocks] int64.
        positions: [R, Q] int64.
        block_size: tokens a block.
    """

    rows: torch.Tensor | None
    block_tables: torch.Tensor
    positions: torch.Tensor
    block_size: int
    _gather: dict[StoreShape, torch.Tensor] = field(default_factory=dict)
    _mask: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def gather_index(self, store: StoreShape) -> torch.Tensor:
        """[2 * R * kv_heads * context_blocks] int64: tiles of the rows' keys, then values, in [2 * …, block, head]."""
        index = self._gather.get(store)
        if index is None:
            heads = torch.arange(store[1], device=self.block_tables.device)
            index = (self.block_tables.unsqueeze(1) * store[1] + heads.view(1, -1, 1)).reshape(-1)
            index = self._gather[store] = with_values(index, store, 1)
        return index

    def mask(self, window: int | None) -> torch.Tensor:
        """[R, 1, 1, Q, context] float32 to add to the scores: 0 where a query sees a key, -inf elsewhere.

        A query sees keys up to its own position, and with a sliding window only the last `window` of them, itself
        included. Padding sees key 0 alone, so that its softmax is finite.
        """
        mask = self._mask.get(window)
        if mask is None:
            positions = self.positions.clamp(min=0).unsqueeze(-1)
            keys = torch.arange(self.block_tables.shape[1] * self.block_size, device=positions.device)
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, device=positions.device).masked_fill_(hidden, float("-inf"))
            mask = self._mask[window] = mask.unsqueeze(1).unsqueeze(1)
        return mask


class StepBatch(AttentionBatch):
    """One query position of a batch that is run position by position: the draft's steps.

    All steps take their indices from one computation over all positions, made when the first of them asks.
    """

    def __init__(self, whole: AttentionBatch, step: int) -> None:
        """Take position `step` of the single segment of `whole`."""
        segment = whole.segments[0]
        positions = segment.positions[:, step : step + 1]
        super().__init__([AttentionSegment(0, segment.rows, 1, segment.block_tables, positions)], whole.block_size)
        self._whole, self._step = whole, step

    @override
    def write_index(self, store: StoreShape) -> torch.Tensor:
        segment = self._whole.segments[0]
        every = self._whole.write_index(store).view(2, segment.rows, segment.queries, store[1])
        return every[:, :, self._step].reshape(-1)

    @override
    def groups(self, number: int) -> Sequence[ContextGroup]:
        if number not in self._groups:
            self._groups[number] = [_StepGroup(group, self._step) for group in self._whole.groups(number)]
        return self._groups[number]


class _StepGroup(ContextGroup):
    """One query position of a group."""

    def __init__(self, whole: ContextGroup, step: int) -> None:
        super().__init__(whole.rows, whole.block_tables, whole.positions[:, step : step + 1], whole.block_size)
        self._whole, self._step = whole, step

    def gather_index(self, store: StoreShape) -> torch.Tensor:
        return self._whole.gather_index(store)

    def mask(self, window: int | None) -> torch.Tensor:
        return self._whole.mask(window)[:, :, :, self._step : self._step + 1]


def with_values(index: torch.Tensor, store: StoreShape, per_tile: int) -> torch.Tensor:
    """Indices of keys → the same for keys, then for values, which lie one half of the layer's store behind them."""
    return torch.cat((index, index + store[0] * store[1] * per_tile))


def _group_by_context(segment: AttentionSegment, block_size: int) -> list[ContextGroup]:
    """Groups of rows whose contexts round up to the same power of two of blocks."""
    blocks = (segment.positions.amax(dim=1).clamp(min=0) // block_size + 1).tolist()
    if len(blocks) == 1:
        return [ContextGroup(None, _cut(segment.block_tables, blocks[0], block_size), segment.positions, block_size)]
    members: dict[int, list[int]] = {}
    for row, count in enumerate(blocks):
        members.setdefault((count - 1).bit_length(), []).append(row)
    groups = []
    for rows in members.values():
        index = torch.tensor(rows)
        tables = _cut(segment.block_tables[index], max(blocks[row] for row in rows), block_size)
        groups.append(ContextGroup(index, tables, segment.positions[index], block_size))
    return groups


def _cut(tables: torch.Tensor, blocks: int, block_size: int) -> torch.Tensor:
    """The first columns of [R, columns] that hold `blocks` blocks, on a coarse grid of widths, of whole registers.

    oneDNN makes a kernel for every shape that it meets and never lets it go (half a megabyte and half a millisecond
    each, measured in bfloat16), so a growing context must not bring a new shape with every block. Four widths to a
    power of two waste an eighth on average; what they add is the null block, which the mask hides. Sums of softmax over
    a part of a register go another way, so that a query's bits would depend on the width.
    """
    whole = _REGISTER // math.gcd(_REGISTER, block_size)
    step = math.lcm(whole, 1 << max(0, (blocks - 1).bit_length() - 3))
    width = -(-blocks // step) * step
    missing = width - tables.shape[1]
    return functional.pad(tables, (0, missing)) if missing > 0 else tables[:, :width]


class BlockSlots:
    """The slot of each block of a store; 0 where there is none, as for the null block.

    Args:
        num_blocks: of the store.
        device: where the store lives.
    """

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self._slots = torch.zeros(num_blocks, dtype=torch.int64, device=device)

    def assign(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Give each of some blocks its slot."""
        if blocks:
            where, values = device_integers([list(blocks), list(slots)], self._slots.device)
            self._slots.index_copy_(0, where, values)

    def of_batch(self, batch: AttentionBatch) -> torch.Tensor:
        """[tokens] int64: the slot of each token of a forward. It reads nothing back, so that it becomes a graph."""
        parts = []
        for segment in batch.segments:
            of_rows = self._slots.index_select(0, segment.block_tables[:, 0])
            parts.append(of_rows.unsqueeze(1).expand(-1, segment.queries).reshape(-1))
        places = parts[0] if len(parts) == 1 else torch.cat(parts)
        return places if batch.forks is None else places.index_select(0, batch.forks.places)
