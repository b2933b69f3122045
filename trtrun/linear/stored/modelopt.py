"""`quant_method: modelopt`: what NVIDIA's ModelOpt exports, said in config.json or in hf_quant_config.json.

Source: modelopt/torch/export (quant_utils, convert_hf_config).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.linear.stored.byte_layouts import Fp8Layout
from trtrun.linear.stored.layout import Layout, StoredLinear
from trtrun.linear.stored.settings import ModuleNames, everywhere, read_names, read_section

_ALGORITHMS: dict[str, Callable[[Mapping[str, Any]], Layout]] = {
    "FP8": lambda section: Fp8Layout("modelopt FP8", "static", "tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": lambda section: Fp8Layout("modelopt FP8", "token", "channel"),
}


@STORED_QUANTIZATIONS.register("modelopt")
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    section = read_section(values, "quantization") or values
    algorithm = section.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise CheckpointError(
            f"modelopt weights with quant_algo {shorten(algorithm)} are not supported; known: {', '.join(_ALGORITHMS)}"
        )
    plain = ModuleNames(read_names(section, "ignore", "exclude_modules"), are_globs=True)
    return everywhere(StoredLinear(_ALGORITHMS[algorithm](section)), plain, has_head=True)
