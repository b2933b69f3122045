"""The files of a Hugging Face model directory: JSON, safetensors shards and their index, read slice by slice.

It knows files, tensor names, shapes and dtypes. It does not know what the tensors mean or which rank wants which slice.
Nothing is unpickled, ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from trtrun.configuration.engine_directory import ENGINE_FILE, is_engine, was_built
from trtrun.configuration.model_paths import fetch_again, mend_download
from trtrun.errors import CheckpointError, LibraryPanicError, RustLibrary, one_line, shorten, wrap_errors
from trtrun.linear.quantization.base import FLOATS
from trtrun.weights.written_files import describe_damage, find_unfinished

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_MOST_JSON_BYTES = 64 * 1024 * 1024
_MOST_NAME = 255  # bytes, of any file system; characters can only be fewer
_MOST_NAMED = 5  # files that are not there, in a message
_MOST_DIGITS = 300  # of a whole number; each one fits into a float then

_INTEGERS = {"I32", "I64"}
_FLAGS = {"BOOL", "U8", *_INTEGERS}
TORCH_NAMES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
}
"""Names of dtypes in the format, and torch's names."""
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number in the dtypes that plain weights may have, by torch's names."""
_ALL_BYTES = {**ITEM_BYTES, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "float8_e4m3fn": 1, "float8_e8m0fnu": 1}

_LIBRARY = RustLibrary("safetensors")
_READS, _LOOKS = "pt", "np"
"""What the library hands out tensors as. For a look at the headers torch need not be imported."""

# safetensors maps files into memory and mapped pages that were read count as resident, so a file is mapped anew after
# this many bytes; a slice is handed out in pieces of at most this size for the same reason.
_MAPPED_BYTES = 8 * 1024 * 1024
_PIECE_BYTES = 2 * 1024 * 1024


def read_json(path: Path, name: str, required: bool) -> dict[str, Any]:
    """Read one JSON object of a checkpoint directory; empty when the file is not there and not required.

    Raises:
        CheckpointError: directory or required file missing, or not a JSON object.
    """
    file = path / name
    with wrap_errors(file, CheckpointError):
        if not path.is_dir():
            state = "is a file" if path.exists() else "does not exist"
            raise CheckpointError(
                f"{path} {state}; give a Hugging Face model directory (config.json and *.safetensors)"
            )
        if not file.is_file():
            if not required:
                return {}
            if command := find_unfinished(path):
                raise CheckpointError(f"{path} has no {name}: `trtrun {command}` has not ended there: run it again")
            if was_built(path):
                raise CheckpointError(f"{path} has {ENGINE_FILE}, but no {name}: copy the engine again")
            way = mend_download(path, "give a Hugging Face model directory")
            raise CheckpointError(f"{path} has no {name}; {way}")
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise CheckpointError(f"{file} has more than {_MOST_JSON_BYTES >> 20} MiB; it is no {name}")
        try:
            values = json.loads(file.read_text(encoding="utf-8"), parse_int=_read_whole_number)
        except ValueError as error:
            raise CheckpointError(f"{file} is not valid JSON: {one_line(error)}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{file} must hold a JSON object, not {_JSON_KINDS[type(values)]}")
        return values


_JSON_KINDS = {
    list: "a list",
    str: "a text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _read_whole_number(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it holds a whole number of {len(digits)} digits")
    return int(digits)


class NoWeightsError(CheckpointError):
    """A model directory has no file of weights, of any kind."""


class Checkpoint:
    """The weights of one model directory, one file or many with an index; opening reads headers only."""

    is_dummy = False

    def __init__(
        self,
        path: Path,
        single_files: Sequence[str] = (SINGLE_FILE,),
        what: str = "model",
        own_name: Callable[[str], str | None] = lambda stored: stored,
    ) -> None:
        """Find the files and check their headers.

        Args:
            path: the directory.
            single_files: names of a file that holds all weights, the first of which that is there counts.
            what: the files hold, for messages.
            own_name: name of a tensor in the files → its name here; None passes it over.

        Raises:
            NoWeightsError: there are none.
            CheckpointError: only pickle files, or a shard that is missing, truncated or of another format.
        """
        self.path = path
        self._single_files = single_files
        self._what = what
        self._own_name = own_name
        self._stored_names: dict[str, str] = {}
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        with wrap_errors(path, CheckpointError):
            for file in self._find_files():
                self._read_header(file)
        self._handle: Any = None
        self._handle_file: Path | None = None
        self._mapped_bytes = 0
        self.bytes_read = 0

    def _read_header(self, file: Path) -> None:
        with wrap_errors(file, CheckpointError), _LIBRARY, self._open(file, _LOOKS) as handle:
            for stored in handle.keys():  # noqa: SIM118 (not a dict: the handle itself does not iterate)
                name = self._own_name(stored)
                if name is None:
                    continue
                if name in self._file_of:  # of which one would win by the order of files, whatever the index says
                    told = f"tensor {shorten(name)} is in {self._file_of[name].name} and in {file.name}"
                    way = fetch_again(self.path, "copy or save the model again")
                    raise CheckpointError(f"{self.path}: {told}, and may be in one file alone: {way}")
                piece = handle.get_slice(stored)
                self._file_of[name], self._stored_names[name] = file, stored
                self._shapes[name] = tuple(piece.get_shape())
                self._dtypes[name] = str(piece.get_dtype())

    def _find_files(self) -> list[Path]:
        for name in self._single_files:
            if (self.path / name).is_file():
                return [self.path / name]
        index = read_json(self.path, INDEX_FILE, required=False)
        if not index:
            if is_engine(self.path):
                raise CheckpointError(f"{self.path} is an engine, which has no {self._what}: name their own directory")
            if (self.path / "rank0.safetensors").is_file():
                raise CheckpointError(f"{self.path} has rank0.safetensors, but no {ENGINE_FILE}: copy the engine again")
            pickles = sorted(file.name for file in self.path.iterdir() if file.suffix in _PICKLE_SUFFIXES)
            if pickles:
                raise CheckpointError(f"{self.path} has its weights only as {self._tell_of(pickles)}")
            raise NoWeightsError(
                f"{self.path} has no weights: neither {', '.join(self._single_files)} nor {INDEX_FILE}"
                f"{mend_download(self.path, '', before='; ')}"
            )
        weight_map = index.get("weight_map")
        if (
            not isinstance(weight_map, dict)
            or not weight_map
            or not all(isinstance(name, str) for name in weight_map.values())
        ):
            raise CheckpointError(f"{self.path / INDEX_FILE} has no 'weight_map' of tensor names to files")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE} names {shorten(name)}, which is outside the model directory"
                )
            if not name.isprintable() or len(name) > _MOST_NAME:
                raise CheckpointError(f"{self.path / INDEX_FILE} names {shorten(name)}, which is no name of a file")
        missing = [name for name in names if not (self.path / name).is_file()]
        if missing:
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{self.path} lacks shard{'s' if missing[1:] else ''} {', '.join(missing[:_MOST_NAMED])}{more} "
                f"({len(names)} in its index); {mend_download(self.path, 'copy it again')}"
            )
        return [self.path / name for name in names]

    def _tell_of(self, pickles: Sequence[str]) -> str:
        """What to do about such files; some may be a trainer's, not of weights."""
        name = min(pickles, key=lambda one: not one.startswith("pytorch_model"))
        way = ""
        if "-of-" not in name:  # it is all of them
            loaded = f"torch.load('{name}', weights_only=True)"
            way = f", such as by safetensors.torch.save_file({loaded}, '{self._single_files[0]}')"
        return f"pickle ({name}), which may run code when it is read; save the {self._what} as safetensors{way}"

    def _open(self, file: Path, framework: str) -> Any:
        try:
            with _LIBRARY:
                return safe_open(file, framework=framework, device="cpu")
        except LibraryPanicError as panic:
            raise CheckpointError(f"{file} cannot be used: {panic}") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} {describe_damage(file, error)}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def list_files(self) -> list[Path]:
        """The files of its tensors, by name."""
        return sorted(set(self._file_of.values()))

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is there."""
        return self._shapes[name]

    def dtype_code(self, name: str) -> str:
        """Dtype of a tensor that is there, as the format writes it: "BF16"."""
        return self._dtypes[name]

    def file(self, name: str) -> Path:
        """Where a tensor is that is there."""
        return self._file_of[name]

    def check_integers(self, name: str) -> None:
        """Check that tensor `name`, which is there, holds whole numbers.

        Raises:
            CheckpointError: it does not.
        """
        if self._dtypes[name] not in _INTEGERS:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor '{name}' must hold whole numbers (I64), not {self._dtypes[name]}"
            )

    @_LIBRARY
    def integers(self, name: str) -> torch.Tensor:
        """A tensor that `check_integers` has passed, int64 on the host."""
        return self._tensor(name).long()

    def check_flags(self, name: str) -> None:
        """Check that tensor `name`, which is there, holds what is true or false.

        Raises:
            CheckpointError: it does not.
        """
        if self._dtypes[name] not in _FLAGS:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor '{name}' must hold true and false (BOOL), not {self._dtypes[name]}"
            )

    @_LIBRARY
    def flags(self, name: str) -> torch.Tensor:
        """A tensor that `check_flags` has passed, bool on the host."""
        return self._tensor(name).bool()

    def first_dtype(self) -> str:
        """Dtype of the first tensor that has a supported one, float32 if none has."""
        return next(
            (TORCH_NAMES[name] for name in self._dtypes.values() if TORCH_NAMES.get(name) in ITEM_BYTES), "float32"
        )

    def check(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = FLOATS, *, ones_vary: bool = False
    ) -> int:
        """Check that tensor `name` is there in this shape and in one of the dtypes; returns bytes per element.

        Args:
            name: of the tensor.
            shape: that it should have.
            dtypes: that it may have, by torch's names.
            ones_vary: whether dimensions of one number do not count.

        Raises:
            CheckpointError: it is not.
        """
        if name not in self._file_of:
            raise CheckpointError(f"{self.path} has no tensor '{name}', which its config.json calls for")
        found = self._shapes[name]
        if found != shape and not (ones_vary and _without_ones(found) == _without_ones(shape)):
            raise CheckpointError(
                f"{self._file_of[name]}: tensor '{name}' has shape {list(self._shapes[name])}, "
                f"but config.json calls for {list(shape)}"
            )
        dtype = TORCH_NAMES.get(self._dtypes[name])
        if dtype is None or dtype not in dtypes:
            raise CheckpointError(
                f"{self._file_of[name]}: tensor '{name}' has dtype {self._dtypes[name]}, which is not supported; "
                f"known: {', '.join(name for name, of_torch in TORCH_NAMES.items() if of_torch in dtypes)}"
            )
        return _ALL_BYTES[dtype]

    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        """Read the slice `ranges` (one range per dimension) of tensor `name`, some rows at a time.

        Yields:
            (offset, piece): first row of the piece within the slice; a host tensor in the file's dtype that lies in
            mapped memory: copy it before asking for the next.
        """
        if len(ranges) != len(self._shapes[name]):
            yield 0, self._read_otherwise(name, ranges)
            return
        rows, columns = ranges[0], tuple(slice(item.start, item.stop) for item in ranges[1:])
        row_bytes = _ALL_BYTES[TORCH_NAMES[self._dtypes[name]]]
        for size in self._shapes[name][1:]:
            row_bytes *= size  # whole rows: a column slice still touches their pages
        step = max(1, _PIECE_BYTES // row_bytes)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            with _LIBRARY:
                piece = self._slice(name)[(slice(start, stop), *columns)]
            self._mapped_bytes += (stop - start) * row_bytes
            self.bytes_read += piece.numel() * piece.element_size()
            yield start - rows.start, piece

    @_LIBRARY
    def _read_otherwise(self, name: str, ranges: tuple[range, ...]) -> torch.Tensor:
        """A vector, or one number, that has more or fewer dimensions of one number in the file."""
        left = iter(ranges)
        items = [range(1) if size == 1 else next(left) for size in self._shapes[name]]
        place = tuple(slice(item.start, item.stop) for item in items)
        piece: torch.Tensor = self._slice(name)[place or ...]
        self.bytes_read += piece.numel() * piece.element_size()
        return piece.reshape([len(item) for item in ranges])

    def _tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._mapped(self._file_of[name]).get_tensor(self._stored_names[name])
        return found

    def _slice(self, name: str) -> Any:
        return self._mapped(self._file_of[name]).get_slice(self._stored_names[name])

    def _mapped(self, file: Path) -> Any:
        if self._handle_file != file or self._mapped_bytes >= _MAPPED_BYTES:
            self.close()
            self._handle, self._handle_file = self._open(file, _READS), file
        return self._handle

    def close(self) -> None:
        """Unmap the file; a later read maps it again."""
        self._handle, self._handle_file, self._mapped_bytes = None, None, 0


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]
