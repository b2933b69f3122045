"""Writes Hugging Face directories: whole tensors by the architecture's names, a file for each layer.

Quantized matrices keep their bytes, and config.json says them in ModelOpt's words, which TensorRT-LLM's checkpoints
have them from. It knows names. It does not know how files are read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from trtrun.errors import CheckpointError
from trtrun.tensors import DTYPES, dtype_name
from trtrun.tools.conversion.source import Source
from trtrun.tools.conversion.streamed_file import TensorPlan, write_tensors
from trtrun.weights.checkpoint import INDEX_FILE
from trtrun.weights.quantization_config import find_section
from trtrun.weights.written_files import copy_beside, write_whole

Progress = Callable[[int, int], None]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_WEIGHT_SCALES, _KV_SCALES = ("weight_scale", "input_scale"), ("k_scale", "v_scale")
_STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def write_hugging_face(source: Source, output: Path, progress: Progress) -> int:
    """Write a checkpoint; returns the bytes of its weights.

    Args:
        source: of either layout.
        output: the directory, which is there.
        progress: called with bytes that are written, and all.

    Raises:
        TrtrunError: one line.
    """
    names = source.files.names()
    if source.config.tie_word_embeddings:
        names = [name for name in names if not name.startswith("lm_head.")]
    unused = (() if source.algorithm else _WEIGHT_SCALES) + (() if source.kv_algorithm else _KV_SCALES)
    names = [name for name in names if not name.endswith(unused)]
    shards: dict[int, dict[str, TensorPlan]] = {}
    for name in names:
        match = _LAYER.match(name)
        shards.setdefault(0 if match is None else int(match[1]) + 1, {})[name] = _plan(source, name)
    total = sum(plan.dtype.itemsize * torch.Size(plan.shape).numel() for it in shards.values() for plan in it.values())
    places: dict[str, str] = {}
    done = size = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    for at, index in enumerate(sorted(shards), start=1):
        file = output / f"model-{at:05d}-of-{len(shards):05d}.safetensors"
        size += write_tensors(file, shards[index], written)
        places |= dict.fromkeys(shards[index], file.name)
    index_values = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    write_whole(output / INDEX_FILE, json.dumps(index_values, indent=2) + "\n")
    copy_beside(source.path, output)
    write_whole(output / "config.json", json.dumps(_config(source), indent=2) + "\n")
    return size


def _plan(source: Source, name: str) -> TensorPlan:
    """Plain tensors in the output's dtype; codes, scales and whole numbers as they are."""
    code, shape = source.files.dtype_code(name), source.files.shape(name)
    is_scale = name.endswith(_WEIGHT_SCALES + _KV_SCALES)
    if code not in _STORED:
        if code not in _CODES:
            raise CheckpointError(
                f"{source.files.file(name)}: tensor '{name}' has dtype {code}, which is not converted; known: "
                f"{', '.join((*_STORED, *_CODES))}"
            )
        return TensorPlan(shape, _CODES[code], lambda: source.read_whole(name))
    dtype = DTYPES[_STORED[code]] if is_scale else source.dtype
    return TensorPlan(shape, dtype, lambda: source.read_whole(name).to(dtype))


def _config(source: Source) -> dict[str, object]:
    values = {key: value for key, value in source.values.items() if key not in ("torch_dtype", "kv_cache_quant_algo")}
    values["dtype"] = dtype_name(source.dtype)
    if source.kv_algorithm is not None:
        section = find_section(source.path, values)[1] or {"quant_method": "modelopt", "quant_algo": None}
        kind = "float" if source.kv_algorithm == "FP8" else "int"
        scheme = {"num_bits": 8, "type": kind, "strategy": "tensor", "dynamic": False, "symmetric": True}
        values["quantization_config"] = {**section, "kv_cache_scheme": section.get("kv_cache_scheme") or scheme}
    return values
