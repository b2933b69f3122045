"""Small operations of a decoder layer, each fused into one Triton kernel for CUDA.

They round where the plain torch operations beside their callers round, so that a model computes the same on either path
but for the order of sums. It knows tensors; it does not know when Triton can be used (see support.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_FEATURES = 1024
"""Features that one program of `silu_and_multiply` computes."""


@triton.jit
def _add_and_normalise_kernel(
    hidden, delta, weight, output, epsilon, SIZE: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    kind = hidden.dtype.element_ty
    value = tl.load(hidden + row * SIZE + element, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(delta + row * SIZE + element, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * SIZE + element, value.to(kind), mask=inside)
        value = value.to(kind).to(tl.float32)
    mean = tl.sum(value * value, axis=0) / SIZE
    normal = (value * tl.rsqrt(mean + epsilon)).to(kind).to(tl.float32)
    factor = tl.load(weight + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + element, (normal * factor).to(kind), mask=inside)


def add_and_normalise(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """hidden += delta, in place, then RMSNorm of it.

    Args:
        hidden: [tokens, size], contiguous, on CUDA.
        delta: [tokens, size], contiguous, or None to normalise only.
        weight: [size].
        epsilon: added to the mean square.

    Returns:
        [tokens, size].
    """
    output = torch.empty_like(hidden)
    tokens, size = hidden.shape
    _add_and_normalise_kernel[(tokens,)](
        hidden, hidden if delta is None else delta, weight, output, epsilon,
        SIZE=size, PADDED=triton.next_power_of_2(size), ADDS=delta is not None, num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return output


@triton.jit
def _silu_and_multiply_kernel(fused, output, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < FEATURES
    kind = fused.dtype.element_ty
    gate = tl.load(fused + row * 2 * FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * FEATURES + FEATURES + element, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(output + row * FEATURES + element, (active * up).to(kind), mask=inside)


def silu_and_multiply(fused: torch.Tensor) -> torch.Tensor:
    """silu of the first half of the features times the second: [tokens, 2 * features] dense → [tokens, features]."""
    tokens, features = fused.shape[0], fused.shape[1] // 2
    output = fused.new_empty((tokens, features))
    _silu_and_multiply_kernel[(tokens, triton.cdiv(features, _FEATURES))](
        fused, output, FEATURES=features, BLOCK=_FEATURES, num_warps=4
    )
    return output


@triton.jit
def _rotate_kernel(
    heads, cosine, sine, output, token_stride, head_stride, count, HEAD: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    element = tl.arange(0, PADDED)
    inside = element < HEAD
    kind = heads.dtype.element_ty
    base = heads + token * token_stride + head * head_stride
    own = tl.load(base + element, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(base + (element + HEAD // 2) % HEAD, mask=inside, other=0.0).to(tl.float32)
    straight = (own * tl.load(cosine + token * HEAD + element, mask=inside, other=0.0).to(tl.float32)).to(kind)
    crossed = (partner * tl.load(sine + token * HEAD + element, mask=inside, other=0.0).to(tl.float32)).to(kind)
    rotated = (straight.to(tl.float32) + crossed.to(tl.float32)).to(kind)
    tl.store(output + (token * count + head) * HEAD + element, rotated, mask=inside)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate [tokens, heads, head_dim] by cosines and signed sines [tokens, 1, head_dim]; see RotaryEmbedding."""
    tokens, count, head_dim = heads.shape
    output = heads.new_empty(heads.shape)
    _rotate_kernel[(tokens, count)](
        heads, cosine, sine, output, heads.stride(0), heads.stride(1), count,
        HEAD=head_dim, PADDED=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return output
