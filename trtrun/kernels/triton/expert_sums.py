"""What experts made of a token, added up by its shares, on CUDA: in a kernel of its own, or in that of the norm behind
them (fused.py), with the same bits. It knows tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trtrun.kernels.arguments import ExpertSums
from trtrun.kernels.triton.early_launch import begin, early


@triton.jit
def sum_of_experts(made, shares, token, element, inside, size, CHOSEN: tl.constexpr):
    """float32 like `element`: some elements of what a token's experts made, added up in their order, each by an
    operation that rounds once. Of what has no share nothing is added, whatever it is."""
    values = ()
    for place in tl.static_range(CHOSEN):
        pair = token * CHOSEN + place
        values += (tl.load(made + pair * size + element, mask=inside, other=0.0),)  # type: ignore[assignment]
    # A compiler would spare registers, and ask for some numbers only once others have come. Nothing is computed before
    # shares are there, and these are not asked for before the barrier, which waits for no number.
    tl.debug_barrier()
    total = tl.zeros(element.shape, tl.float32)
    for place in tl.static_range(CHOSEN):
        share = tl.broadcast_to(tl.load(shares + token * CHOSEN + place), element.shape)
        total = tl.where(share == 0.0, total, tl.fma(values[place].to(tl.float32), share, total))
    return total


@triton.jit
def _add_kernel(made, shares, output, size, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < size
    total = sum_of_experts(made, shares, token, element, inside, size, CHOSEN)
    tl.store(output + token * size + element, total.to(output.dtype.element_ty), mask=inside)


def add_up(sums: ExpertSums) -> torch.Tensor:
    """[tokens, hidden], rounded once."""
    tokens, num_chosen, columns = sums.made.shape
    output = sums.made.new_empty((tokens, columns))
    block = min(1024, triton.next_power_of_2(columns))
    if tokens:
        _add_kernel[(tokens, triton.cdiv(columns, block))](
            *sums, output, columns, CHOSEN=num_chosen, BLOCK=block, num_warps=4, **early(output)
        )
    return output
