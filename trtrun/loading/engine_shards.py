"""The shards of an engine directory: whether they are whole, and which tensors they hold where.

There is one file for each rank, in the safetensors format, with what the rank's layers multiply with as kernels want
it, in the order of loading. `EngineEmbeddingAndHead` reads embedding and vocabulary head whole from the shards of all
ranks, for draft heads on a rank of their own, which has no shard. Headers are read without torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trtrun.configuration.engine_directory import EngineDescription, read_engine
from trtrun.errors import CheckpointError, shorten_path, wrap_errors
from trtrun.linear.quantization.base import FLOATS
from trtrun.models.config import ModelConfig
from trtrun.weights.checkpoint import ITEM_BYTES, TORCH_NAMES
from trtrun.weights.weight import Weight

if TYPE_CHECKING:
    import torch


_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
"""The largest header that the safetensors library reads."""

METADATA = "__metadata__"


class Place(NamedTuple):
    """Where a tensor is in a shard: first byte in the file, bytes, dtype as the format writes it, and shape."""

    start: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


def shard_path(path: Path, engine: EngineDescription, rank: int) -> Path:
    """The file of a rank's weights."""
    return path / engine.shards[rank].file


def check_shards(path: Path, engine: EngineDescription, ranks: Sequence[int]) -> None:
    """Look at sizes and headers of some shards.

    Raises:
        CheckpointError: one is missing, cut off, or another one than was built; one line.
    """
    for rank in ranks:
        read_places(path, engine, rank)


def read_places(path: Path, engine: EngineDescription, rank: int) -> dict[str, Place]:
    """The tensors of a rank's shard by name, in the file's order; errors as of `check_shards`."""
    shard, file = engine.shards[rank], shard_path(path, engine, rank)
    where = shorten_path(file)
    with wrap_errors(file, CheckpointError):
        if not file.is_file():
            raise CheckpointError(f"{shorten_path(path)} lacks {shard.file}: copy the engine again, or build it again")
        size = file.stat().st_size
        if size < shard.bytes:
            raise CheckpointError(f"{where} is truncated ({size} bytes of {shard.bytes}): copy the engine again")
        with file.open("rb") as opened:
            header = _read_header(opened)
        is_built = size == shard.bytes and hashlib.sha256(header).hexdigest() == shard.header_sha256
        entries = json.loads(header[_LENGTH.size :]) if is_built else {}
        # engine.json may have been edited.
        if entries.pop(METADATA, {}).get("rank") != describe_rank(rank, engine.tp_size):
            raise CheckpointError(f"{where} is not the file that was built: copy the engine again, or build it again")
        return {name: _place(entry, len(header)) for name, entry in entries.items()}


def describe_rank(rank: int, size: int) -> str:
    """The rank that a shard is for, as its header says it."""
    return f"{rank} of {size}"


def hash_header(file: Path) -> str:
    """`ShardDescription.header_sha256` of a file."""
    with file.open("rb") as opened:
        return hashlib.sha256(_read_header(opened)).hexdigest()


def _read_header(opened: Any) -> bytes:
    length: bytes = opened.read(_LENGTH.size)
    (size,) = _LENGTH.unpack(length) if len(length) == _LENGTH.size else (0,)
    return length + (opened.read(size) if size <= _MOST_HEADER_BYTES else b"")


def _place(entry: Mapping[str, Any], data: int) -> Place:
    start, stop = entry["data_offsets"]
    return Place(data + start, stop - start, entry["dtype"], tuple(entry["shape"]))


def order_of_loading(config: ModelConfig) -> list[Weight]:
    """All weights of a model, nearly as they are asked for when it is loaded."""
    layers = [weight for layer in config.layers for weight in layer.weights()]
    inputs = () if config.layer_inputs is None else config.layer_inputs.weights()
    return [config.head, *inputs, *layers, config.final_norm, config.embedding]


def stored_name(weight: Weight, held: str = "weight") -> str:
    """Name in a shard of something that a weight is held in: "model.layers.0.mlp.gate_proj+up_proj.codes"."""
    # Of one module may be several.
    modules = dict.fromkeys(part.name.rpartition(".")[0] for part in weight.parts)
    (first, *others), kind = modules, weight.parts[0].name.rpartition(".")[2]
    parent = f"{first.rpartition('.')[0]}."
    names = [first, *(module.removeprefix(parent) for module in others)]
    return f"{'+'.join(names)}.{kind if held == 'weight' else held}"


def bytes_of_ranks(path: Path, engine: EngineDescription) -> tuple[int, ...]:
    """Bytes of weights that each rank reads, in order; errors as of `check_shards`."""
    found = (read_places(path, engine, rank) for rank in range(engine.tp_size))
    return tuple(sum(place.num_bytes for place in places.values()) for places in found)


def check_engine_weights(path: Path, tp_size: int, quantization: str) -> bool:
    """Check an engine's weights for so many ranks; returns whether the directory is an engine.

    Raises:
        CheckpointError: it was built for other ranks or with another quantization; or see `check_shards`.
    """
    engine = read_engine(path)
    if engine is None:
        return False
    if engine.tp_size != tp_size or engine.quantization != quantization:
        raise CheckpointError(
            f"{shorten_path(path)} is an engine for {engine.tp_size} ranks and quantization {engine.quantization}, not "
            f"for {tp_size} and {quantization}: build another one"
        )
    check_shards(path, engine, range(engine.tp_size))
    return True


_ROWS_AT_A_TIME = 1024


class EngineEmbeddingAndHead:
    """The `WeightFiles` of embedding and vocabulary head in an engine.

    Args:
        path: of the engine.
        engine: what it says of itself.

    Raises:
        CheckpointError: a shard is damaged.
    """

    is_dummy = False

    def __init__(self, path: Path, engine: EngineDescription) -> None:
        self.path = path
        self.bytes_read = 0
        self._files = [shard_path(path, engine, rank) for rank in range(engine.tp_size)]
        self._shards = [read_places(path, engine, rank) for rank in range(engine.tp_size)]

    def __contains__(self, name: str) -> bool:
        return all(name in shard for shard in self._shards)

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, *, ones_vary: bool = False
    ) -> int:
        """Check a tensor by its header, as a checkpoint does; behind the rows that there are, ranks may have
        padding."""
        found = [shard[name] for shard in self._shards if name in shard]
        kinds = {TORCH_NAMES.get(place.dtype) for place in found}
        dtype = next(iter(kinds), None)
        is_whole = len(found) == len(self._shards) and sum(place.shape[0] for place in found) >= shape[0]
        if not is_whole or dtype not in ITEM_BYTES or any(place.shape[1:] != shape[1:] for place in found):
            raise CheckpointError(
                f"{shorten_path(self.path)} is an engine that does not hold '{name}' as heads with a device of their "
                "own read it: name the checkpoint that it was built from"
            )
        return ITEM_BYTES[dtype]

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        import torch

        from trtrun.loading.device_reading import bytes_of, read_piece

        rows, columns = ranges[0], slice(ranges[1].start, ranges[1].stop)
        first = 0
        for file, place in zip(self._files, (shard[name] for shard in self._shards), strict=True):
            height, width = place.shape
            with wrap_errors(file, CheckpointError), file.open("rb") as opened:
                for start in range(max(first, rows.start), min(first + height, rows.stop), _ROWS_AT_A_TIME):
                    stop = min(start + _ROWS_AT_A_TIME, first + height, rows.stop)
                    piece = torch.empty((stop - start, width), dtype=getattr(torch, TORCH_NAMES[place.dtype]))
                    offset = place.start + (start - first) * width * piece.itemsize
                    read_piece(opened.fileno(), bytes_of(piece), offset)
                    self.bytes_read += piece.nbytes
                    yield start - rows.start, piece[:, columns]
            first += height

    def close(self) -> None:
        """Nothing stays open."""
