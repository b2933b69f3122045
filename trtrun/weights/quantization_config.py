"""What a checkpoint says of how it is quantized: its weights, and the format and scales of keys and values.

It stands in a section of config.json, in ModelOpt's own file beside it, or in scales among the weights
(compressed-tensors' kv_cache_scheme, ModelOpt's k_scale and v_scale, TensorRT-LLM's kv_cache_scaling_factor).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtrun.configuration.engine_directory import read_engine
from trtrun.errors import CheckpointError, TrtrunError, shorten
from trtrun.kvcache.formats import KVDtype, KVScheme
from trtrun.linear.stored import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.weights.checkpoint import Checkpoint, read_json
from trtrun.weights.nested_models import with_text_names
from trtrun.weights.rank_files import open_checkpoint

if TYPE_CHECKING:
    import torch


QUANTIZATION_FILE = "hf_quant_config.json"
"""Where ModelOpt says it; config.json goes before."""


def configuration_bytes(path: Path) -> list[bytes]:
    """What a model directory says of its model, as it stands there: config.json, and ModelOpt's file or nothing.

    Raises:
        OSError: config.json cannot be read.
    """
    beside = path / QUANTIZATION_FILE
    return [(path / "config.json").read_bytes(), beside.read_bytes() if beside.is_file() else b""]


def find_section(path: Path, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The file that says how a checkpoint is quantized, and what it says; nothing where it is not.

    Args:
        path: of the model directory.
        values: of its config.json.

    Raises:
        CheckpointError: ModelOpt's file is damaged.
    """
    section = values.get("quantization_config")
    if section is not None and section != {}:
        return "config.json", with_text_names(section)
    beside = read_json(path, QUANTIZATION_FILE, required=False)
    return QUANTIZATION_FILE, {"quant_method": "modelopt", **with_text_names(beside)} if beside else None


def read_quantization(path: Path, values: Mapping[str, Any]) -> tuple[str | None, StoredQuantizations | None]:
    """The `quant_method` of a checkpoint, and how it has stored each matrix; two None where it is not quantized.

    Args:
        path: of the model directory.
        values: of its config.json.

    Raises:
        CheckpointError: it is quantized in a way that is not supported.
    """
    file, section = find_section(path, values)
    if section is None:
        return None, None
    if not isinstance(section, dict):
        raise CheckpointError(f"{path / file}: 'quantization_config' must be an object, not {shorten(section)}")
    method = section.get("quant_method", "unknown")
    try:
        if str(method) not in STORED_QUANTIZATIONS:
            raise CheckpointError(
                f"quantized weights ({shorten(method)}) are not supported; known: {', '.join(STORED_QUANTIZATIONS)}, "
                "and models in float32, float16 or bfloat16"
            )
        return method, STORED_QUANTIZATIONS.get(method)(section)
    except TrtrunError as error:
        raise CheckpointError(f"{path / file}: {error}") from None


_KINDS: dict[str, KVDtype] = {"float": "fp8", "int": "int8"}
_ALGORITHMS: dict[str, KVDtype] = {"FP8": "fp8", "INT8": "int8"}
_STATIC = "static"
"""AutoFP8's scheme, of E4M3."""


def read_kv_dtype(path: Path, values: Mapping[str, Any]) -> KVDtype | None:
    """The format that a checkpoint was made for; None where it says nothing, or names another one.

    Args:
        path: of the model directory.
        values: of config.json, in Hugging Face's words.

    Raises:
        CheckpointError: ModelOpt's file is damaged.
    """
    _, section = find_section(path, values)
    section = section if isinstance(section, dict) else {}
    scheme = section.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        is_known = scheme.get("num_bits", 8) == 8 and scheme.get("symmetric", True) is not False
        return _KINDS.get(str(scheme.get("type"))) if is_known else None
    if scheme == _STATIC:
        return "fp8"
    inner = section.get("quantization")
    places = (values, section, inner if isinstance(inner, dict) else {})
    named = next((place["kv_cache_quant_algo"] for place in places if place.get("kv_cache_quant_algo")), None)
    return _ALGORITHMS.get(str(named).upper())


def find_kv_scales(files: Checkpoint, attention: str) -> list[str]:
    """Names of the scales of a layer's keys and of its values; none where it lacks one of them.

    Args:
        files: with headers read.
        attention: in front of the layer's names, such as "model.layers.0.self_attn".
    """
    found = [next((name for name in _names(attention, kind) if name in files), None) for kind in ("k", "v")]
    return [name for name in found if name is not None] if None not in found else []


def _names(attention: str, kind: str) -> Sequence[str]:
    ends = (f"{kind}_scale", f"{kind}_proj.{kind}_scale", f"attn.{kind}_scale", f"{kind}_proj.output_scale", "kv_scale")
    return [f"{attention}.{end}" for end in ends]


def read_kv_scheme(path: Path, values: Mapping[str, Any], attention: Collection[str]) -> KVScheme | None:
    """How a checkpoint was made to have keys and values kept; None where it says nothing of it.

    Args:
        path, values: see `read_kv_dtype`; errors as there.
        attention: in front of the names of each layer that keeps keys and values.
    """
    dtype = read_kv_dtype(path, values)
    if dtype is None:
        return None
    engine = read_engine(path)
    if engine is not None:
        return KVScheme(dtype, bool(engine.kv_scales))
    try:
        files = open_checkpoint(path)
    except CheckpointError:  # whoever reads weights says what is wrong with them
        return KVScheme(dtype, has_scales=False)
    return KVScheme(dtype, all(find_kv_scales(files, layer) for layer in attention))


def attention_names(num_layers: int) -> list[str]:
    """What stands in front of the names of each layer's attention."""
    return [f"model.layers.{index}.self_attn" for index in range(num_layers)]


def load_kv_scales(files: Checkpoint, attention: str, num_heads: int, heads: range) -> torch.Tensor:
    """The scales of a layer's keys and values.

    Args:
        files, attention: see `find_kv_scales`.
        num_heads: KV heads of the model.
        heads: those of this rank.

    Returns:
        [2, heads] float32 on the host.

    Raises:
        CheckpointError: a scale is missing, of another shape or dtype, not above 0, or infinite.
    """
    import torch

    names = find_kv_scales(files, attention)
    if not names:
        raise CheckpointError(
            f"{files.path} has no scales for keys and values of {attention}, which its config.json calls for"
        )
    found = []
    for name in names:
        shape = files.shape(name)
        if prod(shape) not in (1, num_heads):
            raise CheckpointError(
                f"{files.file(name)}: tensor '{name}' has shape {list(shape)}, but there must be 1 scale, or one for "
                f"each of the {num_heads} KV heads"
            )
        files.check(name, shape)
        pieces = [piece.clone() for _, piece in files.pieces(name, tuple(map(range, shape)) or (range(1),))]
        scale = torch.cat(pieces).flatten().float()
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise CheckpointError(f"{files.file(name)}: tensor '{name}' holds a scale that is not a number above 0")
        found.append(scale.expand(num_heads)[heads.start : heads.stop])
    return torch.stack(found)
