"""`quant_method: compressed-tensors`: what llm-compressor writes, in groups of modules with a scheme each.

Source: compressed-tensors' quant_scheme and compressors. Of groups that mean the same module a name goes before an
expression, and that before a class. What the file says of keys and values (kv_cache_scheme) is read elsewhere
(trtrun/weights/quantization_config.py); a file may say nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, Quantization, StoredQuantizations
from trtrun.linear.quantization.quantizations import BLOCK
from trtrun.linear.stored.byte_layouts import Fp4Layout, Fp8Layout, Int8Layout, read_block
from trtrun.linear.stored.group_layouts import PackedLayout
from trtrun.linear.stored.layout import Layout, StoredLinear
from trtrun.linear.stored.settings import (
    Activations,
    ModuleNames,
    meaning,
    read_group_size,
    read_names,
    read_section,
    refuse,
)
from trtrun.module_patterns import Steps

_METHOD = "compressed-tensors"


@STORED_QUANTIZATIONS.register(_METHOD)
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    sparsity = read_section(values, "sparsity_config")
    refuse({"sparsity": sparsity.get("format")}, "sparsity", "dense", method=_METHOD, default="dense")
    if read_section(values, "transform_config"):
        raise CheckpointError(f"{_METHOD} weights with a transform_config (rotations) are not supported")
    steps = Steps()
    plain = ModuleNames(read_names(values, "ignore"), steps)
    groups = [
        (
            [(_rank(target), meaning(target, steps)) for target in read_names(group, "targets")],
            _read_group(group, values.get("format")),
        )
        for group in _list_groups(read_section(values, "config_groups"), has_kv=bool(values.get("kv_cache_scheme")))
    ]

    def find_stored(name: str) -> Quantization | None:
        module = name.removesuffix(".weight")
        if module in plain:
            return None
        found = [
            (rank, -at, held) for at, (targets, held) in enumerate(groups) for rank, means in targets if means(module)
        ]
        return max(found, key=lambda it: it[:2])[2] if found else None

    return find_stored


def _list_groups(section: Mapping[str, Any], *, has_kv: bool) -> list[Mapping[str, Any]]:
    if not (section or has_kv) or not all(isinstance(group, dict) for group in section.values()):
        raise CheckpointError("'config_groups' of quantization_config must name groups of modules")
    return list(section.values())


def _rank(target: str) -> int:
    return 0 if target == "Linear" else 1 if target.startswith("re:") else 2


def _read_group(group: Mapping[str, Any], default: object) -> Quantization | None:
    """What a group's matrices are held in; None where only activations are rounded."""
    weights = read_section(group, "weights")
    if not weights:
        return None
    name = group.get("format") or default
    if not isinstance(name, str) or name not in _FORMATS:
        raise CheckpointError(
            f"{_METHOD} weights in format {shorten(name)} are not supported; known: {', '.join(_FORMATS)}"
        )
    return StoredLinear(_FORMATS[name](weights, _read_activations(group)))


def _read_activations(group: Mapping[str, Any]) -> Activations:
    inputs = read_section(group, "input_activations")
    if not inputs:
        return "none"
    if not inputs.get("dynamic"):
        return "static"
    size = inputs.get("group_size")
    strategy = inputs.get("strategy") or ("tensor" if size is None else "group")
    if strategy == "token":
        return "token"
    return "group" if strategy == "group" and size in (None, BLOCK) else "none"


def _read_float(weights: Mapping[str, Any], activations: Activations) -> Layout:
    refuse(weights, "num_bits", 8, method=f"{_METHOD} float")
    refuse(weights, "type", "float", method=f"{_METHOD} float-quantized")
    refuse(weights, "strategy", "tensor", "channel", "block", method=f"{_METHOD} float")
    strategy = str(weights["strategy"])
    block = read_block(weights.get("block_structure")) if strategy == "block" else (128, 128)
    return Fp8Layout(f"{_METHOD} FP8", activations, strategy, block)


def _read_whole(weights: Mapping[str, Any], activations: Activations) -> Layout:
    refuse(weights, "num_bits", 8, method=f"{_METHOD} int-quantized")
    refuse(weights, "type", "int", method=f"{_METHOD} int-quantized", default="int")
    refuse(weights, "strategy", "channel", "tensor", method=f"{_METHOD} int-quantized")
    refuse(weights, "symmetric", True, method=f"{_METHOD} int-quantized", default=True)
    return Int8Layout(f"{_METHOD} W8A8", activations, str(weights["strategy"]))


def _read_unpacked(weights: Mapping[str, Any], activations: Activations) -> Layout:
    """Older files, which name a format for both."""
    return (_read_float if weights.get("type") == "float" else _read_whole)(weights, activations)


def _read_packed(weights: Mapping[str, Any], activations: Activations) -> Layout:
    refuse(weights, "num_bits", 4, 8, method=f"{_METHOD} pack-quantized")
    refuse(weights, "type", "int", method=f"{_METHOD} pack-quantized", default="int")
    refuse(weights, "strategy", "group", "channel", method=f"{_METHOD} pack-quantized")
    refuse(weights, "symmetric", True, False, method=f"{_METHOD} pack-quantized", default=True)
    # Of other orders only the writer knew: groups lie in order again.
    refuse(weights, "actorder", None, "weight", "static", "group", "dynamic", method=f"{_METHOD} pack-quantized")
    size = read_group_size(weights) if weights["strategy"] == "group" else None
    has_order = weights.get("actorder") in ("group", "dynamic")
    return PackedLayout(int(weights["num_bits"]), size, weights.get("symmetric") is not False, has_order)


def _read_fp4(weights: Mapping[str, Any], activations: Activations) -> Layout:
    refuse(weights, "num_bits", 4, method=f"{_METHOD} nvfp4-pack-quantized")
    refuse(weights, "type", "float", method=f"{_METHOD} nvfp4-pack-quantized")
    refuse(weights, "group_size", 16, method=f"{_METHOD} nvfp4-pack-quantized", default=16)
    return Fp4Layout(f"{_METHOD} NVFP4", "weight_packed", 16, "weight_global_scale", divides=True)


def _read_mxfp4(weights: Mapping[str, Any], activations: Activations) -> Layout:
    refuse(weights, "num_bits", 4, method=f"{_METHOD} mxfp4-pack-quantized")
    refuse(weights, "type", "float", method=f"{_METHOD} mxfp4-pack-quantized")
    refuse(weights, "group_size", 32, method=f"{_METHOD} mxfp4-pack-quantized", default=32)
    return Fp4Layout(f"{_METHOD} MXFP4", "weight_packed", 32, None)


_FORMATS: dict[str, Callable[[Mapping[str, Any], Activations], Layout]] = {
    "float-quantized": _read_float,
    "int-quantized": _read_whole,
    "naive-quantized": _read_unpacked,
    "pack-quantized": _read_packed,
    "nvfp4-pack-quantized": _read_fp4,
    "mxfp4-pack-quantized": _read_mxfp4,
}
