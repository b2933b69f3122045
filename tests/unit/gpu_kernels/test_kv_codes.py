"""Keys and values of 8 bits by kernels: on a GPU where there is one, else in Triton's interpreter, which has no
bfloat16. Against torch's operations, and against the same kernels over what the codes stand for."""

from __future__ import annotations

import pytest
import torch
from paged import straight

from trtrun.attention.gather import GatherAttention
from trtrun.kvcache.byte_codes import as_scales
from trtrun.kvcache.formats import PLAIN, ByteKV
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.store import KVStore

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if HAS_GPU else [torch.float16, torch.float32]
FORMATS = pytest.mark.parametrize(
    "kv_format", [ByteKV("fp8"), ByteKV("int8"), ByteKV("fp8", True), ByteKV("int8", True)], ids=str
)
SHAPES = [(4, 2, 24, 16, 2, 3, 20), (2, 1, 64, 5, 2, 2, 60)]
"""Heads, KV heads, numbers of a head, tokens of a block, rows, queries, blocks."""
if HAS_GPU:
    SHAPES += [
        (32, 8, 128, 16, 3, 1, 70),
        (32, 8, 128, 16, 2, 6, 300),
        (16, 8, 64, 8, 5, 6, 40),
        (64, 8, 128, 32, 1, 700, 40),
        (6, 2, 96, 16, 1, 300, 30),
        (8, 8, 80, 16, 2, 9, 33),
    ]


def of_layer(kv_format: ByteKV, kv_heads: int) -> torch.Tensor | None:
    """[2, kv_heads]; None where scales are the tokens'."""
    if not kv_format.has_layer_scales:
        return None
    return as_scales(2.0 + torch.arange(2 * kv_heads, device=DEVICE).view(2, kv_heads), kv_format.kind)


@FORMATS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    shape: tuple[int, ...], window: int | None, dtype: torch.dtype, kv_format: ByteKV
) -> None:
    """To the bit, in rounds and prompts, with padding; and what is written has the bits of torch's operations."""
    from trtrun.kernels.triton.paged_attention import PagedAttention

    heads, kv_heads, head_dim, block_size, rows, queries, blocks = shape
    torch.manual_seed(queries)
    count, scales = rows * blocks + 1, of_layer(kv_format, kv_heads)
    made = [KVStore(1, count, kv_heads, block_size, head_dim, dtype, DEVICE, kv_format).layer(0) for _ in range(2)]
    numbers = torch.randn(made[0][..., 0].numel(), head_dim, device=DEVICE).to(dtype) * 3
    places = torch.arange(len(numbers), device=DEVICE)
    for store in made:
        kv_format.write(store, places, numbers, scales)
    tables = (torch.randperm(count - 1, device=DEVICE) + 1).view(rows, blocks)
    first = torch.randint(0, blocks * block_size - queries, (rows, 1), device=DEVICE)
    first[0] = blocks * block_size - queries
    positions = first + torch.arange(queries, device=DEVICE)
    positions[-1, queries // 2 + 1 :] = -1
    fused = torch.randn(rows * queries, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    fused[0, heads:] = 0
    query_key, value = fused.split([heads + kv_heads, kv_heads], dim=1)
    batch = AttentionBatch([AttentionSegment(0, rows, queries, tables, positions)], block_size)
    arguments = query_key, value, straight(value)

    found = PagedAttention(kv_format).forward(*arguments, made[0], batch, 0.2, window, scales)
    expected = GatherAttention(kv_format).forward(*arguments, made[1], batch, 0.2, window, scales)
    assert torch.equal(made[0][:, 1:], made[1][:, 1:])  # the null block may hold anything
    real = positions.flatten() >= 0
    assert found.isfinite().all()
    difference = (found - expected)[real].double().norm() / expected[real].double().norm()
    assert difference < (1e-2 if dtype is torch.bfloat16 else 2e-3)

    tiles = torch.arange(2 * count * kv_heads, device=DEVICE)
    plain = kv_format.read(made[0], tiles, head_dim, dtype, scales).view(2, count, kv_heads, block_size, head_dim)
    # A store has the numbers of the last forward already: its keys and values go to the null block this time.
    again = AttentionBatch([AttentionSegment(0, rows, queries, tables, positions)], block_size)
    lost = torch.zeros_like(plain)
    lost.copy_(plain)
    queries_alone = query_key.clone()
    of_store = PagedAttention(PLAIN)
    segment = again.segments[0]
    result = torch.empty_like(found)
    of_store._attend(queries_alone[:, :heads].contiguous(), lost, segment, 0.2, window, result, kept_plain(lost))
    assert torch.equal(result[real], found[real])


def kept_plain(store_layer: torch.Tensor) -> object:
    from trtrun.kernels.triton.kv_codes import KeptNumbers

    return KeptNumbers.of(PLAIN, store_layer, None)
