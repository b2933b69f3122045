"""Masks of tokens in Triton for CUDA: logits are copied, and what a bit forbids becomes -inf.

It knows logits and bits; what these are is sampling/row_steps.py's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.triton.compilation.source_keys import settle_keys

_PIECE = 2048


@triton.jit(do_not_specialize=["vocabulary", "words"], do_not_specialize_on_alignment=["places", "bits"])
def _mask_kernel(logits, places, bits, output, vocabulary, words, PIECE: tl.constexpr):
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = piece * PIECE + tl.arange(0, PIECE)
    inside = token < vocabulary
    value = tl.load(logits + line * vocabulary + token, mask=inside, other=0.0)
    place = tl.load(places + line).to(tl.int64)
    is_masked = (tl.zeros_like(token) + place) >= 0
    word = tl.load(bits + place * words + token // 32, mask=inside & is_masked, other=-1)
    is_allowed = ((word >> (token % 32)) & 1) == 1
    tl.store(output + line * vocabulary + token, tl.where(is_allowed, value, float("-inf")), mask=inside)


def mask_tokens(logits: torch.Tensor, places: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """See TorchOperations.mask_tokens."""
    logits, vocabulary = logits.contiguous(), logits.shape[-1]
    output = torch.empty_like(logits)
    lines = places.numel()
    if lines:
        _mask_kernel[(lines, triton.cdiv(vocabulary, _PIECE))](
            logits, places.contiguous(), bits, output, vocabulary, bits.shape[1], PIECE=_PIECE, num_warps=4
        )
    return output


settle_keys(globals())
