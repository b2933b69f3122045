"""Weights of 8 bits: how they are rounded, and the products with them on every device there is."""

from __future__ import annotations

import pytest
import torch
from gpus import needs_gpu
from native import leave_to_torch, needs_bfloat16

from trtrun.errors import ConfigError
from trtrun.kernels.cpu.byte_matmul_code import int8_matmul_module
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, compile_kernels
from trtrun.kernels.cpu.matmul import BlockedInt8Matmul
from trtrun.kernels.cpu.matmul_code import FORMS, KERNEL, STRETCH, prefetch_for
from trtrun.kernels.torch.integers import TorchInt8Matmul, quantize_int8
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS
from trtrun.linear.quantization.base import Product, Tensors
from trtrun.tensors import dtype_name

CPU, INT8 = torch.device("cpu"), QUANTIZATIONS.get("int8")
SHAPES = [(64, 2), (1, 8), (24, 60), (128, 1000), (1000, 688), (70, 2 * STRETCH + 2), (130, 6 * STRETCH + 10)]
TILE_ROWS = FORMS[MULTIPLIES_BFLOAT16].rows
ROWS = [1, 2, 3, 4, 5, TILE_ROWS, TILE_ROWS + 1, 13, 70]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Random bfloat16 of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(features: int, inputs: int) -> Tensors:
    """A random weight whose output features differ in size by powers of ten."""
    sizes = 10.0 ** (torch.arange(features) % 5 - 2)
    return quantize_int8((numbers(features, inputs, seed=1) * sizes.unsqueeze(1)).bfloat16())


def assert_product(found: torch.Tensor, weight: Tensors, bias: torch.Tensor | None, x: torch.Tensor) -> None:
    """`found` is what float64 makes of codes, scale and bias, but for float32 sums, rounded to x's dtype."""
    exact = x.double() @ (weight["codes"].double() * weight["scale"].double().unsqueeze(1)).T
    sizes = x.double().abs() @ (weight["codes"].double().abs() * weight["scale"].double().unsqueeze(1)).T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    assert found.dtype is x.dtype
    half_step = torch.finfo(x.dtype).eps / 2
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * 2 * half_step + sizes * 2**-20).all()), (error / sizes).max()


def test_rounding_is_to_nearest_of_each_output_features_own_scale() -> None:
    weight = torch.tensor([[1.0, -0.5, 0.1, 0.0], [-254.0, 3.1, 0.9, 254.0], [0.0, 0.0, 0.0, 0.0]]).bfloat16()
    held = quantize_int8(weight)
    assert held["codes"].tolist() == [[127, -64, 13, 0], [-127, 2, 0, 127], [0, 0, 0, 0]]
    assert torch.allclose(held["scale"], torch.tensor([1 / 127, 2.0, 1.0]))


def test_rounding_in_pieces_is_rounding_of_the_whole() -> None:
    weight = numbers(1030, 2048, seed=1)
    held = quantize_int8(weight)
    error = (held["codes"] * held["scale"].unsqueeze(1) - weight.float()).abs()
    assert bool((error <= held["scale"].unsqueeze(1) * 0.5001).all())
    assert torch.equal(held["scale"], weight.float().abs().amax(dim=1) / 127)


@needs_bfloat16
@pytest.mark.usefixtures("each_number_of_threads")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), SHAPES)
def test_products_of_the_kernel_are_right_and_rows_do_not_depend_on_their_number(
    features: int, inputs: int, with_bias: bool
) -> None:
    weight, x = quantized(features, inputs), numbers(max(ROWS), inputs, seed=2)
    bias = numbers(features, seed=3) * 8 if with_bias else None
    matmul = BlockedInt8Matmul(weight["codes"], weight["scale"], bias)
    whole = matmul(x)
    assert_product(whole, weight, bias, x)
    for rows in ROWS:
        assert torch.equal(matmul(x[:rows]), whole[:rows])
        assert torch.equal(matmul(x[-rows:]), whole[-rows:])
    assert matmul(x[:0]).shape == (0, features)


@needs_bfloat16
@pytest.mark.parametrize("processor", ["znver5", "sapphirerapids"])
def test_every_way_to_prefetch_gives_the_same(processor: str) -> None:
    """What other processors get runs here too."""
    weight, x = quantized(1000, 688), numbers(8, 688, seed=2)
    own, other = (BlockedInt8Matmul(weight["codes"], weight["scale"], None) for _ in range(2))
    other._kernel = compile_kernels(int8_matmul_module(prefetch_for(processor)), KERNEL)[KERNEL]
    for rows in (1, 6, 8):
        assert torch.equal(other(x[:rows]), own(x[:rows]))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("inputs", [64, 65])
def test_linear_layers_on_the_cpu_are_right_with_and_without_the_kernel(
    inputs: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, bias = quantized(70, inputs), numbers(70, seed=2) * 8 if with_bias else None
    for leave in (lambda: None, lambda: leave_to_torch(monkeypatch)):
        leave()
        linear = Linear((70, inputs), INT8, weight, bias)
        assert (linear.out_features, linear.in_features) == (70, inputs)
        for rows in (1, 4, 5, 40):
            x = numbers(rows, inputs, seed=rows)
            found = linear(x)
            exact = x.double() @ (weight["codes"].double() * weight["scale"].double().unsqueeze(1)).T
            exact = exact if bias is None else exact + bias.double()
            assert found.dtype is torch.bfloat16
            # torch rounds its sums to bfloat16 before they are scaled and a bias is added.
            assert torch.allclose(found.double(), exact, rtol=2**-6, atol=float(exact.abs().max()) * 2**-7)
    assert isinstance(linear.product, TorchInt8Matmul)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("features", "inputs"), [(24, 60), (1000, 688), (5000, 64), (70, 2050), (2048, 2048)])
@pytest.mark.parametrize("make", ["best", "torch"])
def test_products_on_a_gpu_are_right(
    features: int, inputs: int, with_bias: bool, dtype: torch.dtype, make: str
) -> None:
    held = quantize_int8(numbers(features, inputs, seed=1).to("cuda", dtype))
    bias = numbers(features, seed=3).to("cuda", dtype) if with_bias else None
    product: Product = TorchInt8Matmul(held["codes"], held["scale"], bias)
    if make == "best":
        product = INT8.apply(held, bias, batch_invariant=False)
    for rows in (0, 1, 5, 16, 17, 64, 65, 200):
        wide = numbers(rows, inputs + 8, seed=4).to("cuda", dtype)
        x = wide[:, 8:]
        found = product(x)
        exact = x.double() @ (held["codes"].double() * held["scale"].double().unsqueeze(1)).T
        exact = exact if bias is None else exact + bias.double()
        assert found.shape == (rows, features)
        assert found.dtype is dtype
        error = (found.double() - exact).norm() / max(exact.norm().item(), 1e-9)
        assert error.item() < (1e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize(("dtype", "device", "fits"), [
    (torch.bfloat16, "cpu", True), (torch.float16, "cpu", False), (torch.float32, "cpu", False),
    (torch.bfloat16, "cuda", True), (torch.float16, "cuda", True), (torch.float32, "cuda", False),
])  # fmt: skip
def test_dtypes_that_would_be_slower_are_refused(dtype: torch.dtype, device: str, fits: bool) -> None:
    if fits:
        INT8.check(dtype_name(dtype), device)
        return
    with pytest.raises(ConfigError, match=r"quantization int8 computes in bfloat16.*, not in float.*: set dtype to"):
        INT8.check(dtype_name(dtype), device)


def test_unknown_quantizations_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown quantization 'int4' \(did you mean 'int8'\?\); "
        r"known: fp8, fp8_block, fp8_weight_only, fp8_with_head, int8, none; .* `trtrun quantize` writes",
    ):
        QUANTIZATIONS.get("int4")
