"""How a token's keys and values lie in the store: a KV format, registered under its name (`kv_cache.dtype`).

A format says how many numbers of which dtype a token takes for one head, writes keys or values as such, and reads them
back. The numbers of a token are its own alone, scales among them: so blocks and tokens are copied as they are, and a
drafted token is read back as the same token of plain decoding is.

`plain` keeps keys and values as the model has them; `fp8` and `int8` keep a byte for each number, and scales. Kernels
read these where they lie. Any other is read and written by attention in plain torch (trtrun/attention/backend.py). It
knows no row or model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from trtrun.errors import ConfigError
from trtrun.registry import Registry

if TYPE_CHECKING:  # processes that only check a configuration do without
    import torch

    from trtrun.kvcache.byte_codes import CodeKind


class KVFormat(ABC):
    """One way to keep keys and values. Those that keep a token's numbers one behind the other are a RowFormat."""

    kernels: frozenset[str] = frozenset()
    """Types of devices whose kernels read the store in place."""

    def check(self, dtype: torch.dtype, device_type: str) -> None:  # noqa: B027 - most formats are for all
        """Whether a model of `dtype` can be kept so on such devices.

        Raises:
            ConfigError: it cannot.
        """

    @abstractmethod
    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """How many numbers a head of `head_dim` numbers of `dtype` takes for a token, and of which dtype. Zeros must
        be read as finite numbers: a store begins with them."""

    @abstractmethod
    def write(
        self, store_layer: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        """Keep keys, then values.

        Args:
            store_layer: [2, blocks, kv_heads, block, numbers].
            index: [n] int64: places of heads of tokens, counted over all of these but the last dimension.
            rows: [n, head_dim] of the model's dtype.
            scales: of the layer; see AttentionCall.
        """

    @abstractmethod
    def read(
        self,
        store_layer: torch.Tensor,
        index: torch.Tensor,
        head_dim: int,
        dtype: torch.dtype,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        """Keys, then values, of whole tiles [block, numbers].

        Args:
            store_layer, scales: as in `write`.
            index: [n] int64: tiles, counted over the first three dimensions.
            head_dim, dtype: of the model.

        Returns:
            [n, block, head_dim].
        """

    @abstractmethod
    def parts(self, store: torch.Tensor) -> Sequence[torch.Tensor]:
        """What the store holds of tokens, [layers, 2, blocks, kv_heads, block, …] each: views of `store`, of that shape
        but for the last dimension."""


class RowFormat(KVFormat):
    """The numbers of a token's head lie one behind the other."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys or values [n, head_dim] of the model's dtype → [n, numbers] as they are stored."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """[…, numbers] as they are stored → keys or values […, head_dim] of `dtype`."""

    @override
    def write(
        self, store_layer: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        store_layer.view(-1, store_layer.shape[-1]).index_copy_(0, index, self.encode(rows))

    @override
    def read(
        self,
        store_layer: torch.Tensor,
        index: torch.Tensor,
        head_dim: int,
        dtype: torch.dtype,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        return self.decode(store_layer.flatten(0, 2).index_select(0, index), head_dim, dtype)

    @override
    def parts(self, store: torch.Tensor) -> Sequence[torch.Tensor]:
        return (store,)


class PlainKV(RowFormat):
    """Keys and values as the model has them."""

    kernels = frozenset({"cpu", "cuda"})

    @override
    def __repr__(self) -> str:
        return "plain"

    @override
    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return head_dim, dtype

    @override
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    @override
    def decode(self, stored: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        return stored


@dataclass(frozen=True)
class ByteKV(KVFormat):
    """A byte for each number (byte_codes.py). A tile has the codes of its tokens, then a scale for each of them; or no
    scales, where each layer has its own for all tokens.

    Attributes:
        kind: of codes.
        has_layer_scales: whether scales are the layers'.
    """

    kind: CodeKind
    has_layer_scales: bool = False

    kernels = frozenset({"cuda"})

    @override
    def check(self, dtype: torch.dtype, device_type: str) -> None:
        """Refuse float32 on GPUs, where texts were those of plain decoding in half precision alone."""
        name = str(dtype).removeprefix("torch.")
        if device_type == "cuda" and name not in ("bfloat16", "float16"):
            raise ConfigError(
                f"on GPUs keys and values are kept in {self.kind} for models in bfloat16 or float16, not in {name}: "
                "write kv_cache.dtype: plain, or dtype: bfloat16"
            )

    @override
    def stored(self, head_dim: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        import torch

        from trtrun.kvcache.byte_codes import ALIGNED, SCALE_BYTES

        if self.has_layer_scales:
            return head_dim, torch.uint8
        return -(-head_dim // ALIGNED) * ALIGNED + SCALE_BYTES, torch.uint8

    @override
    def write(
        self, store_layer: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, scales: torch.Tensor | None
    ) -> None:
        from trtrun.kvcache.byte_codes import scales_of, to_codes

        block_size = store_layer.shape[3]
        tile, token = index // block_size, index % block_size
        if self.has_layer_scales:
            scale = _of_tiles(scales, tile, store_layer)
        else:
            scale = scales_of(rows, self.kind)
            self._scales(store_layer)[tile, token] = scale
        self._codes(store_layer)[..., : rows.shape[1]][tile, token] = to_codes(rows, scale, self.kind)

    @override
    def read(
        self,
        store_layer: torch.Tensor,
        index: torch.Tensor,
        head_dim: int,
        dtype: torch.dtype,
        scales: torch.Tensor | None,
    ) -> torch.Tensor:
        from trtrun.kvcache.byte_codes import from_codes

        codes = self._codes(store_layer)[..., :head_dim].index_select(0, index)
        if self.has_layer_scales:
            scale = _of_tiles(scales, index, store_layer).unsqueeze(1)
        else:
            scale = self._scales(store_layer).index_select(0, index)
        return from_codes(codes, scale, self.kind, dtype)

    @override
    def parts(self, store: torch.Tensor) -> Sequence[torch.Tensor]:
        tiles = store.shape[:4]
        codes = self._codes(store)
        codes = codes.view(*tiles, *codes.shape[1:])
        return (codes,) if self.has_layer_scales else (codes, self._scales(store).view(*tiles, -1, 1))

    def _codes(self, store: torch.Tensor) -> torch.Tensor:
        """[tiles, block, head_dim and what fills it up] uint8: a view."""
        from trtrun.kvcache.byte_codes import SCALE_BYTES

        block_size, width = store.shape[-2:]
        if self.has_layer_scales:
            return store.view(-1, block_size, width)
        tiles = store.view(-1, block_size * width)
        return tiles[:, : block_size * (width - SCALE_BYTES)].view(len(tiles), block_size, -1)

    def _scales(self, store: torch.Tensor) -> torch.Tensor:
        """[tiles, block] float32, all of them numbers of bfloat16: a view."""
        import torch

        from trtrun.kvcache.byte_codes import SCALE_BYTES

        block_size, width = store.shape[-2:]
        return store.view(-1, block_size * width)[:, block_size * (width - SCALE_BYTES) :].view(torch.float32)


def _of_tiles(scales: torch.Tensor | None, tile: torch.Tensor, store_layer: torch.Tensor) -> torch.Tensor:
    """The layer's scales [2, kv_heads] of tiles [n], counted over keys and values, blocks and heads: [n]."""
    assert scales is not None, "a layer with scales of its own hands them over"
    _, blocks, kv_heads = store_layer.shape[:3]
    return scales.flatten()[tile // (blocks * kv_heads) * kv_heads + tile % kv_heads]


KVDtype = Literal["fp8", "int8"]


@dataclass(frozen=True)
class KVScheme:
    """How a checkpoint was made to have keys and values kept.

    Attributes:
        dtype: name of the format.
        has_scales: whether it has scales for every layer.
    """

    dtype: KVDtype
    has_scales: bool


KV_FORMATS: Registry[KVFormat] = Registry("kv_cache.dtype")
PLAIN = KV_FORMATS.register("plain")(PlainKV())
KV_FORMATS.register("auto")(PLAIN)
KV_FORMATS.register("fp8")(ByteKV("fp8"))
KV_FORMATS.register("int8")(ByteKV("int8"))


def choose_format(name: str, scheme: KVScheme | None = None) -> KVFormat:
    """The format of a store.

    Args:
        name: `kv_cache.dtype`; `auto` is what the checkpoint was made for, `plain` where it says nothing.
        scheme: of the checkpoint; None where it has none.

    Raises:
        ConfigError: there is no format of that name.
    """
    if name == "auto" and scheme is not None:
        name = scheme.dtype
    found = KV_FORMATS.get(name)
    if scheme is not None and scheme.dtype == name and scheme.has_scales and isinstance(found, ByteKV):
        return replace(found, has_layer_scales=True)
    return found
