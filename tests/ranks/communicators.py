"""Tensors that every rank can make for every other, and their sums, for the tests of communicators."""

from __future__ import annotations

import torch

HALF = (torch.float16, torch.bfloat16)


def sample(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """What rank `rank` holds: every rank can make every other's, so that results are known everywhere."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    if dtype == torch.bool:
        return torch.randint(0, 4, shape, generator=generator) == 0
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 50, shape, generator=generator, dtype=dtype)


def total(size: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The sum over the ranks in rank order; for half types in float32, rounded once."""
    return add_in_order([sample(rank, shape, dtype, salt) for rank in range(size)])


def add_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' tensors in their order; for half types in float32, rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = result + part.to(wide)
    return result.to(dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    left, right = left.cpu(), right.cpu()
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between the elements."""
    spread = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)
    spread[..., 0] = tensor
    return spread[..., 0]
