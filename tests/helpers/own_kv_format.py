"""A KV format of the tests' own: what one takes, and no file of the product.

`rounded` keeps a head's numbers as int8 with one float32 scale of their own behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trtrun.kvcache.formats import KV_FORMATS, RowFormat

_SCALE_BYTES = 4


class RoundedKV(RowFormat):
    """int8 and a scale."""

    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim + _SCALE_BYTES, torch.int8

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        scale = rows.float().abs().amax(dim=-1, keepdim=True) / 127
        codes = (rows.float() / scale.clamp(min=1e-20)).round().to(torch.int8)
        return torch.cat((codes, scale.contiguous().view(torch.int8)), dim=-1)

    def decode(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        scale = stored[..., head_dim:].contiguous().view(torch.float32)
        return (stored[..., :head_dim].float() * scale).to(dtype)


@contextmanager
def own_kv_format() -> Iterator[None]:
    """`kv_cache.dtype: rounded` is there, as those of the product are."""
    KV_FORMATS.register("rounded")(RoundedKV())
    try:
        yield
    finally:
        del KV_FORMATS._items["rounded"]
