"""Decides which products of experts in 4 bits go through the kernel in Gluon: those where its bits are the general
one's.

The bits are compared once for each kind, and the kernel is imported only then.
"""

from __future__ import annotations

import torch

from trtrun.kernels.torch import fp4, integers
from trtrun.kernels.torch.experts import ExpertCodes
from trtrun.kernels.torch.integers import GROUP
from trtrun.kernels.triton.coded_experts.four_bits import FEWEST_ROWS, Gate, general_product, group_size
from trtrun.kernels.triton.compilation.launches import is_collecting
from trtrun.kernels.triton.expert_tiles import lay_out
from trtrun.kernels.triton.fused import activate_and_multiply
from trtrun.kernels.triton.gluon_works import has_same_bits, is_hopper

_ALIGNED_INPUTS = 16
"""Rows begin at multiples of so many numbers, which Triton knows and copies 16 bytes at a time for."""

_ALIGNED_GATES = 32
"""Gates and their factors, together."""

_MOST_ROWS_OF_WHOLE = 64
"""Of whole numbers with a scale for fewer inputs than a group has."""

_chosen: dict[tuple[torch.device, torch.dtype, int, int, bool, bool, Gate | None], bool] = {}


def streams(weight: ExpertCodes, dtype: torch.dtype, rows: int, has_bias: bool, gate: Gate | None = None) -> bool:
    """Whether the kernel in Gluon takes products of activations of a dtype in tiles of so many rows, and the gate."""
    words, has_exponents = weight.tensors["words"], "blocks" in weight.tensors
    if not is_hopper(words.device) or weight.inputs % _ALIGNED_INPUTS:
        return False
    size = group_size(weight)
    takes = dtype is torch.bfloat16 if has_exponents else size == GROUP or rows <= _MOST_ROWS_OF_WHOLE
    if not takes:
        return False
    if gate is not None and weight.features % _ALIGNED_GATES:
        return False
    kind = (words.device, dtype, rows, size, has_exponents, has_bias, gate)
    if kind in _chosen:
        return _chosen[kind]
    if torch.cuda.is_current_stream_capturing():  # nothing can be read back from a graph: what runs before it asks
        return False
    what = f"product of experts in {'numbers' if has_exponents else 'whole numbers'} of 4 bits by {size}"
    if is_collecting():  # its kernels and those that it is compared with are asked for, and nothing can be learnt
        return has_same_bits(what, lambda: _compare(*kind) or True)
    _chosen[kind] = has_same_bits(what, lambda: _compare(*kind))
    return _chosen[kind]


def _compare(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    size: int,
    has_exponents: bool,
    has_bias: bool,
    gate: Gate | None,
) -> bool:
    """Several experts of more than a tile, with inputs that fill no step; tiles that are full and others."""
    from trtrun.kernels.triton.coded_experts.four_bits_stream import streamed_product

    generator = torch.Generator(device).manual_seed(0)
    count, features, inputs, chosen = 3, 200 if gate is None else 224, 9 * GROUP + (size if has_exponents else GROUP), 2

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    held = [random_weight(features, inputs, size, has_exponents, dtype, generator) for _ in range(count)]
    weight = ExpertCodes({name: torch.stack([it[name] for it in held]) for name in held[0]}, features, inputs)
    bias = random(count, features) if has_bias else None
    tokens = rows * 2 + 1 + integers.GROUP  # more pairs than have a tile each
    x, experts = random(tokens, inputs), torch.arange(tokens * chosen, device=device).view(tokens, chosen) % count
    tiles, general = lay_out(experts, count, rows), lay_out(experts, count, max(rows, FEWEST_ROWS))
    found = streamed_product(x, weight, bias, tiles, experts.numel(), chosen, gate)
    expected = general_product(x, weight, bias, general, experts.numel(), chosen)
    return torch.equal(found, expected if gate is None else activate_and_multiply(expected, *gate))


def random_weight(
    features: int, inputs: int, size: int, has_exponents: bool, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """One expert's tensors, made up, on the generator's device."""
    device = generator.device
    codes = torch.randint(0, 16, (features, inputs), generator=generator, device=device)
    scale = torch.rand((features, inputs // size), generator=generator, device=device) + 0.5
    if not has_exponents:
        zero = torch.randint(0, 16, scale.shape, generator=generator, device=device)
        return integers.pack(codes, scale.to(dtype), zero, GROUP)
    if size == fp4.MXFP4_BLOCK:
        return fp4.pack(codes, (scale * 8 + 118).to(torch.uint8), 1.0, size)
    return fp4.pack(codes, scale.to(torch.float8_e4m3fn), 0.01, size)
