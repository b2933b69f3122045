"""Which products go through the kernel of this folder: those of few rounded rows in graphs, where it has the bits of
the general kernel. That is asked once for each kind of rows, by comparing.

It knows no model, and imports the kernel when it is asked.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.kernels.rounded_rows import RoundedRows
from trtrun.kernels.triton.collecting import is_collecting
from trtrun.kernels.triton.gluon_works import has_same_bits, is_hopper

_MOST_ROWS = 16
"""With 32 and more, fewer steps of weights have room on their way, and the general kernel is as fast."""

_ALIGNED = 16
"""The copy engine reads rows that begin at a multiple of so many bytes."""

_COMPARED = ((1, 4096), (5, 1040), (16, 528))
"""Rows and inputs: more steps than are on their way, and steps that the inputs do not fill."""

Product = Callable[[RoundedRows, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Rounded rows, codes, scales and a bias to a result, as `fp8_matmul.chain_product`."""

_chosen: dict[tuple[torch.device, torch.dtype, bool], bool] = {}


class Streamed:
    """The product with one weight by that kernel, for whom it is.

    Args:
        codes: [out, in] E4M3, contiguous.
        scale: [out] float32.
        bias: [out] in the dtype of activations, or None.
        reference: the general kernel.
    """

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, reference: Product) -> None:
        self._weight, self._reference = (codes, scale, bias), reference
        self._suits = is_hopper(codes.device) and codes.shape[1] % _ALIGNED == 0 and codes.data_ptr() % _ALIGNED == 0
        self._product: Callable[[RoundedRows], torch.Tensor] | None = None

    def takes(self, x: RoundedRows) -> bool:
        """Whether x is for it: few rows, in a graph. Elsewhere a launch counts, which takes the host twice as long."""
        if not self._suits or not 0 < len(x.codes) <= _MOST_ROWS:
            return False
        kind = (x.codes.device, x.dtype, self._weight[2] is not None)
        is_capturing = torch.cuda.is_current_stream_capturing()
        if kind not in _chosen and not is_capturing:  # nothing can be read back from a graph: what runs before it asks
            is_equal = has_same_bits("product of few rounded rows", lambda: _compare(*kind, self._reference))
            if not is_collecting():
                _chosen[kind] = is_equal
        return is_capturing and _chosen.get(kind, False)

    def __call__(self, x: RoundedRows) -> torch.Tensor:
        """Rounded rows that it takes → [rows, out] in their dtype."""
        if self._product is None:
            from trtrun.kernels.triton.fp8_stream.product import StreamedProduct

            self._product = StreamedProduct(*self._weight)
        return self._product(x)


def _compare(device: torch.device, dtype: torch.dtype, adds: bool, reference: Product) -> bool:
    from trtrun.kernels.triton.fp8_rounding import round_activations
    from trtrun.kernels.triton.fp8_stream.product import StreamedProduct

    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    features = 200
    for rows, inputs in _COMPARED:
        x = round_activations(random(rows, inputs).to(dtype))
        codes, scale = random(features, inputs).to(torch.float8_e4m3fn), random(features).abs()
        bias = random(features).to(dtype) if adds else None
        if not torch.equal(StreamedProduct(codes, scale, bias)(x), reference(x, codes, scale, bias)):
            return False
    return True
