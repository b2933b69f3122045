"""Weights in E4M3 on a GPU: how activations are rounded there, and the products, in graphs, too."""

from __future__ import annotations

import math

import pytest
import torch
from fp8_products import NAMES, assert_product, numbers
from gpus import needs_gpu

from trtrun.kernels.torch.fp8 import TorchFp8Matmul, quantize, round_activations
from trtrun.kernels.triton.support import multiplies_fp8, triton_works
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import Product

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), [(24, 60), (1000, 688), (5000, 64), (70, 2050), (2048, 2048)])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", ["best", "torch"])
def test_products_on_a_gpu_are_right(
    features: int, inputs: int, with_bias: bool, dtype: torch.dtype, name: str, make: str
) -> None:
    held = quantize(numbers(features, inputs, seed=1).to("cuda", dtype))
    bias = numbers(features, seed=3).to("cuda", dtype) if with_bias else None
    rounds = name == "fp8"
    product: Product = TorchFp8Matmul(held["codes"], held["scale"], bias, rounds_activations=rounds)
    if make == "best":
        product = QUANTIZATIONS.get(name).apply(held, bias, batch_invariant=True)
    for rows in (0, 1, 5, 16, 17, 64, 65, 200):
        x = numbers(rows, inputs + 8, seed=4).to("cuda", dtype)[:, 8:]
        found = product(x)
        assert found.shape == (rows, features)
        # Matrix units add up some products with fewer bits than float32 has.
        assert_product(found, held, bias, x, rounds, exponent=-20 if make == "torch" else -12)


def test_a_gpu_rounds_activations_as_the_cpu_does() -> None:
    x = numbers(300, 3000, seed=1) * (10.0 ** (torch.arange(300) % 9 - 5)).unsqueeze(1).bfloat16()
    values, scale = round_activations(x)
    found, own = round_activations(x.cuda())
    assert torch.equal(found.cpu(), values) and torch.equal(own.cpu(), scale)
    if triton_works("cuda") and multiplies_fp8(torch.device("cuda", 0)):
        from trtrun.kernels.triton.fused import round_activations as round_in_triton

        codes, own, _ = round_in_triton(x.cuda())
        assert torch.equal(codes[:, :3000].float().cpu(), values) and torch.equal(own.cpu(), scale)


def test_what_is_not_finite_spoils_its_own_row_alone_on_a_gpu() -> None:
    held = quantize(numbers(70, 64, seed=1).cuda())
    product = QUANTIZATIONS.get("fp8").apply(held, None, batch_invariant=True)
    x = numbers(4, 64, seed=2).cuda()
    expected = product(x)
    x[1, 5], x[2, 5] = math.nan, math.inf
    found = product(x)
    assert torch.equal(found[::3], expected[::3])
    assert bool(found[1:3].isnan().all())


def test_products_are_captured_in_graphs() -> None:
    held = quantize(numbers(300, 256, seed=1).cuda())
    x = numbers(6, 256, seed=2).cuda()
    product = QUANTIZATIONS.get("fp8").apply(held, None, batch_invariant=True)
    product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x)
    x.copy_(numbers(6, 256, seed=3))
    graph.replay()
    assert torch.equal(found, product(x))
