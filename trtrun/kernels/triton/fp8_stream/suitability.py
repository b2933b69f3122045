"""Decides which products go through the kernels of this folder: those of few rounded rows in graphs, where their bits
are the general ones'. The bits are compared once for each kind of rows and weights, and a kernel is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.kernels.arguments import GROUP, RoundedRows
from trtrun.kernels.triton.compilation.launches import is_collecting
from trtrun.kernels.triton.gluon_works import has_same_bits, is_hopper
from trtrun.kernels.triton.support import multiprocessors

_MOST_ROWS = 16
"""With 32 and more, fewer steps of weights have room on their way, and the general kernel is as fast."""

_ALIGNED = 16
"""The copy engine reads rows that begin at a multiple of so many bytes."""

_COMPARED = ((1, 4096, False), (5, 1040, False), (16, 528, True))
"""Rows, inputs, and whether some program has several tiles: more steps than are on their way, and steps that the inputs
do not fill."""

_FEATURES = 200
"""Output features of the weights that are compared, which do not fill their last tile."""

Product = Callable[[RoundedRows, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rounded rows, codes, scales and a bias to a result, as `fp8_matmul.chain_product`, or
`fp8_block_matmul.chain_block_product`."""

_chosen: dict[tuple[torch.device, torch.dtype, bool, bool], bool] = {}


class Streamed:
    """The product of one weight with the rows that this folder's kernels take.

    Args:
        codes: [out, in] E4M3, contiguous.
        scale: float32 [out], or of blocks [ceil(out / 128), ceil(in / 128)].
        bias: [out] in the dtype of activations, or None.
        reference: the general kernel.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, reference: Product) -> None:
        self._weight, self._reference = (codes, scale, bias), reference
        self._suits = is_hopper(codes.device) and codes.shape[1] % _ALIGNED == 0 and codes.data_ptr() % _ALIGNED == 0
        self._product: Callable[[RoundedRows], torch.Tensor] | None = None

    def takes(self, x: RoundedRows) -> bool:
        """Whether it takes x: few rows, in a graph. Outside of graphs a launch takes the host twice as long."""
        if not self._suits or not 0 < len(x.codes) <= _MOST_ROWS:
            return False
        kind = (x.codes.device, x.dtype, self._weight[2] is not None, self._weight[1].dim() > 1)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if kind not in _chosen and not is_capturing:  # nothing can be read back from a graph: what runs before it asks
            what = "product of few rounded rows" + (" with weights in blocks" if kind[-1] else "")
            is_equal = has_same_bits(what, lambda: _compare(*kind, self._reference))
            if not is_collecting():
                _chosen[kind] = is_equal
        return is_capturing and _chosen.get(kind, False)

    def __call__(self, x: RoundedRows) -> torch.Tensor:
        """Rounded rows that it takes → [rows, out] in their dtype."""
        if self._product is None:
            self._product = _make(*self._weight)
        return self._product(x)


def _make(codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Callable[[RoundedRows], torch.Tensor]:
    if scale.dim() > 1:
        from trtrun.kernels.triton.fp8_stream.block_product import StreamedBlockProduct

        return StreamedBlockProduct(codes, scale, bias)
    from trtrun.kernels.triton.fp8_stream.product import StreamedProduct

    return StreamedProduct(codes, scale, bias)


def _compare(device: torch.device, dtype: torch.dtype, adds: bool, has_blocks: bool, reference: Product) -> bool:
    from trtrun.kernels.triton.fp8_stream.product import TILE
    from trtrun.kernels.triton.fused import round_activations

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    for rows, inputs, has_turns in _COMPARED:
        features = _FEATURES + (TILE.value * multiprocessors(device) if has_turns else 0)
        x = round_activations(random(rows, inputs).to(dtype), "group" if has_blocks else "row")
        codes = random(features, inputs).to(torch.float8_e4m3fn)
        shape = (-(-features // GROUP), -(-inputs // GROUP)) if has_blocks else (features,)
        scale, bias = random(*shape).abs(), random(features).to(dtype) if adds else None
        if not torch.equal(_make(codes, scale, bias)(x), reference(x, codes, scale, bias)):
            return False
    return True
