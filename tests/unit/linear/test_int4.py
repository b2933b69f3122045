"""Weights of 4 bits as GPUs hold them: how they lie in memory, and the product by torch's operations."""

from __future__ import annotations

import pytest
import torch

from trtrun.kernels.torch.integers import (
    TorchInt4Matmul,
    dequantize,
    groups_of,
    pack,
    quantize_int4,
    scales_shape,
    words_shape,
)

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@DTYPES
@pytest.mark.parametrize(("features", "inputs", "size"), [(64, 128, 128), (130, 640, 64), (256, 1024, 32)])
def test_a_weight_is_code_less_zero_point_times_scale(
    features: int, inputs: int, size: int, dtype: torch.dtype
) -> None:
    """Rounded once; tiles and steps are filled up with zeros."""
    torch.manual_seed(features)
    codes = torch.randint(0, 16, (features, inputs))
    scale, zero = torch.rand(features, inputs // size).to(dtype), torch.randint(0, 16, (features, inputs // size))
    held = pack(codes, scale, zero)
    assert held["words"].shape == words_shape(features, inputs)
    assert held["scales"].shape == scales_shape(features, inputs, size)
    assert groups_of(held["scales"]) == 128 // size
    found = dequantize(**held, inputs=inputs, dtype=dtype)
    spread = [it.repeat_interleave(size, 1).float() for it in (zero, scale)]
    assert torch.equal(found[:features], ((codes.float() - spread[0]) * spread[1]).to(dtype))
    assert not found[features:].any()
    symmetric = pack(codes, scale, 8)
    assert torch.equal(symmetric["words"], held["words"]) and not torch.equal(symmetric["scales"], held["scales"])


def test_words_lie_as_the_documentation_says() -> None:
    """One code at a time: kernels count on it."""
    for feature, number in ((0, 0), (0, 1), (1, 2), (2, 9), (9, 16), (17, 70), (63, 127), (40, 200)):
        codes = torch.zeros(64, 256, dtype=torch.int64)
        codes[feature, number] = 15
        words = pack(codes, torch.ones(64, 2, dtype=torch.bfloat16), 0)["words"].flatten()
        (place,) = words.nonzero().flatten().tolist()
        group, within = divmod(number, 128)
        sixteen, rest = divmod(within, 16)
        (h, j), (q, p), upper = divmod(sixteen, 4), divmod(rest // 2, 4), rest % 2
        w, v, line, e = feature // 16, feature // 8 % 2, feature // 2 % 4, feature % 2
        assert place == group * 1024 + 512 * v + 128 * w + 32 * line + 16 * e + 4 * p + 2 * q + h
        assert int(words[place]) & 0xFFFFFFFF == 15 << (16 * upper + 4 * j)


@DTYPES
def test_rounding_to_nearest_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = torch.randn(128, 512).to(dtype)
    weight[3] = 0
    for size in (32, 128):
        found = dequantize(**quantize_int4(weight, size), inputs=512, dtype=dtype).float()
        most = weight.float().view(128, -1, size).abs().amax(-1, keepdim=True).expand(-1, -1, size).reshape(128, 512)
        assert ((found - weight.float()).abs() <= most / 14 * 1.05).all()
        assert not found[3].any()


@DTYPES
def test_the_product_is_that_of_the_dense_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    held, bias = quantize_int4(torch.randn(64, 256).to(dtype)), torch.randn(64).to(dtype)
    x = torch.randn(5, 256).to(dtype)
    weight = dequantize(**held, inputs=256, dtype=dtype)
    expected = torch.nn.functional.linear(x, weight)
    assert torch.equal(TorchInt4Matmul(**held, bias=None)(x), expected)
    assert torch.equal(TorchInt4Matmul(**held, bias=bias)(x), expected + bias)
