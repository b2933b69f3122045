"""Rotation of queries and keys by the angles of their tokens (RoFormer, arXiv:2104.09864), for attention that has no
kernel of its own for it.

It knows tensors. It does not know positions or how angles are made (trtrun.layers.rotary).
"""

from __future__ import annotations

import torch

from trtrun.kernels.cpu import fused as native


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """heads [tokens, heads, head] turned by cosines and signed sines [tokens, 1, head]; a new tensor.

    Each product and the sum are rounded to the dtype, as transformers does; a fused multiply-add would round
    differently in vectorised loops and in their scalar tails, and so depend on the number of tokens.
    """
    half = heads.shape[2] // 2
    if native.rotates(heads.dtype, heads.device, heads.shape[2]):
        return native.rotate(heads, cosine, sine)
    return (heads * cosine).add_(torch.roll(heads, half, 2).mul_(sine))
