"""y = x @ weight.T + bias on the CPU by oneDNN, with the weight packed once into blocks.

Several rows then cost hardly more than one, which is what verification lives on; `F.linear` packs anew at every call.
It knows one product. It does not know when trtrun's own kernel is the better one (trtrun.linear).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from trtrun.kernels.cpu.row_buckets import bucket_rows

_ROWS_FOR_ONE = 4
"""Rows computed where one is wanted and must be bit-equal to the same row among others."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of `dtype` on `device` here: bfloat16 and float32 on CPUs, as torch was built."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


class OneDnnMatmul:
    """x @ weight.T + bias with a weight that oneDNN has packed.

    Args:
        weight: [out, in] on the CPU, bfloat16 or float32.
        bias: [out] or None.
        batch_invariant: whether a row's result must be bit-equal whatever the number of rows, in bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, batch_invariant: bool) -> None:
        # In bfloat16 oneDNN gives bit-equal rows for any number of rows from two on, while a single row may take
        # another kernel that adds up in another order. Verification computes draft_len + 1 rows where plain decoding
        # computes one: computing four in its place keeps both bit-equal. (Measured on Zen 5: one row takes 0.93 of the
        # time of two, four take 0.97.) float32 comes here only where trtrun's own kernels do not run, and has no such
        # promise to keep there: its one-row kernel is much faster.
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
