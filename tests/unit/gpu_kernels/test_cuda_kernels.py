"""Triton's kernels against the plain torch operations whose place they take. They need a GPU."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_fp8, needs_gpu
from paged import straight
from torch.nn import functional

from trtrun.attention.backend import GatherAttention
from trtrun.kernels.arguments import AttentionCall
from trtrun.kernels.torch.operations import TorchOperations
from trtrun.kernels.triton.support import triton_works
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment

pytestmark = needs_gpu
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the norms; NaN anywhere gives NaN, which is below no bound."""
    return ((found - expected).double().norm() / expected.double().norm()).item()


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def test_triton_works_on_a_gpu_with_a_compiler() -> None:
    assert triton_works("cuda")
    assert not triton_works("cpu")


@DTYPES
@pytest.mark.parametrize("window", [None, 20, 300])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "rows", "queries", "blocks"),
    [
        (4, 2, 64, 16, 3, 1, 4),
        (16, 8, 64, 16, 5, 6, 32),
        (32, 8, 128, 16, 2, 9, 200),
        (8, 2, 64, 8, 2, 5, 70),
        (4, 4, 24, 16, 2, 3, 40),
        (6, 2, 96, 32, 1, 700, 30),
        (1, 1, 128, 16, 1, 1, 600),
    ],
)
def test_paged_attention_equals_gathered_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    rows: int,
    queries: int,
    blocks: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    torch.manual_seed(heads * rows + queries)
    count = rows * blocks + 1
    store = random(2, count, kv_heads, block_size, head_dim, dtype=dtype)
    tables = (torch.randperm(count - 1, device="cuda") + 1)[: rows * blocks].view(rows, blocks)
    first = torch.randint(0, blocks * block_size - queries, (rows, 1), device="cuda")
    first[0] = 0
    positions = first + torch.arange(queries, device="cuda")
    positions[-1, queries // 2 + 1 :] = -1  # padding
    fused = random(rows * queries, heads + 2 * kv_heads, head_dim, dtype=dtype)
    query_key, value = fused.split([heads + kv_heads, kv_heads], dim=1)
    stores, outputs = [], []
    for backend in (GatherAttention(), PagedAttention()):
        own = store.clone()
        batch = AttentionBatch([AttentionSegment(0, rows, queries, tables, positions)], block_size)
        outputs.append(
            backend.forward(AttentionCall(query_key, value, straight(value), own, batch, head_dim**-0.5, window))
        )
        stores.append(own[:, 1:])  # the null block may hold anything
    assert torch.equal(*stores)
    real = positions.flatten() >= 0
    assert difference(outputs[1][real], outputs[0][real]) < BOUNDS[dtype]


def test_split_contexts_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, in no more memory for partial results than their bound."""
    from trtrun.kernels.triton.attention import paged_attention

    torch.manual_seed(5)
    rows, queries, heads, blocks = 9, 5, 8, 256
    store = random(2, rows * blocks + 1, 2, 16, 64, dtype=torch.bfloat16)
    tables = (torch.randperm(rows * blocks, device="cuda") + 1).view(rows, blocks)
    positions = torch.randint(0, blocks * 16 - queries, (rows, 1), device="cuda") + torch.arange(queries, device="cuda")
    fused = random(rows * queries, heads + 4, 64, dtype=torch.bfloat16)
    query_key, value = fused.split([heads + 2, 2], dim=1)
    batch = AttentionBatch([AttentionSegment(0, rows, queries, tables, positions)], 16)
    backend, outputs, peaks, angles = paged_attention.PagedAttention(), [], [], straight(value)
    for most in (1 << 40, 1 << 20, 1):
        monkeypatch.setattr(paged_attention, "MOST_PARTIAL_BYTES", most)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        outputs.append(backend.forward(AttentionCall(query_key, value, angles, store, batch, 0.125, None)))
        # The output itself, and the rotated queries, which are as large.
        peaks.append(torch.cuda.max_memory_allocated() - before - 2 * outputs[-1].nbytes)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert peaks[1] < (1 << 20) + 4096 < peaks[0] and peaks[2] < peaks[0] / 8


@DTYPES
@pytest.mark.parametrize("size", [96, 1024, 5120])
def test_add_and_normalise(size: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.fused import add_and_normalise

    hidden, delta, weight = random(7, size, dtype=dtype), random(7, size, dtype=dtype), random(size, dtype=dtype)
    total = hidden + delta
    expected = functional.rms_norm(total, (size,), None, 1e-5) * weight
    found = add_and_normalise(hidden, delta, weight, 1e-5)
    assert torch.equal(hidden, total)
    assert difference(found, expected) < BOUNDS[dtype]
    assert difference(add_and_normalise(hidden, None, weight, 1e-5), expected) < BOUNDS[dtype]
    assert torch.equal(hidden, total)


@DTYPES
@pytest.mark.parametrize(("heads", "size"), [(36, 128), (5, 24), (17, 80)])
def test_norms_of_heads(heads: int, size: int, dtype: torch.dtype) -> None:
    """In any company, of heads in front of others."""
    from trtrun.kernels.triton.row_functions import normalise_heads

    x, weight = random(70, heads + 3, size, dtype=dtype)[:, :heads], random(heads, size, dtype=dtype)
    found = normalise_heads(x, weight, 1e-5)
    expected = functional.rms_norm(x.double(), (size,), None, 1e-5) * weight.double()
    assert difference(found, expected) < BOUNDS[dtype]
    assert torch.equal(torch.cat([normalise_heads(x[row : row + 1], weight, 1e-5) for row in range(70)]), found)


@DTYPES
@pytest.mark.parametrize("features", [4, 1300, 14336])
def test_xielu(features: int, dtype: torch.dtype) -> None:
    """In any company."""
    from trtrun.kernels.triton.row_functions import xielu

    x = random(40, features, dtype=dtype) * 3
    numbers = torch.tensor([0.75, 1.25, 0.5, -1e-6], device="cuda")
    found = xielu(x, numbers)
    assert difference(found, TorchOperations().xielu(x.float(), numbers)) < BOUNDS[dtype]
    assert torch.equal(torch.cat([xielu(x[row : row + 1], numbers) for row in range(40)]), found)


@DTYPES
@pytest.mark.parametrize("size", [96, 1000, 5120])
def test_square_sums(size: int, dtype: torch.dtype) -> None:
    """In any company, of rows with something behind them."""
    from trtrun.kernels.triton.row_functions import square_sums

    wide = random(70, size + 64, dtype=dtype)
    found = square_sums(wide[:, :size])
    assert found.dtype is torch.float32
    assert difference(found, wide[:, :size].double().square().sum(1)) < BOUNDS[torch.float32]
    assert torch.equal(torch.cat([square_sums(wide[row : row + 1, :size]) for row in range(70)]), found)


@DTYPES
@pytest.mark.parametrize("features", [4, 1300, 14336])
def test_activate_and_multiply(features: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.fused import activate_and_multiply

    fused = random(5, 2 * features, dtype=dtype)
    expected = functional.silu(fused[:, :features]) * fused[:, features:]
    assert difference(activate_and_multiply(fused), expected) < BOUNDS[dtype]


@DTYPES
@pytest.mark.parametrize("head_dim", [24, 64, 128])
@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_rotating_on_the_way_to_the_store(
    head_dim: int, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch rotates, bit for bit, in the store and behind it."""
    from trtrun.kernels.triton.attention import paged_store
    from trtrun.kernels.triton.attention.paged_attention import PagedAttention

    monkeypatch.setattr(paged_store, "_tokens_at_once", lambda heads: at_once)
    query_key, value = random(9, 7, head_dim, dtype=dtype)[:, 1:7], random(9, 2, head_dim, dtype=dtype)
    cosine, sine = random(9, 1, head_dim, dtype=dtype), random(9, 1, head_dim, dtype=dtype)
    rotated = (query_key * cosine).add_(torch.roll(query_key, head_dim // 2, 2).mul_(sine))
    tables, positions = torch.tensor([[1], [2], [3]], device="cuda"), torch.arange(9, device="cuda").view(3, 3) % 3
    batch, backend = AttentionBatch([AttentionSegment(0, 3, 3, tables, positions)], 16), PagedAttention()
    stores = [torch.zeros(2, 4, 2, 16, head_dim, dtype=dtype, device="cuda") for _ in range(2)]
    expected = backend.forward(AttentionCall(rotated, value, straight(value), stores[0], batch, 0.2, None))
    found = backend.forward(AttentionCall(query_key, value, (cosine, sine), stores[1], batch, 0.2, None))
    assert stores[0].any() and torch.equal(*stores)
    assert torch.equal(found, expected)


@needs_fp8
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [100, 1024, 8192, 28672])
def test_what_is_rounded_in_the_kernel_that_makes_it(size: int, dtype: torch.dtype) -> None:
    """Is what that kernel makes, rounded."""
    from trtrun.kernels.torch.fp8 import round_activations
    from trtrun.kernels.triton import fused

    torch.manual_seed(size)
    hidden, delta, weight = (random(*shape, dtype=dtype) for shape in ((5, size), (5, size), (size,)))
    for added in (None, delta):
        own, other = hidden.clone(), hidden.clone()
        values, scale = round_activations(fused.add_and_normalise(own, added, weight, 1e-5))
        found = fused.add_and_normalise_rounded(other, added, weight, 1e-5)
        assert torch.equal(own, other)
        assert torch.equal(found.scale, scale)
        assert torch.equal(found.codes[:, :size].float(), values)
    gates = random(5, 2 * size, dtype=dtype)
    values, scale = round_activations(fused.activate_and_multiply(gates))
    found = fused.activate_and_multiply_rounded(gates)
    assert torch.equal(found.scale, scale)
    assert torch.equal(found.codes[:, :size].float(), values)


@pytest.mark.parametrize("num_blocks", [40, 40_000])
def test_copies_within_a_store_of_more_numbers_than_32_bits_count(num_blocks: int) -> None:
    from trtrun.kernels.triton.attention import paged_store

    store = torch.zeros((2, 2, num_blocks, 8, 16, 128), dtype=torch.bfloat16, device="cuda")
    last = num_blocks - 1
    store[:, :, :3] = torch.randn((2, 2, 3, 8, 16, 128), device="cuda").to(store.dtype)
    source, target = torch.tensor([[1, 2], [last, last - 1]], device="cuda")
    paged_store.copy_blocks(store, source, target)
    assert store[:, :, [last, last - 1]].equal(store[:, :, [1, 2]]) and not store[:, :, 3 : last - 1].any()
    offset = torch.tensor([3, 15], device="cuda")
    paged_store.copy_tokens(store, target, target - 10, offset)
    for block, place in ((last, 3), (last - 1, 15)):
        assert store[:, :, block - 10, :, place].equal(store[:, :, block, :, place])
        assert int(store[:, :, block - 10].any(dim=-1).sum()) == 2 * 2 * 8
