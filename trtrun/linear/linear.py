"""A linear layer on this rank's slice of the weight, with the fastest kernel for its device and dtype.

It knows one weight matrix. It does not know tensor parallelism: the model adds up or gathers partial results.

Backends, by device and dtype:

- CPU, bfloat16, on processors with AVX-512 BF16: trtrun's own kernel (native/matmul.py).
- CPU, float32, and bfloat16 elsewhere: oneDNN with the weight packed once into blocks. Several rows then cost hardly
  more than one, which is what verification lives on; `F.linear` packs anew at every call.
- CPU, float16, and builds of torch without oneDNN: `F.linear`.
- anything else: `F.linear` (cuBLAS on CUDA).

Quantized weights have products of their own (int8.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from trtrun.kernels.cpu.machine import has_bfloat16_kernels
from trtrun.kernels.cpu.matmul import BlockedMatmul, can_block
from trtrun.kernels.row_buckets import bucket_rows
from trtrun.linear.int8 import int8_product
from trtrun.quantization import QuantizedWeight

_ROWS_FOR_ONE = 4
"""Rows computed where one is wanted and must be bit-equal to the same row among others."""


def can_pack(weight: torch.Tensor) -> bool:
    """Whether a packed copy of `weight` will take its place; that depends on device and dtype alone."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


class OneDnnMatmul:
    """x @ weight.T + bias with a weight that oneDNN has packed.

    Args:
        weight: [out, in] on the CPU, bfloat16 or float32.
        bias: [out] or None.
        batch_invariant: see `make_linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> None:
        # In bfloat16 oneDNN gives bit-equal rows for any number of rows from two on, while a single row may take
        # another kernel that adds up in another order. Verification computes draft_len + 1 rows where plain decoding
        # computes one: computing four in its place keeps both bit-equal. (Measured on Zen 5: one row takes 0.93 of the
        # time of two, four take 0.97.) float32 has no such promise to keep, as the difference is 1e-7 there, and its
        # one-row kernel is much faster.
        self._pad_single_row = batch_invariant and weight.dtype is torch.bfloat16
        # The number of rows is a hint for the layout only: one pack serves every number of rows.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        self._bias = bias
        # The overload itself: looking it up by name at every call costs microseconds of a layer of a few hundred.
        self._product: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out]."""
        rows = x.shape[0]
        wanted = bucket_rows(rows)
        if rows == 1 and self._pad_single_row:
            wanted, x = _ROWS_FOR_ONE, x.expand(_ROWS_FOR_ONE, -1)
        elif wanted > rows:
            x = functional.pad(x, (0, 0, 0, wanted - rows))
        result = self._product(x, self._weight, self._bias, "none", [], "")
        return result if wanted == rows else result[:rows]


class Linear:
    """y = x @ weight.T + bias, for x [tokens, in] to y [tokens, out], in the weight's dtype on its device."""

    def __init__(
        self,
        weight: torch.Tensor | QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        batch_invariant: bool = True,
    ) -> None:
        """See `make_linear`; where the weight is packed, the plain one is not kept."""
        numbers = weight.codes if isinstance(weight, QuantizedWeight) else weight
        self.out_features, self.in_features = numbers.shape
        self.device = numbers.device
        self._product: Callable[[torch.Tensor], torch.Tensor]
        if isinstance(weight, QuantizedWeight):
            self._product = int8_product(weight, bias)
        elif not can_pack(weight):
            self._product = lambda x: functional.linear(x, weight, bias)
        elif can_block(weight) and has_bfloat16_kernels():
            self._product = BlockedMatmul(weight, bias)
        else:
            self._product = OneDnnMatmul(weight, bias, batch_invariant=batch_invariant)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] → [tokens, out]."""
        return self._product(x)


def make_linear(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None, *, batch_invariant: bool = True
) -> Linear:
    """Build the linear layer that suits the device and dtype of `weight` [out, in], or its quantization.

    Args:
        weight: this rank's slice, on its final device and in its final dtype. The caller must not keep it, so that a
            packed copy replaces it.
        bias: [out] or None.
        batch_invariant: whether a row's result must be bit-equal whatever the number of rows, in bfloat16 on the CPU.
    """
    return Linear(weight, bias, batch_invariant=batch_invariant)
