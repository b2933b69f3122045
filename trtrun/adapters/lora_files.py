"""The tensors of an adapter that PEFT saved: checked against the base model before one is read, and cut as the base's
matrices are for a rank of a tensor-parallel group.

Of a matrix whose outputs are shared out a rank has all of `down` and its rows of `up`; of one whose inputs are, its
columns of `down` and all of `up`, so that adding up what ranks make of the layer adds up the adapter's part, too. It
knows names and shapes of base matrices. It does not know requests or who has which slot.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trtrun.adapters.lora_config import WEIGHTS_FILE, read_lora_config
from trtrun.errors import CheckpointError, nearest, reading, shorten
from trtrun.kernels.torch.low_rank import Factors
from trtrun.linear.adapted import AdaptedLayers, AdapterSpace
from trtrun.linear.quantization.base import FLOATS, LinearWeight, TensorSlice
from trtrun.models.checkpoint import TORCH_NAMES, Checkpoint
from trtrun.models.config import ModelConfig
from trtrun.models.decoder import CausalLM
from trtrun.models.weight_loader import is_finite
from trtrun.models.weights import HeldWeight, Share

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

_SHARES_BYTES = 8 * 4
"""Of a number of `down`'s result on GPUs, in float32."""

ReadAdapter = list[list[Factors | None]]
"""What a rank has of an adapter, layer by layer, as `AdaptedLayers.layers` has them."""


class LoraFiles:
    """The files of one adapter, which fit the base model."""

    def __init__(self, path: Path, model: ModelConfig, max_rank: int) -> None:
        """Open the directory, and check every name, shape and dtype.

        Args:
            path: the directory.
            model: the base.
            max_rank: of the slots.

        Raises:
            CheckpointError: anything wrong with it, in one line.
        """
        self.path = path
        self._config = read_lora_config(path)
        self._files = Checkpoint(path, (WEIGHTS_FILE,), "adapter")
        with reading(path, CheckpointError):
            self._modules = self._check_modules(adaptable_modules(model))
            for module, shape in self._modules.items():
                self._check_shapes(module, shape, max_rank)

    def _check_modules(self, known: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The modules that it changes, which its configuration and its tensors agree on."""
        found: dict[str, set[str]] = {}
        for name in self._files.names():
            end = next((end for end in (_DOWN, _UP) if name.endswith(end)), None)
            module = name.removeprefix(_PREFIX).removesuffix(end or "")
            if end is None or not name.startswith(_PREFIX) or module not in known:
                raise CheckpointError(
                    f"{self.path}: tensor {shorten(name)} is not supported: adapters of the linear layers of this "
                    f"model are{nearest(module, known) if len(known) < 1000 and end is not None else ''}"
                )
            found.setdefault(module, set()).add(end)
        for module, ends in found.items():
            for end in (_DOWN, _UP):
                if end not in ends:
                    raise CheckpointError(f"{self.path} has no tensor '{_PREFIX}{module}{end}'")
            if not self._config.is_target(module):
                raise CheckpointError(f"{self.path}: tensors of {module}, which target_modules does not name")
        missing = next((module for module in known if self._config.is_target(module) and module not in found), None)
        if missing is not None:
            raise CheckpointError(f"{self.path}: target_modules names {missing}, of which there are no tensors")
        if not found:
            raise CheckpointError(f"{self.path}: target_modules names no linear layer of this model")
        return {module: known[module] for module in known if module in found}

    def _check_shapes(self, module: str, shape: tuple[int, ...], max_rank: int) -> None:
        rank = self._config.rank_of(module)
        if rank > max_rank:
            raise CheckpointError(
                f"{self.path}: {module} has rank {rank}, more than adapter_slots.max_rank, which is {max_rank}: "
                f"set that to {rank} or more"
            )
        for end, wanted in ((_DOWN, (rank, shape[1])), (_UP, (shape[0], rank))):
            name = f"{_PREFIX}{module}{end}"
            if self._files.shape(name) != wanted:
                raise CheckpointError(
                    f"{self._files.file(name)}: tensor '{name}' has shape {list(self._files.shape(name))}, but the "
                    f"base model and a rank of {rank} call for {list(wanted)}"
                )
            if TORCH_NAMES.get(self._files.dtype_code(name)) not in FLOATS:
                raise CheckpointError(
                    f"{self._files.file(name)}: tensor '{name}' has dtype {self._files.dtype_code(name)}; known: "
                    f"{', '.join(FLOATS)}"
                )

    def read(self, layers: AdaptedLayers, dtype: torch.dtype) -> ReadAdapter:
        """A rank's share, on the host in the dtype of activations; scales are in `up`.

        Raises:
            CheckpointError: a tensor holds values that are not finite, or not in that dtype.
        """
        with reading(self.path, CheckpointError):
            try:
                return [self._read_layer(weight, dtype) for weight, _ in layers.layers]
            finally:
                self._files.close()

    def _read_layer(self, weight: LinearWeight, dtype: torch.dtype) -> list[Factors | None]:
        return [self._read_part(part, dtype) for part in weight.parts]

    def _read_part(self, part: TensorSlice, dtype: torch.dtype) -> Factors | None:
        module = _module_of(part.name)
        if module not in self._modules:
            return None
        every = range(self._config.rank_of(module))
        outputs, inputs = part.ranges
        scale = self._config.scale_of(module)
        down = self._tensor(f"{_PREFIX}{module}{_DOWN}", (every, inputs), 1.0, dtype)
        return Factors(down, self._tensor(f"{_PREFIX}{module}{_UP}", (outputs, every), scale, dtype))

    def _tensor(self, name: str, ranges: tuple[range, ...], scale: float, dtype: torch.dtype) -> torch.Tensor:
        """A slice, multiplied by `scale` in float32 and rounded once."""
        result = torch.empty([len(item) for item in ranges], dtype=dtype)
        for offset, piece in self._files.pieces(name, ranges):
            result[offset : offset + piece.shape[0]].copy_(piece.float() * scale)
        if not is_finite(result):
            raise CheckpointError(
                f"{self._files.file(name)}: tensor '{name}' holds NaN or infinite values in "
                f"{str(dtype).removeprefix('torch.')}; the file is damaged or needs another dtype"
            )
        return result


def load_adapter(model: CausalLM, slot: int, path: Path) -> None:
    """Fill a slot of a rank's model; nothing changes where that fails.

    Raises:
        CheckpointError: see LoraFiles, and `LoraFiles.read`.
    """
    layers = model.adapted
    assert layers is not None, "the configuration leaves room for adapters"
    adapter = LoraFiles(path, model.config, layers.space.max_rank).read(layers, model.dtype)
    for (_, layer), factors in zip(layers.layers, adapter, strict=True):
        layer.put(slot, factors)


def open_adapter(name: str, path: Path, model: ModelConfig, max_rank: int) -> LoraFiles:
    """The files of an adapter of the configuration.

    Raises:
        CheckpointError: see LoraFiles; the line begins with the key.
    """
    try:
        return LoraFiles(path, model, max_rank)
    except CheckpointError as error:
        raise CheckpointError(f"adapters.{name}: {error}") from None


def adaptable_modules(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The matrices of a model that adapters may change, by the names of their modules, and their shapes [out, in]."""
    return {
        _module_of(part.name): part.shape
        for layer in model.layers
        for weight in layer.weights()
        if weight.use == "linear"
        for part in weight.parts
    }


def adapter_bytes(model: ModelConfig, rank: int, size: int, space: AdapterSpace, dtype: torch.dtype) -> int:
    """Bytes that all slots take on a rank of a tensor-parallel group, told from shapes alone."""
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


def _module_of(name: str) -> str:
    return name.removesuffix(".weight")
