"""y = x @ (codes * scale).T + bias on the CPU, with weights of a byte each and activations in bfloat16.

It knows one product and its blocked weight. It does not know what the bytes stand for (int8_matmul.py, fp8_matmul.py).

The weight lies as in matmul.py, a byte a number, so that half as much comes out of memory. Weights are widened in
registers (for more than six rows once a stretch, into a buffer) and multiplied as bfloat16 weights are, in the same
order; a feature's scale multiplies its finished sum. Rows are bit-equal in any company here, too.
"""

from __future__ import annotations

import torch

from trtrun.kernels.cpu.byte_matmul_code import UNPACKED_BYTES
from trtrun.kernels.cpu.machine import Kernel
from trtrun.kernels.cpu.matmul import BlockedProduct, pack_blocks
from trtrun.kernels.cpu.matmul_code import BLOCK


class BlockedByteMatmul(BlockedProduct):
    """The product with one weight of a byte a number, which it keeps in blocks.

    Args:
        codes: [out, in] of a dtype of one byte on the CPU; `in` is even. It is copied.
        scale: [out] float32.
        bias: [out] bfloat16 or None.
        kernel: compiled for what the bytes stand for.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, kernel: Kernel) -> None:
        features = codes.shape[0]
        blocks = -(-features // BLOCK)
        per_feature = torch.zeros(2, blocks * BLOCK)
        per_feature[0, :features] = scale
        if bias is not None:
            per_feature[1, :features] = bias
        of_blocks = per_feature.view(2, blocks, BLOCK).transpose(0, 1).contiguous()
        super().__init__(pack_blocks(codes.view(torch.int8)), features, of_blocks, kernel, UNPACKED_BYTES)
