"""Attention as a model sees it, which implementation a device gets, and the one that runs on any device.

A backend writes new keys and values to the paged KV store and attends over it, for a flattened batch of rows in any
phase: trtrun.kernels.triton.attention.paged_attention on CUDA, trtrun.kernels.cpu.attention on the CPU, and
`GatherAttention` anywhere, in plain torch operations that gather each row's blocks first. Which token sees which one
stands in trtrun.kvcache.segments.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.cpu.attention import takes_blocks
from trtrun.kernels.cpu.fused import rotate
from trtrun.kernels.cpu.onednn_matmul import bucket_rows
from trtrun.kernels.torch.operations import GatheredAttention
from trtrun.kernels.torch.soft_cap import soft_cap
from trtrun.kvcache.formats import PLAIN, KVFormat
from trtrun.kvcache.segments import ContextGroup

_SCORE_ELEMENTS = 1024 * 1024
"""Most attention scores held at a time (float32): long prefill chunks are computed in tiles of queries. Four times as
many made prompts of 700 and 2000 tokens a third slower (measured): the tiles then leave the caches."""
_SMALL_PRODUCT = 16**3
"""Size up to which `torch.bmm` in half precision leaves oneDNN (see `_rows_to_add`)."""


class AttentionBackend(Protocol):
    """One way to write keys and values to the store and to attend over them.

    Attributes:
        tile: queries, heads of a KV head counted, that are computed at a time, where prompts are best handed in as rows
            of so many; None where each is best one row.
        reads_forks: whether it finds the tokens at the places of a batch with forks; else they are laid out for it.
        normalises_heads: whether calls may bring a norm by head; else queries and keys come normalised.
    """

    tile: int | None
    reads_forks: bool
    normalises_heads: bool

    def forward(self, call: AttentionCall) -> torch.Tensor:
        """Normalise and rotate queries and keys, store the new keys and values, where there are any, then attend.

        Returns:
            [places, heads, head] in the queries' dtype.
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


def attend(backend: AttentionBackend, call: AttentionCall) -> torch.Tensor:
    """`AttentionBackend.forward`, where tokens may stand at several places: draft trees take the kernels of chains.

    The angles are of places; all else is of tokens.
    """
    forks = call.batch.forks
    if forks is None:
        return backend.forward(call)
    if not backend.reads_forks:
        query_key, value = call.query_key.index_select(0, forks.nodes), call.value.index_select(0, forks.nodes)
        call = call._replace(query_key=query_key, value=value)
    return backend.forward(call).index_select(0, forks.places)


class GatherAttention:
    """Gathers each row's tiles into one contiguous context and multiplies, in plain torch operations on any device; in
    float32 on the CPU by trtrun's own kernel where it runs.

    In bfloat16 on the CPU, and by the kernel, its result for a query is bit-equal whatever the number of queries, of
    rows and of masked keys behind it, which `F.scaled_dot_product_attention` does not offer; lossless greedy decoding
    rests on that.
    """

    tile: int | None = None
    reads_forks = False
    normalises_heads = False

    def __init__(self, kv_format: KVFormat = PLAIN) -> None:
        """Read and write a store of this format."""
        self._format = kv_format
        self._kernels: dict[tuple[str, torch.dtype, int], GatheredAttention | None] = {}

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        for part in self._format.parts(store):
            operations_of(store.device.type).copy_tokens(part, source, target, offset)

    def forward(self, call: AttentionCall) -> torch.Tensor:
        kv_heads, head_dim = call.store_layer.shape[2], call.query_key.shape[-1]
        query, fresh = rotate(call.query_key, *call.angles), None
        if call.writes:
            query, key = query[:, :-kv_heads], query[:, -kv_heads:]
            fresh = torch.cat((key.reshape(-1, head_dim), call.value.reshape(-1, head_dim)))
        return self.store_and_attend(query, fresh, call)

    def store_and_attend(self, query: torch.Tensor, fresh: torch.Tensor | None, call: AttentionCall) -> torch.Tensor:
        """Store what is new, then attend.

        Args:
            query: [places, heads, head], rotated.
            fresh: [n, head]: keys of all places and KV heads, rotated, then as many values; where the store has one
                part, keys alone, which stand for values, too; None where nothing is stored.
            call: of which the store, the batch, and what scores become and meet count.

        Returns:
            [places, heads, head].
        """
        batch, head_dim = call.batch, query.shape[-1]
        num_blocks, kv_heads = call.store_layer.shape[1:3]
        if fresh is not None:
            write = batch.write_index((num_blocks, kv_heads))[: len(fresh)]  # that of keys comes first
            self._format.write(call.store_layer, write, fresh, call.kv_scales)
        outputs = []
        for number, segment in enumerate(batch.segments):
            queries = query[segment.start : segment.stop].view(segment.rows, segment.queries, -1, head_dim)
            groups = batch.groups(number)
            if groups[0].rows is None or len(groups) == 1:
                outputs.append(self._attend(queries, groups[0], call))
                continue
            output = torch.empty_like(queries)
            for group in groups:
                assert group.rows is not None
                output[group.rows] = self._attend(queries[group.rows], group, call)
            outputs.append(output)
        flat = [output.reshape(-1, query.shape[1], head_dim) for output in outputs]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def _attend(self, query: torch.Tensor, group: ContextGroup, call: AttentionCall) -> torch.Tensor:
        """Attend for some rows: query [R, Q, heads, head], rotated → the same shape."""
        rows, queries, heads, head_dim = query.shape
        parts, num_blocks, kv_heads = call.store_layer.shape[:3]
        index = group.gather_index((num_blocks, kv_heads))
        index = index[: len(index) * parts // 2]
        context = self._format.read(call.store_layer, index, head_dim, query.dtype, call.kv_scales)
        context = context.view(parts, rows, kv_heads, -1, head_dim).expand(2, -1, -1, -1, -1)
        own = self._own(query)
        if own is not None:
            return own(query, context, group.positions, call)
        keys, values = context.flatten(1, 2).unbind()
        mask = group.mask(call.window)
        grouped = query.view(rows, queries, kv_heads, heads // kv_heads, head_dim).permute(0, 2, 3, 1, 4)
        tile = max(16, _SCORE_ELEMENTS // (rows * heads * keys.shape[1]))
        tiles = [
            self._attend_tile(grouped[:, :, :, at : at + tile], keys, values, mask[:, :, :, at : at + tile], call)
            for at in range(0, queries, tile)
        ]
        output = tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=3)
        return output.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, head_dim)

    def _own(self, query: torch.Tensor) -> GatheredAttention | None:
        """The device's kernel for such queries, if there is one."""
        kind = (query.device.type, query.dtype, query.shape[-1])
        if kind not in self._kernels:
            device_type, dtype, head_dim = kind
            self._kernels[kind] = operations_of(device_type).attention_over_gathered(dtype, head_dim)
        return self._kernels[kind]

    @staticmethod
    def _attend_tile(
        grouped: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """grouped [R, kv_heads, group, q, head] → the same shape; mask [R, 1, 1, q, context] float32."""
        rows, kv_heads, group, queries, head_dim = grouped.shape
        count = group * queries
        folded = grouped.reshape(rows * kv_heads, count, head_dim)
        missing = _rows_to_add(folded, keys)
        if missing:
            folded = functional.pad(folded, (0, 0, 0, missing))
        scores = torch.bmm(folded, keys.transpose(1, 2))[:, :count].view(rows, kv_heads, group, queries, -1)
        if call.soft_cap is None:
            scores = torch.add(mask, scores, alpha=call.scale)  # float32, as the mask is
        else:
            scores = soft_cap(scores, call.soft_cap, call.scale).add_(mask)
        weights = weigh(scores, call.sinks).to(values.dtype).reshape(rows * kv_heads, count, -1)
        if missing:
            weights = functional.pad(weights, (0, 0, 0, missing))
        return torch.bmm(weights, values)[:, :count].reshape(rows, kv_heads, group, queries, head_dim)


def weigh(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The softmax of scores [R, kv_heads, group, q, context], with the sinks of heads in front of them where there are
    some: so each score stands at the same place of its sum, however many there are."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    of_heads = sinks.view(scores.shape[1], scores.shape[2], 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((of_heads, scores), dim=-1), dim=-1)[..., 1:]


def _rows_to_add(folded: torch.Tensor, keys: torch.Tensor) -> int:
    """Rows of zeros that keep a product of half precision on the CPU on one kernel, and on few shapes.

    Up to batch * rows * inner * columns = 16³, `torch.bmm` leaves oneDNN for a loop that rounds differently, so that a
    query alone would differ from the same query in company.
    """
    if folded.device.type != "cpu" or folded.dtype is torch.float32:
        return 0
    batch, count, inner = folded.shape
    return bucket_rows(max(count, _SMALL_PRODUCT // (batch * inner * keys.shape[1]) + 1)) - count


class HostAttention:
    """Attention on the CPU: trtrun's own kernel where it takes the head and the block size, else gathered contexts."""

    tile: int | None = None
    reads_forks = False
    normalises_heads = False

    def __init__(self, dtype: torch.dtype, head_dim: int) -> None:
        """Choose a backend for a model of `dtype` with heads of `head_dim` numbers."""
        self._gather = GatherAttention()
        self._native: AttentionBackend | None = operations_of("cpu").attention(dtype, head_dim)

    def forward(self, call: AttentionCall) -> torch.Tensor:
        """Attend by the kernel of the store: kernels lay its tiles out differently, so it must always meet the same."""
        return self._choose(call.store_layer.shape[3]).forward(call)

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
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
