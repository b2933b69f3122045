"""y = x @ (codes * scale).T + bias on the CPU, with weights of a byte each and activations in bfloat16: the product
with integers of 8 bits, and what it shares with that of E4M3 (fp8_matmul.py).

It knows one product and its blocked weight. It does not know how codes and scales came about. An integer of 8 bits is a
bfloat16 without loss.

The weight lies as in matmul.py, a byte a number, so that half as much comes out of memory. Weights are widened in
registers (for more than six rows once a stretch, into a buffer) and multiplied as bfloat16 weights are, in the same
order; a feature's scale multiplies its finished sum. Rows are bit-equal in any company here, too.
"""

from __future__ import annotations

import functools

import torch

from trtrun.kernels.cpu.byte_matmul_code import UNPACKED_BYTES, int8_matmul_module
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, Kernel, load_kernels, processor_name
from trtrun.kernels.cpu.matmul import BlockedProduct, pack_blocks
from trtrun.kernels.cpu.matmul_code import FORMS, KERNEL, prefetch_for


class BlockedByteMatmul(BlockedProduct):
    """The product with one weight of a byte a number, which it keeps in blocks.

    Args:
        codes: [out, in] of a dtype of one byte on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
        kernel: compiled for what the bytes stand for.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel) -> None:
        features, form = codes.shape[0], FORMS[MULTIPLIES_BFLOAT16]
        blocks = -(-features // form.block)
        per_feature = torch.zeros(2, blocks * form.block)
        per_feature[0, :features] = scale
        if bias is not None:
            per_feature[1, :features] = bias
        of_blocks = per_feature.view(2, blocks, form.block).transpose(0, 1).contiguous()
        packed = pack_blocks(codes.view(torch.int8), form.block)
        super().__init__(packed, features, of_blocks, kernel, form, UNPACKED_BYTES)


class BlockedInt8Matmul(BlockedByteMatmul):
    """The product with one weight of 8 bits, which it keeps in blocks.

    Args:
        codes: [out, in] int8 on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(codes, scale, bias, _kernel())


@functools.cache
def _kernel() -> Kernel:
    return load_kernels(int8_matmul_module, prefetch_for(processor_name()), names=(KERNEL,))[KERNEL]
