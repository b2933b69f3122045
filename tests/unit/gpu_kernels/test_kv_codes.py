"""Keys and values of 8 bits by kernels: on a GPU where there is one, else in Triton's interpreter, which has no
bfloat16. Against torch's operations over what the codes stand for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from paged import straight

from trtrun.attention.backend import GatherAttention
from trtrun.kernels.arguments import AttentionCall
from trtrun.kvcache.byte_codes import as_scales
from trtrun.kvcache.formats import ByteKV
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import like_layers
from trtrun.kvcache.store import KVStore

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
FORMATS = [ByteKV("fp8"), ByteKV("int8"), ByteKV("fp8", True), ByteKV("int8", True)]
SHAPES = [
    (4, 2, 24, 16, 2, 3, 20),
    (2, 1, 10, 5, 2, 2, 60),
    (32, 8, 128, 16, 3, 1, 70),
    (32, 8, 128, 16, 2, 6, 300),
    (16, 8, 64, 8, 5, 6, 40),
    (64, 8, 128, 32, 1, 700, 40),
    (6, 2, 96, 16, 1, 300, 30),
    (8, 8, 80, 16, 2, 9, 33),
    (6, 2, 10, 16, 2, 9, 33),
]
"""Heads, KV heads, numbers of a head, tokens of a block, rows, queries, blocks."""
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SOME = [(SHAPES[0], 100, torch.float16), (SHAPES[1], None, torch.float32)]
"""For the interpreter, which takes seconds for what a GPU takes milliseconds for."""
CASES: list[tuple[Any, ...]] = (
    [(*case, kv_format) for case in product(SHAPES, [None, 100], DTYPES) for kv_format in FORMATS]
    if HAS_GPU
    else [(*SOME[place % 2], kv_format) for place, kv_format in enumerate(FORMATS, start=1)] + [(*SOME[0], FORMATS[0])]
)
DEALT: list[tuple[Any, ...]] = (
    list(product([(32, 8, 128, 16, 2, 11, 70), (6, 2, 64, 16, 2, 11, 70)], DTYPES[:2], FORMATS))
    if HAS_GPU
    else [((4, 2, 24, 16, 2, 9, 70), torch.float16, kv_format) for kv_format in FORMATS[1:3]]
)


def filled(kv_format: ByteKV, shape: tuple[int, ...], count: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Scales of a layer, where it has them, and a layer of `count` blocks with random keys and values."""
    kv_heads, head_dim, block_size = shape[1:4]
    scales = None
    if kv_format.has_layer_scales:
        scales = as_scales(4.0 + torch.arange(2 * kv_heads, device=DEVICE).view(2, kv_heads), kv_format.kind)
    layer = KVStore(like_layers(1, kv_heads, head_dim), count, block_size, dtype, DEVICE, kv_format).layer(0)
    numbers = torch.randn(2 * count * kv_heads * block_size, head_dim, device=DEVICE).to(dtype) * 3
    kv_format.write(layer, torch.arange(len(numbers), device=DEVICE), numbers, scales)
    return scales, layer


@pytest.mark.parametrize(
    ("shape", "window", "dtype", "kv_format", "soft_cap", "has_sinks"),
    [
        *((*case, None, False) for case in CASES),
        *((*case, 0.7, False) for case in CASES[:1]),
        *((*case, None, True) for case in CASES[:2]),
    ],
    ids=str,
)
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    shape: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    kv_format: ByteKV,
    soft_cap: float | None,
    has_sinks: bool,
) -> None:
    """In rounds and prompts, with padding; and what is written has the bits of torch's operations."""
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    heads, kv_heads, head_dim, block_size, rows, queries, blocks = shape
    torch.manual_seed(queries)
    count = rows * blocks + 1
    scales, layer = filled(kv_format, shape, count, dtype)
    tables = (torch.randperm(count - 1, device=DEVICE) + 1).view(rows, blocks)
    first = torch.randint(0, blocks * block_size - queries, (rows, 1), device=DEVICE)
    first[0] = blocks * block_size - queries
    positions = first + torch.arange(queries, device=DEVICE)
    positions[-1, queries // 2 + 1 :] = -1
    fused = torch.randn(rows * queries, heads + 2 * kv_heads, head_dim, device=DEVICE).to(dtype)
    fused[0, heads:] = 0
    fused[-1, heads:, 0] = -1e-6  # next to nothing, which is still below nothing
    query_key, value = fused.split([heads + kv_heads, kv_heads], dim=1)
    sinks = 20.0 * torch.arange(heads, device=DEVICE) if has_sinks else None
    segment = AttentionSegment(0, rows, queries, tables, positions)
    outputs, layers = [], [layer.clone(), layer.clone()]
    for backend, own in zip((PagedAttention(kv_format), GatherAttention(kv_format)), layers, strict=True):
        batch = AttentionBatch([segment], block_size)
        call = AttentionCall(query_key, value, straight(value), own, batch, 0.2, window, scales, soft_cap, sinks)
        outputs.append(backend.forward(call))
    assert torch.equal(layers[0][:, 1:], layers[1][:, 1:])  # the null block may hold anything
    assert not torch.equal(layers[0][:, 1:], layer[:, 1:]) and outputs[0].isfinite().all()
    real = positions.flatten() >= 0
    found, expected = (output[real].double() for output in outputs)
    assert (found - expected).norm() < (2e-2 if dtype is torch.bfloat16 else 2e-3) * expected.norm()


@pytest.mark.parametrize(("shape", "dtype", "kv_format"), DEALT, ids=str)
def test_attention_over_codes_has_the_same_bits_however_it_is_dealt_out(
    shape: tuple[int, ...], dtype: torch.dtype, kv_format: ByteKV
) -> None:
    """Of several shares each, one of them with the most."""
    from trtrun.kernels.triton.attention.kv_codes import KeptNumbers
    from trtrun.kernels.triton.attention.paged_attention import _attend_rows

    heads, _, head_dim, _, rows, queries, blocks = shape
    torch.manual_seed(3)
    scales, layer = filled(kv_format, shape, rows * blocks + 1, dtype)
    tables = (torch.randperm(rows * blocks, device=DEVICE) + 1).view(rows, blocks)
    positions = torch.tensor([[250], [1000]], device=DEVICE) + torch.arange(queries, device=DEVICE)
    query = torch.randn(rows * queries, heads, head_dim, device=DEVICE).to(dtype)
    kept = KeptNumbers.of(kv_format, layer, scales)
    results = {}
    sinks = 30.0 * torch.arange(heads, device=DEVICE)
    for tile, is_split in product((16, 32, 64, 128) if HAS_GPU else (16, 128), (False, True)):
        if tile < 128 or not is_split:
            output = results[tile, is_split] = torch.empty_like(query)
            _attend_rows(query, layer, tables, positions, 0.2, 1 << 30, output, tile, is_split, kept, sinks=sinks)
    assert results[128, False].isfinite().all()
    assert [way for way, output in results.items() if not torch.equal(output, results[128, False])] == []


@pytest.mark.parametrize("kv_format", [ByteKV("fp8"), ByteKV("int8", True)], ids=str)
def test_tokens_and_blocks_are_copied_with_their_scales(kv_format: ByteKV) -> None:
    """As torch's operations do it, with blocks of an odd number of tokens, too."""
    from trtrun.kernels.torch.operations import TorchOperations
    from trtrun.kernels.triton.attention import paged_store
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    source, target, offset = torch.tensor([[1, 3, 5, 1], [2, 7, 5, 0], [0, 4, 4, 2]], device=DEVICE)
    for block_size, head_dim in ((5, 24), (16, 10), (16, 64)):
        store = torch.randint(0, 255, (3, 2, 9, 2, block_size, kv_format.stored(head_dim, torch.float16)[0]))
        store = store.to(DEVICE, torch.uint8)
        expected, found = store.clone(), store.clone()
        for part in kv_format.parts(expected):
            TorchOperations().copy_tokens(part, source, target, offset)
        PagedAttention(kv_format).copy_tokens(found, source, target, offset)
        assert not expected.equal(store) and found.equal(expected)
        TorchOperations().copy_blocks(expected, source, target)
        assert paged_store.takes_blocks(store)
        paged_store.copy_blocks(found, source, target)
        assert found.equal(expected)
