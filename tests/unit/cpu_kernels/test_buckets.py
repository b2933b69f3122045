"""Few shapes for many numbers of rows, and never fewer rows than asked for."""

from __future__ import annotations

import itertools

import torch

from trtrun.kernels.cpu.onednn_matmul import bucket_rows
from trtrun.linear.layer import Linear
from trtrun.linear.quantization import QUANTIZATIONS


def test_buckets_cover_every_number_with_few_shapes() -> None:
    buckets = [bucket_rows(rows) for rows in range(1, 4097)]
    assert all(bucket >= rows for rows, bucket in enumerate(buckets, start=1))
    assert buckets == sorted(buckets)
    assert buckets[:16] == list(range(1, 17))  # verification of a few rows pays for nothing
    assert len(set(buckets)) < 50
    assert all(bucket <= 1.5 * rows for rows, bucket in enumerate(buckets, start=1) if rows > 32)


def test_a_linear_layer_gives_every_row_and_no_more() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight, bias = torch.randn(24, 40).to(dtype), torch.randn(24).to(dtype)
        dense = QUANTIZATIONS.get("none")
        layers = [
            Linear(weight.shape, dense, {"weight": weight.clone()}, bias, batch_invariant=invariant)
            for invariant in (True, False)
        ]
        inputs = torch.randn(150, 40).to(dtype)
        expected = inputs.float() @ weight.float().T + bias.float()
        for layer, rows in itertools.product(layers, (1, 2, 16, 17, 100, 150)):
            output = layer(inputs[:rows])
            assert output.shape == (rows, 24)
            assert output.dtype is dtype
            assert torch.allclose(output.float(), expected[:rows], atol=1e-4 if dtype is torch.float32 else 0.2)
