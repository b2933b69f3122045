"""Attention over latents as a model sees it, which implementation a device gets, and the one that runs on any device.

A token's latent, with the rotated part of its key behind it, is a key that all heads share, and its first numbers are
the value. So a backend is told one vector a token, and the store has it once. Which token sees which one stands in
trtrun.kvcache.segments. It knows neither heads' matrices nor where latents come from.
"""

from __future__ import annotations

from typing import Protocol

import torch

from trtrun.attention.backend import GatherAttention
from trtrun.errors import ConfigError
from trtrun.kernels.arguments import AttentionCall, LatentCall
from trtrun.kernels.chooser import operations_of
from trtrun.kernels.cpu.fused import rotate
from trtrun.kvcache.formats import PLAIN, ByteKV, KVFormat


class LatentBackend(Protocol):
    """One way to write latents to the store and to attend over them.

    Attributes:
        tile: see AttentionBackend.
    """

    tile: int | None

    def forward(self, call: LatentCall) -> torch.Tensor:
        """Rotate what is rotated of queries and keys, store the new latents, then attend.

        Returns:
            [places, heads, rank] in the queries' dtype.
        """
        ...

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        """Copy all layers' latents of single tokens; see AttentionBackend."""
        ...


def attend_over_latents(backend: LatentBackend, call: LatentCall) -> torch.Tensor:
    """`LatentBackend.forward`, where tokens may stand at several places; see `trtrun.attention.backend.attend`."""
    forks = call.batch.forks
    if forks is None:
        return backend.forward(call)
    of_tokens = (call.query, call.turned_query, call.latent, call.turned_key)
    query, turned_query, latent, turned_key = (part.index_select(0, forks.nodes) for part in of_tokens)
    call = call._replace(query=query, turned_query=turned_query, latent=latent, turned_key=turned_key)
    return backend.forward(call).index_select(0, forks.places)


class GatherLatents:
    """Gathers each row's latents into one contiguous context, as `GatherAttention` does; a query's bits as there."""

    tile: int | None = None

    def __init__(self, kv_format: KVFormat = PLAIN) -> None:
        """Read and write a store of this format."""
        self._gather = GatherAttention(kv_format)

    def copy_tokens(
        self, store: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offset: torch.Tensor
    ) -> None:
        self._gather.copy_tokens(store, source, target, offset)

    def forward(self, call: LatentCall) -> torch.Tensor:
        turned = torch.cat((call.turned_query, call.turned_key.unsqueeze(1)), dim=1)
        if call.interleaved:
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), dim=2)
        turned = rotate(turned, *call.angles)
        query = torch.cat((call.query, turned[:, :-1]), dim=2)
        key = torch.cat((call.latent, turned[:, -1]), dim=1)
        inner = AttentionCall(
            query, key.unsqueeze(1), call.angles, call.store_layer, call.batch, call.scale, window=None
        )
        return self._gather.store_and_attend(query, key, inner)[..., : call.latent.shape[1]]


def latent_backend(device: torch.device, dtype: torch.dtype, width: int, kv_format: KVFormat = PLAIN) -> LatentBackend:
    """The backend for a model: kernels that read latents where they lie and know their format, where there are any,
    else gathered contexts.

    Args:
        device, dtype: of the model.
        width: numbers that are kept of a token.
        kv_format: how they are kept.

    Raises:
        ConfigError: latents cannot be kept in the format there.
    """
    check_latents(kv_format, device.type, width)
    own = None
    if device.type in kv_format.kernels:
        own = operations_of(device.type).latent_attention(dtype, kv_format)
    return GatherLatents(kv_format) if own is None else own


def check_latents(kv_format: KVFormat, device_type: str, width: int) -> None:
    """Whether latents of `width` numbers can be kept in a format on a type of device.

    Raises:
        ConfigError: they cannot.
    """
    if not isinstance(kv_format, ByteKV):
        return
    if kv_format.has_layer_scales:
        raise ConfigError("latents have no scales of layers, which the checkpoint has: write kv_cache.dtype: plain")
    if device_type == "cuda" and width % 2:
        raise ConfigError(
            f"latents of {width} numbers are kept as they are on GPUs, whose kernels read codes of 8 bits in pairs: "
            "write kv_cache.dtype: plain"
        )
