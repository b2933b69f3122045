"""What tests of weights in E4M3 share: random numbers and weights, and what a product of them must be."""

from __future__ import annotations

import torch

from trtrun.kernels.torch.fp8 import quantize, round_rows
from trtrun.linear.quantization.base import Tensors

NAMES = ["fp8", "fp8_weight_only"]
"""Quantizations of the linear layers; whether activations are rounded, too, is the difference."""


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Random bfloat16 of the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantized(features: int, inputs: int) -> Tensors:
    """A random weight whose output features differ in size by powers of ten."""
    sizes = 10.0 ** (torch.arange(features) % 5 - 2)
    return quantize((numbers(features, inputs, seed=1) * sizes.unsqueeze(1)).bfloat16())


def assert_product(
    found: torch.Tensor,
    weight: Tensors,
    bias: torch.Tensor | None,
    x: torch.Tensor,
    rounds: bool,
    exponent: int = -20,
) -> None:
    """`found` is what float64 makes of codes, scales and bias, but for float32 sums, rounded to x's dtype.

    Sums may be wrong by 2**exponent of the sum of sizes.
    """
    dense = weight["codes"].double() * weight["scale"].double().unsqueeze(1)
    values = x.double()
    if rounds:
        codes, scale = round_rows(x)
        values = codes.double() * scale.double().unsqueeze(1)
    exact, sizes = values @ dense.T, values.abs() @ dense.abs().T
    if bias is not None:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    assert found.dtype is x.dtype
    half_step = torch.finfo(x.dtype).eps / 2
    error = (found.double() - exact).abs()
    assert bool((error <= exact.abs() * 2 * half_step + sizes * 2.0**exponent).all()), (error / sizes).max()
