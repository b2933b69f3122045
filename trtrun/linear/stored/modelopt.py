"""`quant_method: modelopt`: what NVIDIA's ModelOpt exports, said in config.json or in hf_quant_config.json.

Source: modelopt/torch/export (quant_utils, convert_hf_config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.stored.byte_layouts import Fp4Layout, Fp8Layout
from trtrun.linear.stored.layout import Codes, Layout, StoredLinear, cut_groups, cut_words, stored_as
from trtrun.linear.stored.settings import ModuleNames, everywhere, read_group_size, read_names, read_section, refuse

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import PackedWeight

_DEFAULT_GROUP = 128
_PLACES = 8


@dataclass(frozen=True)
class ModelOptAwqLayout:
    """weight uint8 [out / 2, in]: codes from -8 to 7 of two output features in a byte, the even one in the lower bits;
    weight_scale [out, groups]; and pre_quant_scale [in], which activations are to be multiplied by, where it has not
    been folded into the layer before.

    Attributes:
        group_size: input features of a group; None where all are one.
    """

    group_size: int | None

    name = "modelopt W4A16_AWQ"
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        return None  # as activations may have scales

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        (features, inputs), (rows, columns) = part.shape, part.ranges
        size = self.group_size or inputs
        cut_words(part, 1, _PLACES)  # as words are along them in memory
        codes = (features // 2, inputs), (cut_words(part, 0, 2), columns)
        scales = (features, -(-inputs // size)), (rows, cut_groups(part, 1, size))
        before = stored_as(part, "pre_quant_scale")
        return {
            "weight": TensorSlice(part.name, *codes, ("uint8", "int8")),
            "scale": TensorSlice(stored_as(part, "weight_scale"), *scales),
            "before": TensorSlice(before, (inputs,), (columns,), is_optional=True, ones_vary=True),
        }

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        import torch

        from trtrun.linear.stored.forms import PackedWeight, pack

        pairs = tensors["weight"].view(torch.uint8)
        codes = torch.stack((pairs & 15, pairs >> 4), 1).flatten(0, 1) ^ 8  # without sign, 8 is zero
        return PackedWeight(
            packed=pack(codes, 4),
            scale=tensors["scale"],
            bits=4,
            group_size=self.group_size or part.shape[1],
            input_scale=tensors.get("before"),
        )


def _read_awq(section: Mapping[str, Any]) -> Layout:
    """The size of groups stands in either of two places."""
    groups = list(read_section(section, "config_groups").values())
    weights = read_section(groups[0], "weights") if groups and isinstance(groups[0], dict) else {}
    return ModelOptAwqLayout(read_group_size({**weights, **section}, _DEFAULT_GROUP))


def _read_nvfp4(section: Mapping[str, Any]) -> Layout:
    refuse(section, "group_size", 16, method="modelopt NVFP4", default=16)
    return Fp4Layout("modelopt NVFP4", "weight", 16, "weight_scale_2")


_ALGORITHMS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "FP8": lambda section: Fp8Layout("modelopt FP8", "static", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda section: Fp8Layout("modelopt FP8", "token", "channel"),
    "W4A16_AWQ": _read_awq,
    "NVFP4": _read_nvfp4,
    "W4A16_NVFP4": _read_nvfp4,
}
_MIXED, _LAYERS = "MIXED_PRECISION", "quantized_layers"


_OF_KEYS_AND_VALUES = ("kv_cache_quant_algo", "kv_cache_scheme")
"""What a file may say that quantizes nothing else."""


@STORED_QUANTIZATIONS.register("modelopt")
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    section = read_section(values, "quantization") or values
    algorithm = section.get("quant_algo")
    if algorithm is None and any(place.get(key) for place in (values, section) for key in _OF_KEYS_AND_VALUES):
        return lambda name: None
    if algorithm == _MIXED:
        return _parse_layers(section)
    plain = ModuleNames(read_names(section, "ignore", "exclude_modules"), are_globs=True)
    return everywhere(_read(section, "weights", (*_ALGORITHMS, _MIXED)), plain, has_head=True)


def _parse_layers(section: Mapping[str, Any]) -> StoredQuantizations:
    """Each module that is named, or lies in one that is, has an algorithm of its own; others are plain."""
    layers = read_section(section, _LAYERS)
    held = {name: _read(read_section(layers, name), f"weights of {name}", tuple(_ALGORITHMS)) for name in layers}

    def find_stored(name: str) -> StoredLinear | None:
        module = name.removesuffix(".weight")
        while module and module not in held:
            module = module.rpartition(".")[0]
        return held.get(module)

    return find_stored


def _read(section: Mapping[str, Any], whose: str, known: Sequence[str]) -> StoredLinear:
    algorithm = section.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"modelopt {whose} with quant_algo {shorten(algorithm)} are not supported; known: {', '.join(known)}"
        )
    return StoredLinear(_ALGORITHMS[algorithm](section))
