"""The key and value tensors of one engine rank, in blocks; of layers with a sliding window, in fewer places, which
blocks have while a row sees them (window_places.py).

It does not know which row owns a block, which blocks are free (blocks.py), or how attention reads them
(trtrun.attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.kvcache.segments import AttentionBatch, BlockSlots
from trtrun.kvcache.window_places import WindowPlaces, WindowSpace

_LINE_BYTES = 64


class KVStore:
    """Keys and values of all layers: one tensor [layers, 2, blocks, kv_heads, block, head], where the last dimension is
    what the format makes of a head; and where layers with a window have places, another one of these layers.

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
        window_space: WindowSpace | None = None,
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
            window_space: of layers with a window; None where these are as the others.
            num_row_blocks: see WindowPlaces.
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

        windowed = (False,) * num_layers if window_space is None else window_space.layers
        self._windowed = windowed
        self.data = zeros(windowed.count(False), num_blocks)
        self._windows: WindowPlaces | None = None
        layers = [iter(self.data.unbind()), iter(())]
        self._in_places = self.data[:0]
        if window_space is not None:
            self._windows = WindowPlaces(window_space, num_blocks, num_row_blocks or num_blocks, device)
            self._in_places = zeros(windowed.count(True), self._windows.num_places)
            layers[1] = iter(self._in_places.unbind())
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
        self._in_places[:, :, :num_blocks].zero_()

    def announce(self, updates: np.ndarray) -> None:
        """Take in the places that a plan gives to blocks, before anything is written there: see
        `WindowPlaces.announce`."""
        if self._windows is not None:
            self._windows.announce(updates)

    def batches(self, batch: AttentionBatch) -> Sequence[AttentionBatch]:
        """The batch that each layer attends with: with the tables of its blocks, or of their places."""
        if self._windows is None:
            return (batch,) * len(self._windowed)
        in_places = batch.with_tables(self._windows.places)
        return [in_places if is_windowed else batch for is_windowed in self._windowed]

    def slots_of(self, batch: AttentionBatch) -> torch.Tensor:
        """[tokens] int64: the adapter's slot of each token of a batch, where blocks may be made with adapters."""
        assert self.slots is not None
        return self.slots.of_batch(batch)

    def parts(self, *blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors that hold keys and values, each with the places in it of `blocks` [n] int64."""
        if self.data.numel():
            yield self.data, *blocks
        if self._windows is not None:
            yield self._in_places, *(self._windows.places(one) for one in blocks)

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
        return sum(data.numel() * data.element_size() for data in (self.data, self._in_places))

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
