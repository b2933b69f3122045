"""The files of an adapter that PEFT saved, checked against the base model by their headers.

The loader asks it before it reads a tensor, and so does whoever wants to know beforehand. It knows names and shapes of
base matrices, and does without torch. It does not know ranks, or who has which slot.
"""

from __future__ import annotations

from pathlib import Path

from trtrun.errors import CheckpointError, shorten, wrap_errors
from trtrun.linear.quantization.base import FLOATS
from trtrun.lora.lora_config import WEIGHTS_FILE, read_lora_config
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import TORCH_NAMES, Checkpoint
from trtrun.weights.nested_models import text_name

PREFIX = "base_model.model."
"""In front of the names of modules."""

_MOST_HEADER_BYTES = 1 << 22
"""Some 30,000 tensors, ten times those of the largest models."""

DOWN, UP = ".lora_A.weight", ".lora_B.weight"


class LoraFiles:
    """The files of one adapter, which fit the base model.

    Attributes:
        path: of the directory.
        config: its adapter_config.json.
        tensors: its weights.
        modules: that it changes, by their names in the base, with their shapes [out, in].
    """

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
        self.config = read_lora_config(path)
        with wrap_errors(path, CheckpointError):
            _check_header(path / WEIGHTS_FILE)
        self.tensors = Checkpoint(path, (WEIGHTS_FILE,), "adapter", _own_name)
        with wrap_errors(path, CheckpointError):
            if self.tensors.list_files() != [path / WEIGHTS_FILE]:
                raise CheckpointError(f"{path} has no {WEIGHTS_FILE} with tensors: save the adapter with PEFT again")
            self.modules = self._check_modules(adaptable_modules(model))
            for module, shape in self.modules.items():
                self._check_shapes(module, shape, max_rank)

    def _check_modules(self, known: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """The modules that it changes, which its configuration and its tensors agree on."""
        found: dict[str, set[str]] = {}
        for name in self.tensors.names():
            end = next((end for end in (DOWN, UP) if name.endswith(end)), None)
            module = name.removeprefix(PREFIX).removesuffix(end or "")
            if end is None or not name.startswith(PREFIX) or module not in known:
                raise CheckpointError(
                    f"{self.path}: tensor {shorten(name)} is not supported; an adapter changes linear layers "
                    f"of the base, in tensors such as '{PREFIX}{next(iter(known), 'NAME')}{DOWN}'"
                )
            found.setdefault(module, set()).add(end)
        for module, ends in found.items():
            for end in (DOWN, UP):
                if end not in ends:
                    raise CheckpointError(f"{self.path} has no tensor '{PREFIX}{module}{end}'")
            if not self.config.is_target(module):
                raise CheckpointError(
                    f"{self.path}: tensors of {module}, which target_modules does not name, or exclude_modules or "
                    "layers_to_transform leaves out"
                )
        missing = next((module for module in known if self.config.is_target(module) and module not in found), None)
        if missing is not None:
            raise CheckpointError(f"{self.path}: target_modules names {missing}, of which there are no tensors")
        if not found:
            raise CheckpointError(f"{self.path}: target_modules names no linear layer of this model")
        return {module: known[module] for module in known if module in found}

    def _check_shapes(self, module: str, shape: tuple[int, ...], max_rank: int) -> None:
        rank = self.config.rank_of(module)
        if rank > max_rank:
            raise CheckpointError(
                f"{self.path}: {module} has rank {rank}, more than adapter_slots.max_rank, which is {max_rank}: "
                f"set that to {rank} or more"
            )
        for end, wanted in ((DOWN, (rank, shape[1])), (UP, (shape[0], rank))):
            name = f"{PREFIX}{module}{end}"
            if self.tensors.shape(name) != wanted:
                raise CheckpointError(
                    f"{self.tensors.file(name)}: tensor '{name}' has shape {list(self.tensors.shape(name))}, but the "
                    f"base model and a rank of {rank} call for {list(wanted)}"
                )
            if TORCH_NAMES.get(self.tensors.dtype_code(name)) not in FLOATS:
                raise CheckpointError(
                    f"{self.tensors.file(name)}: tensor '{name}' has dtype {self.tensors.dtype_code(name)}; known: "
                    f"{', '.join(FLOATS)}"
                )


def _own_name(stored: str) -> str:
    """What a tensor is called here: by the module's name in the text model, where the base is one of several."""
    module = stored.removeprefix(PREFIX)
    return stored if module == stored else PREFIX + (text_name(module) or module)


def _check_header(file: Path) -> None:
    """Refuse a file that names far more tensors than an adapter has: rounds wait while it is read."""
    if file.is_file():
        with file.open("rb") as weights:
            size = int.from_bytes(weights.read(8), "little")
        if _MOST_HEADER_BYTES < size < file.stat().st_size:  # a longer one is no header
            raise CheckpointError(
                f"{file} has a header of {size} bytes; {_MOST_HEADER_BYTES} are the most of an adapter: save it with "
                "PEFT again"
            )


def open_adapter(name: str, path: Path, model: ModelConfig, max_rank: int, key: str = "adapters") -> LoraFiles:
    """The files of an adapter of the configuration.

    Raises:
        CheckpointError: see LoraFiles; the line begins with the key.
    """
    try:
        return LoraFiles(path, model, max_rank)
    except CheckpointError as error:
        raise CheckpointError(f"{key}.{name}: {error}") from None


def adaptable_modules(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The matrices of a model that adapters may change, by the names of their modules, and their shapes [out, in].

    Raises:
        CheckpointError: see `check_adaptable`.
    """
    check_adaptable(model)
    return {
        module_of(part.name): part.shape
        for layer in model.layers
        for weight in layer.weights()
        if weight.use == "linear"
        for part in weight.parts
    }


def check_adaptable(model: ModelConfig) -> None:
    """Look whether a model may have adapters.

    Raises:
        CheckpointError: ranks hold matrices in another order than the files have, and adapters follow the files'.
    """
    if any(part.is_reordered for weight in model.weights for part in weight.parts):
        raise CheckpointError(
            f"adapters of {model.architecture} are not supported where heads are rotated in part, or by neighbours, or "
            "lie between others in the files"
        )


def module_of(name: str) -> str:
    """The module of a matrix of the base."""
    return name.removesuffix(".weight")
