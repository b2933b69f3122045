"""Whether prompts go through the kernel of this folder: asked once for each kind of store, by comparing bits.

Where it cannot be used, the kernel of `paged_attention` attends for prompts, too. It knows no model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtrun.kernels.triton.attention.attention_tiles import SHARE
from trtrun.kernels.triton.compilation.launches import is_collecting
from trtrun.kernels.triton.gluon_works import has_same_bits, is_hopper

_chosen: dict[tuple[torch.device, torch.dtype, int, int, bool], bool] = {}


def is_chosen(store_layer: torch.Tensor, has_sinks: bool, reference: Callable[..., None]) -> bool:
    """Whether the kernel runs here and has the same bits as another.

    Args:
        store_layer: [2, blocks, kv_heads, block, head], of the kind that is asked for.
        has_sinks: whether heads have sinks.
        reference: the other; takes the arguments of `prompts.attention.attend`.
    """
    block_size, head_dim = store_layer.shape[3:]
    kind = (store_layer.device, store_layer.dtype, head_dim, block_size, has_sinks)
    if kind not in _chosen:
        if not _suits(*kind[:4]):
            _chosen[kind] = False
        elif torch.cuda.is_current_stream_capturing():
            return False  # nothing can be read back now: the next one asks
        elif is_collecting():
            return has_same_bits("attention of prompts", lambda: _compare(*kind, reference))
        else:
            _chosen[kind] = has_same_bits("attention of prompts", lambda: _compare(*kind, reference))
    return _chosen[kind]


def _suits(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
    """Whether the kernel is for this device and a store of such heads and blocks."""
    return (
        is_hopper(device)
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and block_size in (8, 16, 32, 64, 128)
    )


def _compare(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    has_sinks: bool,
    reference: Callable[..., None],
) -> bool:
    """Whether both have the same bits for the last queries of a prompt of several shares."""
    from trtrun.kernels.triton.attention.prompt_attention import attend

    context, queries, heads = 3 * SHARE - 40, 100, 2
    blocks = -(-context // block_size)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    query, store = random(queries, heads, head_dim), random(2, blocks + 1, 1, block_size, head_dim)
    tables = torch.arange(blocks, 0, -1, device=device).unsqueeze(0)
    positions = torch.arange(context - queries, context, device=device).unsqueeze(0)
    sinks = torch.tensor([1.5, -0.3], device=device) if has_sinks else None
    found, expected = torch.empty_like(query), torch.empty_like(query)
    for kernel, output in ((attend, found), (reference, expected)):
        kernel(query, store, tables, positions, head_dim**-0.5, 1 << 30, output, sinks=sinks)
    return torch.equal(found, expected)
