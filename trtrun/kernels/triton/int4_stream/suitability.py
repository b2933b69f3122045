"""Decides which products go through the kernel of this folder: those where its bits are the general one's.

The bits are compared once for each kind of rows, and the kernel is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.kernels.torch.integers import GROUP, STEP, TILE, groups_of, pack
from trtrun.kernels.triton.compilation.launches import is_collecting
from trtrun.kernels.triton.gluon_works import has_same_bits, is_hopper
from trtrun.kernels.triton.int4_stream.tiles import height_of, steps_at_once
from trtrun.kernels.triton.support import multiprocessors

_ALIGNED = 16
"""The copy engine reads rows that begin at a multiple of so many bytes."""

General = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The product by the general kernel, as `int_matmul.chain_product`."""

_chosen: dict[tuple[torch.device, torch.dtype, int, int, int, bool], bool] = {}


class Streamed:
    """The product of one weight with the rows that this folder's kernel takes.

    Args:
        words, scales: see trtrun.kernels.torch.integers.
        bias: [out] in the dtype of activations, or None.
        general: the kernel that it takes the place of.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, general: General) -> None:
        self._weight, self._general = (words, scales, bias), general
        self._suits = is_hopper(words.device)
        self._product: Callable[[torch.Tensor, int], torch.Tensor] | None = None

    def takes(self, x: torch.Tensor) -> bool:
        """Whether it takes x."""
        if not self._suits or not len(x):
            return False
        if x.data_ptr() % _ALIGNED or x.stride(0) * x.itemsize % _ALIGNED:
            return False
        height = height_of(len(x), len(self._weight[0]), multiprocessors(x.device))
        parts = groups_of(self._weight[1])
        at_once = steps_at_once(height, parts, self._weight[0].shape[1])
        kind = (x.device, x.dtype, height, parts, at_once, self._weight[2] is not None)
        if kind in _chosen:
            return _chosen[kind]
        if torch.cuda.is_current_stream_capturing():  # nothing can be read back from a graph: what runs before it asks
            return False
        what = f"product of {height} rows with weights of 4 bits in groups of {GROUP // parts}"
        if is_collecting():  # its kernels and those that it is compared with are asked for, and nothing can be learnt
            return has_same_bits(what, lambda: _compare(*kind, self._general) or True)
        _chosen[kind] = has_same_bits(what, lambda: _compare(*kind, self._general))
        return _chosen[kind]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that it takes → [rows, out] in their dtype."""
        if self._product is None:
            from trtrun.kernels.triton.int4_stream.product import StreamedProduct

            self._product = StreamedProduct(*self._weight)
        return self._product(x, height_of(len(x), len(self._weight[0]), multiprocessors(x.device)))


def _compare(
    device: torch.device, dtype: torch.dtype, height: int, parts: int, at_once: int, adds: bool, general: General
) -> bool:
    """More steps than are on their way; and more tiles than there are multiprocessors, with steps that the inputs do
    not fill. Where steps are dealt with one by one there is an odd number of them."""
    from trtrun.kernels.triton.int4_stream.product import StreamedProduct

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 16, shape, generator=generator, device=device)

    is_equal = True
    more = 0 if at_once > 1 else STEP
    for features, inputs in ((3 * TILE, 4096 + more), (TILE * (multiprocessors(device) + 1), 640 + more)):
        groups = inputs // GROUP * parts
        held = pack(codes(features, inputs), random(features, groups).abs(), codes(features, groups))
        bias = random(features) if adds else None
        product = StreamedProduct(**held, bias=bias)
        for rows in (height // 2 + 1, height, *((height + 1, 5 * height) if height >= TILE else ())):
            x = random(rows, inputs)
            found = product(x, height)
            is_equal &= torch.equal(found, general(x, held["words"], held["scales"], bias))
    return is_equal
