"""A rank's share of an adapter: read, and put into a slot of the base model's layers.

Of a matrix whose outputs are shared out a rank has all of `down` and its rows of `up`; of one whose inputs are, its
columns of `down` and all of `up`, so that adding up what ranks make of the layer adds up the adapter's part, too. It
knows a rank's layers and files. It does not know requests, or who has which slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trtrun.errors import CheckpointError, wrap_errors
from trtrun.kernels.torch.low_rank import Factors, Install
from trtrun.linear.layer import AdapterSpace
from trtrun.linear.quantization.base import TensorSlice
from trtrun.lora.lora_files import DOWN, PREFIX, UP, LoraFiles, check_adaptable, module_of
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import CausalLM
from trtrun.weights.weight import HeldWeight, Share
from trtrun.weights.weight_loader import is_finite

_SHARES_BYTES = 32 * 4
"""Bytes of a number of `down`'s result on GPUs, in float32."""


def load_adapter(model: CausalLM, slot: int, path: Path) -> None:
    """Fill a slot of a rank's model that no row has; see `read_adapter`."""
    read_adapter(model, path)(slot)


def read_adapter(model: CausalLM, path: Path, on_progress: Callable[[], None] = lambda: None) -> Install:
    """Read an adapter, and make all of it ready that can be while others compute.

    Args:
        model: of the rank.
        path: of the adapter's directory.
        on_progress: called whenever a part of it is there.

    Returns:
        What fills a slot with it.

    Raises:
        CheckpointError: see LoraFiles; or a tensor holds values that are not finite, or not in the model's dtype; or
            there is no memory for it.
    """
    layers = model.adapted
    assert layers is not None, "the configuration leaves room for adapters"
    files = LoraFiles(path, model.config, layers.space.max_rank)
    on_progress()
    with wrap_errors(path, CheckpointError):
        ready: list[Install] = []
        for weight, layer in layers.layers:
            ready.append(layer.prepare([_read(files, part, model.dtype, on_progress) for part in weight.parts]))
        files.tensors.close()
    return lambda slot: _install(ready, slot)


def empty_slot(model: CausalLM, slot: int) -> None:
    """Empty a slot of a rank's model that no row has."""
    assert model.adapted is not None, "the configuration leaves room for adapters"
    _install([layer.prepare([None] * len(weight.parts)) for weight, layer in model.adapted.layers], slot)


def _install(ready: Sequence[Install], slot: int) -> None:
    for install in ready:
        install(slot)


def _read(files: LoraFiles, part: TensorSlice, dtype: torch.dtype, on_progress: Callable[[], None]) -> Factors | None:
    """A rank's share of a matrix's factors, on the host; None where the adapter leaves it as it is."""
    module = module_of(part.name)
    if module not in files.modules:
        return None
    every, scale = range(files.config.rank_of(module)), files.config.scale_of(module)
    outputs, inputs = part.ranges
    down = _tensor(files, f"{PREFIX}{module}{DOWN}", (every, inputs), 1.0, dtype, on_progress)
    return Factors(down, _tensor(files, f"{PREFIX}{module}{UP}", (outputs, every), scale, dtype, on_progress))


def _tensor(
    files: LoraFiles,
    name: str,
    ranges: tuple[range, ...],
    scale: float,
    dtype: torch.dtype,
    on_progress: Callable[[], None],
) -> torch.Tensor:
    """A slice, multiplied by `scale` in float32 and rounded once."""
    result = torch.empty([len(item) for item in ranges], dtype=dtype)
    for offset, piece in files.tensors.pieces(name, ranges):
        result[offset : offset + piece.shape[0]].copy_(piece.float() * scale)
        on_progress()
    if not is_finite(result):
        raise CheckpointError(
            f"{files.tensors.file(name)}: tensor '{name}' holds NaN or infinite values in "
            f"{str(dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
        )
    return result


def adapter_bytes(model: ModelConfig, rank: int, size: int, space: AdapterSpace, dtype: torch.dtype) -> int:
    """Bytes that all slots take on a rank of a tensor-parallel group, told from shapes alone.

    Raises:
        CheckpointError: see `check_adaptable`.
    """
    check_adaptable(model)
    return sum(space.shape(weight).num_elements for weight in _held(model, rank, size)) * dtype.itemsize


def adapter_working_bytes(
    model: ModelConfig, rank: int, size: int, space: AdapterSpace, dtype: torch.dtype, lines: int
) -> int:
    """Upper bound of what adapters of a layer need for `lines` lines: copies of these, what `down` makes of them, in
    shares on GPUs, and of `up` twice."""
    most = 0
    for weight in _held(model, rank, size):
        shape = space.shape(weight)
        copied = (shape.inputs + 2 * max(shape.outputs)) * dtype.itemsize
        most = max(most, copied + len(shape.outputs) * shape.max_rank * (dtype.itemsize + _SHARES_BYTES))
    return most * lines


def _held(model: ModelConfig, rank: int, size: int) -> list[HeldWeight]:
    """What a rank has of the matrices that adapters may change."""
    weights = [weight.cut(Share(rank, size)) for layer in model.layers for weight in layer.weights()]
    return [weight for weight in weights if weight.use == "linear"]
