"""Copying whole blocks within an engine's store, in all of its tensors. It knows stores; not whose blocks they are."""

from __future__ import annotations

import torch

from trtrun.kernels.chooser import operations_of
from trtrun.kvcache.store import KVStore


def copy_blocks(store: KVStore, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy all layers' keys and values of blocks.

    Args:
        store: of the engine.
        source: [n] int64 blocks on its device.
        target: [n] int64 blocks, none twice; one that is a source, too, is its own.
    """
    for data, of_source, of_target in store.parts(source, target):
        operations_of(data.device.type).copy_blocks(data, of_source, of_target)
