"""How a token's keys and values lie in the store: a KV format, registered under its name (`kv_cache.dtype`).

A format says how many numbers of which dtype a token takes for one head, and turns keys or values into them and back.
The numbers of a token are its own alone, scales among them: so blocks and tokens are copied as they are, and a drafted
token is read back as the same token of plain decoding is.

`auto`, the only one here, keeps keys and values as the model has them; kernels read it where it lies. Any other is read
and written by attention in plain torch (trtrun/attention/gather.py). It knows no block, row or model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from trtrun.registry import Registry

if TYPE_CHECKING:  # processes that only check a configuration do without
    import torch


class KVFormat(ABC):
    """One way to keep keys and values."""

    is_plain = False
    """Whether they lie as the model has them, for kernels that read the store in place."""

    @abstractmethod
    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """How many numbers a head of `head_dim` numbers of `dtype` takes for a token, and of which dtype. Zeros must
        decode to finite numbers: a store begins with them."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values [n, head_dim] of the model's dtype → [n, numbers] as they are stored."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[…, numbers] as they are stored → keys or values […, head_dim] of `dtype`."""


class PlainKV(KVFormat):
    """Keys and values as the model has them."""

    is_plain = True

    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """See KVFormat."""
        return head_dim, dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """See KVFormat."""
        return rows

    def decode(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """See KVFormat."""
        return stored


KV_FORMATS: Registry[KVFormat] = Registry("kv_cache.dtype")
PLAIN = KV_FORMATS.register("auto")(PlainKV())
