"""What the layers of one engine rank keep, as their plans say: keys and values in blocks, or latents in their place, of
layers with a sliding window in fewer places, which blocks have while a row sees them (window_places.py); and states of
rows (row_states.py).

It does not know which row owns a block, which blocks are free (blocks.py), or how attention reads them
(trtrun.attention).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from trtrun.kvcache.blocks import NULL_BLOCK
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.kvcache.row_states import LayerStates, RowStates, SegmentStates, StateSpace
from trtrun.kvcache.segments import AttentionBatch, BlockSlots
from trtrun.kvcache.specs import LayerSpecs, Paged, paged_of, shared_of, state_of
from trtrun.kvcache.state_numbers import StateOperations
from trtrun.kvcache.window_places import WindowPlaces, WindowSpace

_LINE_BYTES = 64


class LayerCache(NamedTuple):
    """What one layer keeps, for the tokens of one forward.

    Attributes:
        batch: the segments, with the tables of this layer's blocks.
        keys_and_values: [2, blocks, kv_heads, block, head] as the format has it, or [1, blocks, 1, block, width] of
            latents; no numbers where the layer keeps none.
        states: of the layer; None where it keeps none.
        segment_states: where the states of the segments' rows stand; None where no layer keeps any.
    """

    batch: AttentionBatch
    keys_and_values: torch.Tensor
    states: LayerStates | None = None
    segment_states: Sequence[SegmentStates] | None = None


class KVStore:
    """Keys and values of all layers that keep any: for layers of one shape one tensor [layers, 2, blocks, kv_heads,
    block, head], where the last dimension is what the format makes of a head, of latents [layers, 1, blocks, 1, block,
    width]; and where layers with a window have places, another one of these layers. Beside them the states of rows,
    where layers keep such.

    A [block, head] tile of one head is contiguous, so attention gathers a row's context with one index_select of whole
    tiles. How tokens lie inside a tile is the attention backend's business. The tensor is made of zeros, never of
    uninitialised memory: masked positions are multiplied by a probability of 0, which must not meet a NaN. On the CPU
    the pages are committed when they are first written.

    Attributes:
        head_dims: size of the heads of each of `parts`.
        slots: with which adapter each block is made; None where there are no adapters.
        states: of rows; None where no layer keeps any.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpecs],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_format: KVFormat = PLAIN,
        window_space: WindowSpace | None = None,
        num_row_blocks: int | None = None,
        *,
        state_space: StateSpace | None = None,
        state_operations: StateOperations | None = None,
        has_adapters: bool = False,
    ) -> None:
        """Allocate `num_blocks` blocks, the null block included.

        Args:
            layers: of each layer of the model what it keeps.
            num_blocks: blocks in all; block 0 is the null block.
            block_size: tokens a block.
            dtype: of the model's keys and values.
            device: where the store lives.
            kv_format: how they are kept.
            window_space: of layers with a window; None where these are as the others.
            num_row_blocks: see WindowPlaces.
            state_space: of rows with states; needed where a layer keeps any.
            state_operations: of the device; torch's where that is None.
            has_adapters: whether blocks may be made with adapters.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        windowed = (False,) * len(layers) if window_space is None else window_space.layers
        self._windowed = [*windowed]
        self._windows: WindowPlaces | None = None
        if window_space is not None:
            self._windows = WindowPlaces(window_space, num_blocks, num_row_blocks or num_blocks, device)
        self._data: list[tuple[torch.Tensor, bool]] = []
        self._layers = [torch.zeros(0, device=device)] * len(layers)
        alike: dict[tuple[Paged, bool], list[int]] = {}
        for index, specs in enumerate(layers):
            if (paged := paged_of(specs)) is not None:
                alike.setdefault((replace(paged, window=None), windowed[index]), []).append(index)
        for (paged, in_places), members in alike.items():
            blocks = self._windows.num_places if self._windows is not None and in_places else num_blocks
            width, stored_dtype = kv_format.stored(paged.head_dim, dtype)
            shape = (len(members), paged.num_parts, blocks, paged.kv_heads, block_size, width)
            data = _zeros(shape, stored_dtype, device)
            self._data.append((data, in_places))
            for index, layer in zip(members, data.unbind(), strict=True):
                self._layers[index] = layer
        self.head_dims = [paged.head_dim for paged, _ in alike]
        for index, specs in enumerate(layers):
            if (shared := shared_of(specs)) is not None:
                self._layers[index], self._windowed[index] = self._layers[shared.layer], windowed[shared.layer]
        self.slots = BlockSlots(num_blocks, device) if has_adapters else None
        states = {index: spec for index, specs in enumerate(layers) if (spec := state_of(specs)) is not None}
        self.states: RowStates | None = None
        if states:
            assert state_space is not None, "layers keep states"
            self.states = RowStates(states, state_space, num_blocks, device, state_operations)
        of_layers = self.states.layers if self.states is not None else {}
        self._states = [of_layers.get(index) for index in range(len(layers))]

    @staticmethod
    def bytes_per_block(
        layers: Sequence[LayerSpecs], block_size: int, dtype: torch.dtype, kv_format: KVFormat = PLAIN
    ) -> int:
        """Bytes of one block over all layers."""
        found = 0
        for specs in layers:
            if (paged := paged_of(specs)) is not None:
                width, stored_dtype = kv_format.stored(paged.head_dim, dtype)
                found += paged.num_parts * paged.kv_heads * block_size * width * stored_dtype.itemsize
        return found

    def commit(self, num_blocks: int) -> None:
        """Have the system back the first `num_blocks` blocks with memory now rather than at their first write.

        Blocks are handed out from the first on, and a first write may wait for a huge page to be cleared: 5 ms were
        measured on a virtual machine, five times in a request of 340 ms. Zeroes the blocks; call it before use.
        """
        for data, _ in self._data:
            data[:, :, :num_blocks].zero_()

    def announce(self, updates: np.ndarray) -> None:
        """Take in the places that a plan gives to blocks, before anything is written there: see
        `WindowPlaces.announce`."""
        if self._windows is not None:
            self._windows.announce(updates)

    def of_layers(self, batch: AttentionBatch) -> Sequence[LayerCache]:
        """What each layer keeps, for a forward that begins: with the tables of its blocks, or of their places."""
        in_places = batch if self._windows is None else batch.with_tables(self._windows.places)
        states = None if self.states is None else self.states.of_batch(batch)
        return [
            LayerCache(in_places if is_windowed else batch, data, of_layer, states)
            for is_windowed, data, of_layer in zip(self._windowed, self._layers, self._states, strict=True)
        ]

    def slots_of(self, batch: AttentionBatch) -> torch.Tensor:
        """[tokens] int64: the adapter's slot of each token of a batch, where blocks may be made with adapters."""
        assert self.slots is not None
        return self.slots.of_batch(batch)

    def parts(self, *blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        """The tensors that hold keys and values, each with the places in it of `blocks` [n] int64."""
        for data, in_places in self._data:
            places = blocks
            if self._windows is not None and in_places:
                places = tuple(self._windows.places(one) for one in blocks)
            yield data, *places

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks, and the null block with them.

        What attention does not see is multiplied by 0, so that it must be finite; a row whose numbers overflowed leaves
        infinities and NaN behind.
        """
        cleared = torch.tensor([NULL_BLOCK, *blocks], device=self.device)
        for data, places in self.parts(cleared):
            data.index_fill_(2, places, 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole store."""
        paged = sum(data.numel() * data.element_size() for data, _ in self._data)
        return paged + (0 if self.states is None else self.states.num_bytes)

    def layer(self, index: int) -> torch.Tensor:
        """Keys, then values of one layer, or its latents: a view as `LayerCache` has it."""
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
