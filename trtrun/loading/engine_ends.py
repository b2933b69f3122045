"""Embedding and vocabulary head of an engine, whole, as if they lay in a checkpoint: the rows of all ranks' shards, one
behind the other. For heads on a rank of their own, which has no shard.

It knows shards. It does not know what the ends are for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trtrun.configuration.engine_directory import EngineDescription
from trtrun.errors import CheckpointError, reading, shorten_path
from trtrun.linear.quantization.base import FLOATS
from trtrun.loading.engine_shards import read_places, shard_path
from trtrun.weights.checkpoint import ITEM_BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

_ROWS_AT_A_TIME = 1024


class EngineEnds:
    """See WeightFiles.

    Args:
        path: of the engine.
        engine: what it says of itself.

    Raises:
        CheckpointError: a shard is damaged.
    """

    is_made_up = False

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
        """See Checkpoint; behind the rows that there are, ranks may have padding."""
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
        """See Checkpoint."""
        import torch

        from trtrun.weights.file_pieces import bytes_of, read_piece

        rows, columns = ranges[0], slice(ranges[1].start, ranges[1].stop)
        first = 0
        for file, place in zip(self._files, (shard[name] for shard in self._shards), strict=True):
            height, width = place.shape
            with reading(file, CheckpointError), file.open("rb") as opened:
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
