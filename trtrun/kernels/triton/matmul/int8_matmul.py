"""The product with weights of 8 bits as a Triton kernel for CUDA: few rows at the speed at which codes are read.

It knows tensors; it does not know when Triton can be used (see support.py). Codes become the dtype of activations
on the way to the tensor cores, which every integer of 8 bits can; sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.torch.int8 import TorchInt8Matmul

_MOST_ROWS = 64
"""Beyond them the product is arithmetic: widening the whole weight once and leaving it to cuBLAS is then faster."""
_FEWEST_ROWS = 16
"""What a tile of the tensor cores takes."""
_MANY_FEATURES = 8192


@triton.jit
def _int8_product_kernel(
    x, codes, scale, bias, y, rows, features, inputs, x_stride,
    ROWS: tl.constexpr, FEATURES: tl.constexpr, INPUTS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    feature = tl.program_id(0).to(tl.int64) * FEATURES + tl.arange(0, FEATURES)
    kind = x.dtype.element_ty
    is_row, is_feature = row < rows, feature < features
    total = tl.zeros((ROWS, FEATURES), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        number = start + tl.arange(0, INPUTS)
        is_input = number < inputs
        values = tl.load(
            x + row[:, None] * x_stride + number[None, :], mask=is_row[:, None] & is_input[None, :], other=0.0
        )
        weights = tl.load(
            codes + feature[None, :] * inputs + number[:, None], mask=is_feature[None, :] & is_input[:, None], other=0
        )
        total = tl.dot(values, weights.to(kind), total)
    total *= tl.load(scale + feature, mask=is_feature, other=0.0)[None, :]
    if ADDS:
        total += tl.load(bias + feature, mask=is_feature, other=0.0).to(tl.float32)[None, :]
    place = y + row[:, None] * features + feature[None, :]
    tl.store(place, total.to(kind), mask=is_row[:, None] & is_feature[None, :])


class TritonInt8Matmul:
    """The product with one weight of 8 bits on CUDA.

    Args:
        codes: [out, in] int8, contiguous.
        scale: [out] float32.
        bias: [out] or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._codes, self._scale, self._bias = codes, scale, bias
        self._many_rows = TorchInt8Matmul(codes, scale, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] float16 or bfloat16 → [rows, out] in the same dtype."""
        rows = x.shape[0]
        if rows > _MOST_ROWS:
            return self._many_rows(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        features, inputs = self._codes.shape
        y = torch.empty((rows, features), dtype=x.dtype, device=x.device)
        if rows:
            tile = _tile(rows, features)
            _int8_product_kernel[(triton.cdiv(features, tile["FEATURES"]),)](
                x, self._codes, self._scale, self._scale if self._bias is None else self._bias, y,
                rows, features, inputs, x.stride(0),
                ROWS=max(_FEWEST_ROWS, triton.next_power_of_2(rows)), ADDS=self._bias is not None, num_warps=4, **tile,
            )  # fmt: skip
        return y


def _tile(rows: int, features: int) -> dict[str, int]:
    """What one program computes: enough programs to keep every multiprocessor reading, in runs of memory as long as
    that allows (measured on an H200, 1 and 16 rows); shorter ones where more rows fill the shared memory."""
    if rows > _FEWEST_ROWS:
        return {"FEATURES": 32, "INPUTS": 128, "num_stages": 3}
    if features >= _MANY_FEATURES:
        return {"FEATURES": 64, "INPUTS": 256, "num_stages": 4}
    return {"FEATURES": 32, "INPUTS": 512, "num_stages": 3}
