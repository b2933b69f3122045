"""E4M3 in blocks and groups on a GPU: rounding as on other devices, products that are right, a row's bits in any
company, and those of the kernel for few rows."""

from __future__ import annotations

import math

import pytest
import torch
from gpus import needs_fp8, needs_gpu, needs_hopper

from trtrun.kernels.torch.fp8 import TorchFp8BlockMatmul, quantize_blocks, round_in_groups

pytest.importorskip("triton", reason="needs triton: pip install triton")
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
BIASES = pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def held_as_blocks(features: int, inputs: int) -> dict[str, torch.Tensor]:
    """A random weight whose blocks differ in size."""
    sizes = 3.0 ** ((torch.arange(features) // 128 % 3).unsqueeze(1) - torch.arange(inputs) // 128 % 5)
    return quantize_blocks(random(features, inputs, seed=features) * sizes.cuda() / inputs**0.5)


@needs_gpu
def test_a_gpu_rounds_in_groups_as_the_cpu_does() -> None:
    from trtrun.kernels.triton.fused import round_activations

    x = torch.randn(300, 3000, generator=torch.Generator().manual_seed(1)) * (
        10.0 ** (torch.arange(3000) // 70 % 9 - 5)
    )
    x[3], x[4, 128:256] = 0, 0
    for rows in (1, 17, 300):
        values, scale = round_in_groups(x[:rows].bfloat16())
        codes, own, _ = round_activations(x[:rows].bfloat16().cuda(), "group")
        assert torch.equal(codes[:, :3000].float().cpu(), values) and torch.equal(own.cpu(), scale)


@needs_gpu
@HALVES
@pytest.mark.parametrize("size", [200, 4096, 8192])
def test_what_is_rounded_in_groups_in_the_kernel_that_makes_it(size: int, dtype: torch.dtype) -> None:
    """Is what that kernel makes, rounded; but for sums of squares, whose order may be another one, so that a number in
    many thousands is rounded elsewhere."""
    from trtrun.kernels.triton import fused
    from trtrun.kernels.triton.fused import round_activations

    for rows in (1, 3, 40):
        hidden, delta, weight = (random(*shape, seed=1, dtype=dtype) for shape in ((rows, size), (rows, size), (size,)))
        other = hidden.clone()
        expected = round_activations(fused.add_and_normalise(hidden, delta, weight, 1e-5), "group")
        found = fused.add_and_normalise_rounded(other, delta, weight, 1e-5, "group")
        assert torch.equal(hidden, other) and torch.allclose(found.scale, expected.scale, rtol=2.0**-7, atol=0)
        assert (found.codes[:, :size].float() != expected.codes[:, :size].float()).float().mean() < 1e-3
        assert (found.scale != expected.scale).float().mean() < 1e-2
        gates = random(rows, 2 * 3 * size, seed=2, dtype=dtype)
        expected = round_activations(fused.activate_and_multiply(gates), "group")
        found = fused.activate_and_multiply_rounded(gates, "group")
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.codes[:, : 3 * size].float(), expected.codes[:, : 3 * size].float())


@needs_fp8
@HALVES
@BIASES
@pytest.mark.parametrize(("features", "inputs"), [(24, 60), (1000, 688), (5000, 64), (70, 2050), (2048, 2048)])
def test_products_on_a_gpu_are_right(features: int, inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul

    held = held_as_blocks(features, inputs)
    bias = random(features, seed=3, dtype=dtype) if has_bias else None
    product = TritonFp8BlockMatmul(**held, bias=bias)
    scale = held["block_scale"].double().repeat_interleave(128, 0)[:features].repeat_interleave(128, 1)[:, :inputs]
    dense = held["codes"].double() * scale
    for rows in (0, 1, 5, 16, 17, 64, 65, 200):
        x = random(rows, inputs + 8, seed=4, dtype=dtype)[:, 8:]
        found = product(x)
        assert found.shape == (rows, features)
        codes, own = round_in_groups(x)
        values = codes.double() * own.double().repeat_interleave(128, 1)[:, :inputs]
        exact, sizes = values @ dense.T, values.abs() @ dense.abs().T
        if bias is not None:
            exact, sizes = exact + bias.double(), sizes + bias.double().abs()
        # Matrix units add up some products with fewer bits than float32 has.
        error = (found.double() - exact).abs()
        assert bool((error <= exact.abs() * torch.finfo(dtype).eps + sizes * 2.0**-12).all())
        plain = TorchFp8BlockMatmul(**held, bias=bias)(x)
        assert bool(((plain.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + sizes * 2.0**-20).all())


@needs_fp8
@HALVES
@BIASES
@pytest.mark.parametrize(
    ("features", "inputs"), [(6144, 4096), (4096, 14336), (8192, 28672), (2048, 8192), (1000, 700), (3, 64), (70, 33)]
)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(
    features: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul

    held, x = held_as_blocks(features, inputs), random(2048, inputs, seed=1, dtype=dtype)
    product = TritonFp8BlockMatmul(**held, bias=random(features, seed=2, dtype=dtype) if has_bias else None)
    whole = product(x)
    for rows in (1, 2, 5, 6, 11, 16, 17, 24, 31, 32, 33, 48, 64, 65, 66, 96, 128, 129, 192, 300, 1000):
        assert torch.equal(product(x[:rows]), whole[:rows]), f"{rows} rows"
        assert torch.equal(product(x[-rows:]), whole[-rows:]), f"the last {rows} rows"
    assert product(x[:0]).shape == (0, features)


@needs_fp8
def test_tiles_of_a_product_cannot_be_seen_in_it() -> None:
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_block_matmul import chain_block_product
    from trtrun.kernels.triton.matmul.fp8_matmul import Tile

    held, x = held_as_blocks(1000, 4096), round_activations(random(40, 4096, seed=1), "group")
    tiles = [
        Tile(16, 64, 128, 3), Tile(16, 64, 128, 12), Tile(16, 128, 128, 3), Tile(32, 64, 128, 2), Tile(64, 64, 128, 3),
        Tile(64, 128, 128, 2, 8), Tile(128, 128, 128, 2, 8),
    ]  # fmt: skip
    found = [chain_block_product(x, held["codes"], held["block_scale"], None, tile) for tile in tiles]
    for tile, other in zip(tiles, found, strict=True):
        assert torch.equal(other, found[0]), tile


@needs_fp8
def test_what_is_not_finite_spoils_its_own_row_alone() -> None:
    from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul

    product, x = TritonFp8BlockMatmul(**held_as_blocks(70, 400), bias=None), random(4, 400, seed=2)
    expected = product(x)
    x[1, 5], x[2, 305] = math.nan, math.inf
    found = product(x)
    assert torch.equal(found[::3], expected[::3]) and bool(found[1:3].isnan().all())


@needs_hopper
@HALVES
@BIASES
@pytest.mark.parametrize(
    ("features", "inputs"),
    [(1, 16), (70, 48), (64, 512), (200, 528), (3000, 2560), (2048, 8192), (20000, 2048), (8192, 28672)],
)
def test_products_of_few_rows_have_the_bits_of_the_general_kernel(
    features: int, inputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    """One tile and many more than there are programs; steps, tiles and blocks that the weight does not fill."""
    from trtrun.kernels.triton.fp8_stream.block_product import StreamedBlockProduct
    from trtrun.kernels.triton.fused import round_activations
    from trtrun.kernels.triton.matmul.fp8_block_matmul import chain_block_product

    held, bias = held_as_blocks(features, inputs), random(features, seed=2, dtype=dtype) if has_bias else None
    product = StreamedBlockProduct(held["codes"], held["block_scale"], bias)
    for rows in (1, 2, 7, 16):
        x = round_activations(random(rows, inputs, seed=rows, dtype=dtype), "group")
        expected = chain_block_product(x, held["codes"], held["block_scale"], bias)
        for _ in range(3):
            assert torch.equal(product(x), expected), f"{rows} rows"
        assert expected.isfinite().all()


@needs_hopper
def test_a_graph_of_many_takes_that_kernel_and_has_the_bits_of_single_calls() -> None:
    """Kernels begin before those before them have ended: rows and their scales must be there, and shared memory."""
    from trtrun.kernels.triton import fused
    from trtrun.kernels.triton.matmul.fp8_block_matmul import TritonFp8BlockMatmul

    shapes = [(3072, 2048), (2048, 2048), (8192, 2048), (2048, 4096)]
    layers = [TritonFp8BlockMatmul(**held_as_blocks(*shape), bias=None) for shape in shapes]
    weight = random(2048, seed=9)

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            queries, hidden = layers[0](x), layers[1](x)
            normed = fused.add_and_normalise_rounded(hidden, queries[:, :2048].contiguous(), weight, 1e-5, "group")
            hidden = layers[3](fused.activate_and_multiply_rounded(layers[2](normed), "group"))
            x = hidden / hidden.norm(dim=1, keepdim=True)
        return x

    x = random(5, 2048, seed=1)
    run(x)
    graph = torch.cuda.CUDAGraph()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with torch.cuda.graph(graph):
            found = run(x)
        for _ in range(3):
            x.normal_()
            graph.replay()
            assert torch.equal(found, run(x)) and found.isfinite().all()
    assert sum("_stream_blocks_kernel" in event.name for event in profiler.events()) == 3 * 40
