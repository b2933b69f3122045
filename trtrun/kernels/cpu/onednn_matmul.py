"""y = x @ weight.T + bias on the CPU by oneDNN, with the weight packed once into blocks.

Several rows then cost hardly more than one, which is what verification lives on; `F.linear` packs anew at every call.
oneDNN makes a kernel for every shape that it meets, half a megabyte and up to a millisecond each (measured), and keeps
a thousand. Prompts of every length would bring a new shape each, so numbers of rows are rounded up to few.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

_EXACT = 16
# (up to so many rows, round up to a multiple of this); beyond the last, its multiple goes on.
_STEPS = ((128, 16), (512, 64), (1 << 62, 256))


def bucket_rows(rows: int) -> int:
    """The number of rows to compute for `rows` that are wanted: exact up to 16, at most an eighth more on average."""
    if rows <= _EXACT:
        return rows
    step = next(step for limit, step in _STEPS if rows <= limit)
    return -(-rows // step) * step


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
