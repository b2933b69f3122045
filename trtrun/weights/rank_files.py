"""The weights of a TensorRT-LLM checkpoint, rankN.safetensors, as if they were those of a Hugging Face directory: whole
tensors by the architecture's names, of which any slice can be read.

Sources: TensorRT-LLM's docs/source/architecture/checkpoint.md, models/llama/convert.py, and ModelOpt's export of such
checkpoints. It knows how ranks share tensors out there. It does not know how they do here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import override

from trtrun.configuration.engine_directory import is_engine, refuse_foreign
from trtrun.errors import CheckpointError, wrap_errors
from trtrun.weights.checkpoint import Checkpoint, read_json
from trtrun.weights.nested_models import is_nested, text_name, to_text_model
from trtrun.weights.stacked_experts import StackedExpertsCheckpoint
from trtrun.weights.tensorrt_llm_config import is_tensorrt_llm, read_algorithm, read_tp_size, to_hugging_face

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"transformer\.layers\.(\d+)\.(.+)")
_MODULES: dict[str, tuple[tuple[str, ...], Literal["rows", "columns", "whole"]]] = {
    "input_layernorm": (("input_layernorm",), "whole"),
    "post_layernorm": (("post_attention_layernorm",), "whole"),
    "attention.q_layernorm": (("self_attn.q_norm",), "whole"),
    "attention.k_layernorm": (("self_attn.k_norm",), "whole"),
    "attention.qkv": (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "rows"),
    "attention.dense": (("self_attn.o_proj",), "columns"),
    "mlp.fc": (("mlp.gate_proj",), "rows"),
    "mlp.gate": (("mlp.up_proj",), "rows"),
    "mlp.proj": (("mlp.down_proj",), "columns"),
}
"""Module of a layer → the architecture's, and what of a matrix ranks share out: `fc` goes through the activation, and
`gate` does not."""

_ENDS = {
    "weight": "weight",
    "bias": "bias",
    "weights_scaling_factor": "weight_scale",
    "prequant_scaling_factor": "pre_quant_scale",
    "activation_scaling_factor": "input_scale",
}
KV_SCALE = "attention.kv_cache_scaling_factor"
"""One scale for keys and values."""

_MOST_PADDING = 64
"""Rows for each rank. TensorRT-LLM pads a vocabulary to a multiple of the ranks; this has room for multiples of 64."""

_PIECE_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True)
class Part:
    """What one rank has of a tensor.

    Attributes:
        rank: whose file it is.
        stored: name there.
        rows, columns: place in the whole tensor; without columns where it is a vector.
        first_row: in the file.
    """

    rank: int
    stored: str
    rows: range
    columns: range | None
    first_row: int


class RankFiles(Checkpoint):
    """The weights of one TensorRT-LLM checkpoint; otherwise as a Checkpoint.

    Args:
        path: the directory.
        values: of its config.json.

    Raises:
        CheckpointError: a file is missing or truncated, or tensors are not those of the other ranks or of config.json.
    """

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.bytes_read = 0
        self._values = values
        self._is_fp8 = read_algorithm(values) == "FP8"
        size = read_tp_size(values)
        missing = [index for index in range(size) if not (path / f"rank{index}.safetensors").is_file()]
        if missing:
            names = ", ".join(f"rank{index}.safetensors" for index in missing[:5])
            raise CheckpointError(f"{path} lacks {names} (its config.json has tp_size {size}); copy it again")
        self._ranks = [Checkpoint(path, (f"rank{index}.safetensors",), "checkpoint") for index in range(size)]
        self._parts: dict[str, list[Part]] = {}
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        with wrap_errors(path / "config.json", CheckpointError):
            heads, kv_heads = int(values["num_attention_heads"]), int(values.get("num_key_value_heads") or 0)
            kv_heads = kv_heads or heads
            head_size = int(values.get("head_size") or values["hidden_size"] // heads)
            self._queries, self._keys = heads * head_size, kv_heads * head_size
            self._kept_keys = max(1, kv_heads // size) * head_size
            for stored in self._ranks[0].names():
                self._place(stored)

    def _place(self, stored: str) -> None:
        """Say where a tensor of the files is in the model; others are passed over."""
        match = _LAYER.fullmatch(stored)
        if match is None:
            self._place_end(stored)
            return
        prefix, inner = f"model.layers.{match[1]}.", match[2]
        if inner == KV_SCALE:
            for name in ("k_scale", "v_scale"):
                self._add_whole(f"{prefix}self_attn.{name}", stored)
            return
        module, _, end = inner.rpartition(".")
        if module not in _MODULES or end not in _ENDS:
            return
        (first, *others), cut = _MODULES[module]
        name = f"{prefix}{first}.{_ENDS[end]}"
        if others:
            self._add_queries_keys_values(prefix, stored, end)
        elif self._is_shared(stored, end, cut):
            self._add_whole(name, stored)
        else:
            by_columns = cut == "columns" and len(self._ranks[0].shape(stored)) > 1
            self._add_shares(name, stored, by_columns=by_columns)

    def _place_end(self, stored: str) -> None:
        if stored == "transformer.vocab_embedding.weight":
            name, size = "model.embed_tokens.weight", self._values["vocab_size"]
            if len(self._ranks) > 1 and self._values.get("use_parallel_embedding"):
                self._add_shares(name, stored, by_columns=self._values.get("embedding_sharding_dim") == 1, most=size)
            else:
                self._add_whole(name, stored, most=size)
        elif stored.startswith("lm_head."):
            end = stored.removeprefix("lm_head.")
            name = f"lm_head.{_ENDS.get(end, end)}"
            if self._is_shared(stored, end, "rows"):
                self._add_whole(name, stored)
            else:
                self._add_shares(name, stored, by_columns=False, most=self._values["vocab_size"])
        elif stored == "transformer.ln_f.weight":
            self._add_whole("model.norm.weight", stored)

    def _is_shared(self, stored: str, end: str, cut: str) -> bool:
        """Whether all ranks have the same."""
        is_number = all(size == 1 for size in self._ranks[0].shape(stored))
        shared = {"rows": ("prequant_scaling_factor", "activation_scaling_factor"),
                  "columns": ("bias", "activation_scaling_factor")}  # fmt: skip
        return cut == "whole" or is_number or end in shared[cut]

    def _check_alike(self, stored: str, *, on_all: bool) -> None:
        """Raise CheckpointError unless a tensor has one shape and dtype on every rank that has it, or on all."""
        first = self._ranks[0]
        expected = first.shape(stored), first.dtype_code(stored)
        for rank in self._ranks[1:]:
            if stored not in rank:
                if on_all:
                    raise CheckpointError(f"{self.path} has '{stored}' in rank0.safetensors, and not in all others")
                continue
            found = rank.shape(stored), rank.dtype_code(stored)
            if found != expected:
                raise CheckpointError(
                    f"{rank.file(stored)}: tensor '{stored}' is {found[1]} of shape {list(found[0])}, and in "
                    f"rank0.safetensors {expected[1]} of shape {list(expected[0])}; copy the files of one checkpoint"
                )

    def _add(self, name: str, parts: list[Part], shape: tuple[int, ...]) -> None:
        rank, stored = self._ranks[parts[0].rank], parts[0].stored
        dtype = rank.dtype_code(stored)
        if self._is_fp8 and dtype in ("I8", "U8"):
            dtype = "F8_E4M3"  # in a container, as older files have it
        self._parts[name], self._shapes[name], self._dtypes[name] = parts, shape, dtype
        self._file_of[name] = rank.file(stored)

    def _without_padding(self, stored: str, rows: int, most: int) -> int:
        """Rows that count. Raises CheckpointError where the others are more than anyone pads a vocabulary by."""
        if rows - most >= _MOST_PADDING * len(self._ranks):
            raise CheckpointError(
                f"{self._ranks[0].file(stored)}: tensor '{stored}' has {rows} rows on all ranks, and config.json has "
                f"vocab_size {most}, which is too small"
            )
        return min(most, rows)

    def _add_whole(self, name: str, stored: str, most: int | None = None) -> None:
        self._check_alike(stored, on_all=False)
        shape = self._ranks[0].shape(stored)
        kept = shape if most is None else (self._without_padding(stored, shape[0], most), *shape[1:])
        columns = range(kept[1]) if kept[1:] else None
        self._add(name, [Part(0, stored, range(kept[0] if kept else 1), columns, 0)], kept)

    def _add_shares(self, name: str, stored: str, *, by_columns: bool, most: int | None = None) -> None:
        """Add the parts of all ranks, one behind the other; rows from `most` on are padding."""
        self._check_alike(stored, on_all=True)
        shape, size = self._ranks[0].shape(stored), len(self._ranks)
        all_rows = shape[0] if by_columns else size * shape[0]
        kept = all_rows if most is None else self._without_padding(stored, all_rows, most)
        if by_columns:
            wide = shape[1]
            parts = [Part(at, stored, range(kept), range(at * wide, (at + 1) * wide), 0) for at in range(size)]
            self._add(name, parts, (kept, size * wide))
            return
        columns = range(shape[1]) if shape[1:] else None
        shares = [range(at * shape[0], min((at + 1) * shape[0], kept)) for at in range(size)]
        self._add(
            name, [Part(at, stored, rows, columns, 0) for at, rows in enumerate(shares) if rows], (kept, *shape[1:])
        )

    def _add_queries_keys_values(self, prefix: str, stored: str, end: str) -> None:
        """Add a rank's queries, keys and values, one behind the other; where there are fewer heads of keys than ranks,
        neighbours have the same."""
        names = [f"{prefix}self_attn.{name}.{_ENDS[end]}" for name in ("q_proj", "k_proj", "v_proj")]
        if self._is_shared(stored, end, "rows"):
            for name in names:
                self._add_whole(name, stored)
            return
        self._check_alike(stored, on_all=True)
        size = len(self._ranks)
        shape = self._ranks[0].shape(stored)
        whole = self._queries // size + 2 * self._kept_keys
        packed = 1 if shape[0] == whole else 2  # two output features in a byte
        if shape[0] * packed != whole:
            raise CheckpointError(
                f"{self._ranks[0].file(stored)}: tensor '{stored}' has {shape[0]} rows, and config.json calls for "
                f"{whole}"
            )
        queries, kept = self._queries // size // packed, self._kept_keys // packed
        columns = range(shape[1]) if shape[1:] else None
        own = [Part(rank, stored, range(rank * queries, (rank + 1) * queries), columns, 0) for rank in range(size)]
        self._add(names[0], own, (size * queries, *shape[1:]))
        every = max(1, size * self._kept_keys // self._keys)  # ranks that have the same
        for name, first in ((names[1], queries), (names[2], queries + kept)):
            ranks = range(0, size, every)
            held = [
                Part(rank, stored, range(at * kept, (at + 1) * kept), columns, first) for at, rank in enumerate(ranks)
            ]
            self._add(name, held, (len(ranks) * kept, *shape[1:]))

    @override
    def list_files(self) -> list[Path]:
        return [path for rank in self._ranks for path in rank.list_files()]

    @override
    def pieces(self, name: str, ranges: tuple[range, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        import torch

        if len(ranges) != len(self._shapes[name]):
            left = iter(ranges)
            wanted = tuple(range(1) if size == 1 else next(left) for size in self._shapes[name])
            found = torch.cat([piece for _, piece in self.pieces(name, wanted)])
            yield 0, found.reshape([len(item) for item in ranges])
            return
        rows, columns = ranges[0] if ranges else range(1), ranges[1] if ranges[1:] else None
        bands: dict[range, list[Part]] = {}
        for part in self._parts[name]:
            bands.setdefault(part.rows, []).append(part)
        for band, parts in bands.items():
            first, last = max(band.start, rows.start), min(band.stop, rows.stop)
            step = max(1, _PIECE_BYTES // max(1, 4 * sum(len(part.columns or range(1)) for part in parts)))
            for start in range(first, last, step):
                held = range(start, min(start + step, last))
                piece = torch.cat(
                    [self._read(part, held, columns) for part in parts if _meet(part.columns, columns)], -1
                )
                self.bytes_read += piece.numel() * piece.element_size()
                yield start - rows.start, piece

    def _read(self, part: Part, rows: range, columns: range | None) -> torch.Tensor:
        """The rows of the whole tensor, and those of the columns that the part has."""
        import torch

        first = part.first_row - part.rows.start
        wanted = [range(rows.start + first, rows.stop + first)]
        if columns is not None and part.columns is not None:
            start = part.columns.start
            wanted.append(range(max(columns.start, start) - start, min(columns.stop, part.columns.stop) - start))
        rank = self._ranks[part.rank]
        found = torch.cat([piece for _, piece in rank.pieces(part.stored, tuple(wanted))])
        if self._is_fp8 and found.dtype in (torch.int8, torch.uint8):
            found = found.view(torch.float8_e4m3fn)
        return found

    @override
    def close(self) -> None:
        for rank in self._ranks:
            rank.close()

    def plain_modules(self) -> list[str]:
        """Modules with a matrix and without a scale, by the architecture's names; the head among them where the files
        have none of their own."""
        found = [name.removesuffix(".weight") for name, shape in self._shapes.items() if name.endswith(".weight")
                 and len(shape) > 1]  # fmt: skip
        plain = [name for name in found if f"{name}.weight_scale" not in self]
        return plain if "lm_head.weight" in self else [*plain, "lm_head"]


def _meet(one: range | None, other: range | None) -> bool:
    return one is None or other is None or (one.start < other.stop and other.start < one.stop)


def read_hugging_face_config(path: Path) -> dict[str, Any]:
    """config.json of a model directory of either kind, in Hugging Face's words; of the text model, where it is one of
    several.

    Raises:
        CheckpointError: it is missing, no JSON object, or says something that is not supported.
    """
    refuse_foreign(path)
    values = read_json(path, "config.json", required=True)
    file = path / "config.json"
    if is_nested(values):
        with wrap_errors(file, CheckpointError):
            try:
                return to_text_model(values)
            except CheckpointError as error:
                raise CheckpointError(f"{file}: {error}") from None
    if not is_tensorrt_llm(values):
        return values
    try:
        with wrap_errors(file, CheckpointError):
            found = to_hugging_face(values, ["lm_head"])
            try:
                files = RankFiles(path, values)
            except CheckpointError:  # whoever reads weights says what is wrong with them
                return found
            found = to_hugging_face(values, files.plain_modules())
            return found if "lm_head.weight" in files else {**found, "tie_word_embeddings": True}
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(text if text.startswith(str(path)) else f"{file}: {text}") from None


def open_checkpoint(path: Path) -> Checkpoint:
    """The weights of a model directory, whichever kind it is; those of the text model, where it is one of several.

    Raises:
        NoWeightsError: there are none.
        CheckpointError: see Checkpoint and RankFiles; or it is an engine.
    """
    if is_engine(path):
        raise CheckpointError(f"{path} is an engine: name the checkpoint that it was built from")
    values = read_json(path, "config.json", required=False)
    if is_nested(values):
        return StackedExpertsCheckpoint(path, text_name)
    return RankFiles(path, values) if is_tensorrt_llm(values) else StackedExpertsCheckpoint(path)
