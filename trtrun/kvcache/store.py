"""The key and value tensors of one engine rank, in blocks; for layers with a sliding window, in rings of blocks.

A ring is as long as the window and what a round may write beside it. Block c of a row lies at place c modulo the ring's
length, over what fell out of the window: so nothing is ever given back, and what a layer needs does not grow with the
text. Which place a block has follows from the row and the index that it was announced for; block tables stay what they
are, and are translated for these layers. A prefix cannot be found again, as another row writes elsewhere.

It does not know which row owns a block, which blocks are free (blocks.py), or how attention reads them
(trtrun.attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.kvcache.segments import AttentionBatch, BlockSlots


@dataclass(frozen=True)
class RingSpace:
    """The rings of one engine.

    Attributes:
        layers: of each layer of the model, whether it has a window.
        max_rows: rows that have a ring.
        blocks_per_row: blocks of a ring.
    """

    layers: tuple[bool, ...]
    max_rows: int
    blocks_per_row: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all rings, a null block before them."""
        return 1 + self.max_rows * self.blocks_per_row


class Rings:
    """Which place in the rings each block of a store has.

    Args:
        space: of the engine.
        num_blocks: blocks of the store, those of rows first.
        num_row_blocks: of these those of rows, the null block among them; each of the others has a place of its own
            behind the rings.
        device: where tables are.
    """

    def __init__(self, space: RingSpace, num_blocks: int, num_row_blocks: int, device: torch.device) -> None:
        self.space = space
        self.num_places = space.num_blocks + num_blocks - num_row_blocks
        self._places = torch.full((num_blocks,), NULL_BLOCK, dtype=torch.int64, device=device)
        self._places[num_row_blocks:] = torch.arange(space.num_blocks, self.num_places, device=device)

    def announce(self, updates: np.ndarray) -> None:
        """Take in blocks that rows get: [n, 3] whole numbers, row, index in its table, and block."""
        if not len(updates):
            return
        row, index, block = updates.astype(np.int64).T
        place = 1 + row * self.space.blocks_per_row + index % self.space.blocks_per_row
        moved = torch.from_numpy(np.stack((block, place))).to(self._places.device, non_blocking=True)
        self._places.index_copy_(0, moved[0], moved[1])

    def places(self, blocks: torch.Tensor) -> torch.Tensor:
        """Places of blocks, int64 of any shape on the device, such as tables."""
        return self._places.index_select(0, blocks.reshape(-1)).view(blocks.shape)


_LINE_BYTES = 64


class KVStore:
    """Keys and values of all layers: one tensor [layers, 2, blocks, kv_heads, block, head], where the last dimension is
    what the format makes of a head; and where layers with a window have rings, another one of these layers.

    A [block, head] tile of one head is contiguous, so attention gathers a row's context with one index_select of whole
    tiles. How tokens lie inside a tile is the attention backend's business. The tensor is made of zeros, never of
    uninitialised memory: masked positions are multiplied by a probability of 0, which must not meet a NaN. On the CPU
    the pages are committed when they are first written.

    Attributes:
        slots: with which adapter each block is made; None where there are no adapters.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat = PLAIN,
        ring_space: RingSpace | None = None,
        num_row_blocks: int | None = None,
        *,
        has_adapters: bool = False,
    ) -> None:
        """Allocate `num_blocks` blocks, the null block included.

        Args:
            num_layers: layers of the model.
            num_blocks: blocks in all; block 0 is the null block.
            kv_heads: KV heads that this rank holds.
            block_size: tokens a block.
            head_dim: numbers a head.
            dtype: of the model's keys and values.
            device: where the store lives.
            kv_format: how they are kept.
            ring_space: of layers with a window; None where these are as the others.
            num_row_blocks: see Rings.
            has_adapters: whether blocks may be made with adapters.
        """
        self.num_blocks = num_blocks
        self.kv_heads = kv_heads
        self.block_size = block_size
        self.head_dim = head_dim
        width, stored_dtype = kv_format.stored(head_dim, dtype)

        def zeros(layers: int, blocks: int) -> torch.Tensor:
            shape = (layers, 2, blocks, kv_heads, block_size, width)
            return _zeros(shape, stored_dtype, device)

        windowed = (False,) * num_layers if ring_space is None else ring_space.layers
        self._windowed = windowed
        self.data = zeros(windowed.count(False), num_blocks)
        self._rings: Rings | None = None
        layers = [iter(self.data.unbind()), iter(())]
        self._in_rings = self.data[:0]
        if ring_space is not None:
            self._rings = Rings(ring_space, num_blocks, num_row_blocks or num_blocks, device)
            self._in_rings = zeros(windowed.count(True), self._rings.num_places)
            layers[1] = iter(self._in_rings.unbind())
        self.slots = BlockSlots(num_blocks, device) if has_adapters else None
        self._layers = [next(layers[is_windowed]) for is_windowed in windowed]

    @staticmethod
    def bytes_per_block(
        num_layers: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_format: KVFormat = PLAIN,
    ) -> int:
        """Bytes of one block over all layers, keys and values."""
        width, stored_dtype = kv_format.stored(head_dim, dtype)
        return num_layers * 2 * kv_heads * block_size * width * stored_dtype.itemsize

    def commit(self, num_blocks: int) -> None:
        """Have the system back the first `num_blocks` blocks with memory now rather than at their first write.

        Blocks are handed out from the first on, and a first write may wait for a huge page to be cleared: 5 ms were
        measured on a virtual machine, five times in a request of 340 ms. Zeroes the blocks; call it before use.
        """
        self.data[:, :, :num_blocks].zero_()

    def announce(self, updates: np.ndarray) -> None:
        """Take in the blocks that a plan gives to rows, before anything is written there; see `Rings.announce`."""
        if self._rings is not None:
            self._rings.announce(updates)

    def batches(self, batch: AttentionBatch) -> Sequence[AttentionBatch]:
        """The batch that each layer attends with: with the tables of its blocks, or of their places in rings."""
        if self._rings is None:
            return (batch,) * len(self._windowed)
        in_rings = batch.with_tables(self._rings.places)
        return [in_rings if is_windowed else batch for is_windowed in self._windowed]

    def slots_of(self, batch: AttentionBatch) -> torch.Tensor:
        """[tokens] int64: the adapter's slot of each token of a batch, where blocks may be made with adapters."""
        assert self.slots is not None
        return self.slots.of_batch(batch)

    def parts(self, *blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors that hold keys and values, each with the places in it of `blocks` [n] int64."""
        if self.data.numel():
            yield self.data, *blocks
        if self._rings is not None:
            yield self._in_rings, *(self._rings.places(one) for one in blocks)

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks, and the null block with them.

        What attention does not see is multiplied by 0, so that it must be finite; a row whose numbers overflowed leaves
        infinities and NaN behind.
        """
        for data, places in self.parts(torch.tensor([NULL_BLOCK, *blocks], device=self.data.device)):
            data.index_fill_(2, places, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store."""
        return sum(data.numel() * data.element_size() for data in (self.data, self._in_rings))

    def layer(self, index: int) -> torch.Tensor:
        """Keys, then values of one layer: a view [2, blocks, kv_heads, block, head]."""
        return self._layers[index]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return _lazy_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=device)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory whose pages are committed when they are first written.

    `torch.zeros` writes every byte; numpy asks the kernel for zero pages. A store sized for the longest possible batch
    then costs what is used of it. It starts at a cache line, so that no tile is read across two.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _LINE_BYTES, dtype=np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
