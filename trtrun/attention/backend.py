"""What attention is to a model, and which implementation a device gets.

A backend writes new keys and values to the paged KV store and attends over it, for a flattened batch of rows in any
phase: trtrun.kernels.triton.attention.paged_attention on CUDA, trtrun.kernels.cpu.attention on the CPU, gather.py
anywhere. This module knows device, dtype and the size of heads. It does not know which token sees what
(trtrun.kvcache.segments).
"""

from __future__ import annotations

from typing import Protocol

import torch

from trtrun.attention.gather import GatherAttention
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.cpu.attention import takes_blocks
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.kvcache.segments import AttentionBatch


class AttentionBackend(Protocol):
    """One way to write keys and values to the store and to attend over them.

    Attributes:
        tile: queries, heads of a KV head counted, that are computed at a time, where prompts are best handed in as rows
            of so many; None where each is best one row.
        reads_forks: whether it finds the tokens at the places of a batch with forks; else they are laid out for it.
    """

    tile: int | None
    reads_forks: bool

    def forward(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        store_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate queries and keys, store the new keys and values, then attend.

        Args:
            query_key: [tokens, heads + kv_heads, head]: the queries, then the keys; of a batch with forks those of its
                tokens where `reads_forks`, else of its places.
            value: [tokens, kv_heads, head], alike.
            angles: cosines and signed sines, [places, 1, head] each; see RotaryEmbedding.
            store_layer: keys, then values of this layer, [2, blocks, kv_heads, block, head] as the format has it.
            batch: the forward's segments.
            scale: factor of the scores.
            window: sliding window in tokens, None for full attention.
            kv_scales: of the layer's keys and values by head, [2, kv_heads] float32 (numbers of bfloat16), where the
                store's format has scales of layers.

        Returns:
            [places, heads, head] in query_key's dtype.
        """
        ...

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Copy all layers' keys and values of single tokens.

        Args:
            store: of all layers, [layers, 2, blocks, kv_heads, block, head].
            source: [n] int64 blocks.
            target: [n] int64 blocks, each with its offset at most once.
            offset: [n] int64: places in a block, the same in both.
        """
        ...


def attend(
    backend: AttentionBackend,
    query_key: torch.Tensor,
    value: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    store_layer: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    window: int | None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """`AttentionBackend.forward`, where tokens may stand at several places: draft trees take the kernels of chains.

    The angles are of places; all else is of tokens, as there.
    """
    forks = batch.forks
    if forks is None:
        return backend.forward(query_key, value, angles, store_layer, batch, scale, window, kv_scales)
    if not backend.reads_forks:
        query_key, value = query_key.index_select(0, forks.nodes), value.index_select(0, forks.nodes)
    attended = backend.forward(query_key, value, angles, store_layer, batch, scale, window, kv_scales)
    return attended.index_select(0, forks.places)


class HostAttention:
    """Attention on the CPU: trtrun's own kernel where it takes the head and the block size, else gathered contexts."""

    tile: int | None = None
    reads_forks = False

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        """For a model of `dtype` with heads of `head_dim` numbers."""
        self._gather = GatherAttention()
        self._native: AttentionBackend | None = operations_of("cpu").attention(dtype, head_dim)

    def forward(
        self,
        query_key: torch.Tensor,
        value: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        store_layer: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend. One store must always meet the same kernel: they lay its tiles out differently."""
        backend = self._choose(store_layer.shape[3])
        return backend.forward(query_key, value, angles, store_layer, batch, scale, window)

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """See AttentionBackend."""
        self._choose(store.shape[4]).copy_tokens(store, source, target, offset)

    def _choose(self, block_size: int) -> AttentionBackend:
        return self._gather if self._native is None or not takes_blocks(block_size) else self._native


def attention_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, kv_format: KVFormat = PLAIN
) -> AttentionBackend:
    """The backend for a model: kernels that read the store in place where they work and know its format, else gathered
    contexts."""
    if device.type not in kv_format.kernels:
        return GatherAttention(kv_format)
    if device.type == "cpu":
        return HostAttention(dtype, head_dim)
    return operations_of(device.type).attention(dtype, head_dim, kv_format) or GatherAttention(kv_format)
