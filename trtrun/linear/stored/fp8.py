"""`quant_method: fp8`: E4M3 with a scale for each block of 128 by 128, as DeepSeek and Qwen publish it, or for each
tensor, as AutoFP8 writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import STORED_QUANTIZATIONS, StoredQuantizations
from trtrun.linear.stored.byte_layouts import Fp8Layout
from trtrun.linear.stored.layout import StoredLinear
from trtrun.linear.stored.settings import ModuleNames, everywhere, read_names, refuse


@STORED_QUANTIZATIONS.register("fp8")
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    refuse(values, "fmt", "e4m3", method="fp8", default="e4m3")
    refuse(values, "activation_scheme", "dynamic", "static", method="fp8", default="dynamic")
    plain = ModuleNames(read_names(values, "modules_to_not_convert", "ignored_layers"))
    block = values.get("weight_block_size")
    is_static = values.get("activation_scheme") == "static"
    if block is None:
        layout = Fp8Layout("fp8", "static" if is_static else "token", "tensor")
    else:
        scale = "weight_scale_inv"  # they are multiplied by all the same
        layout = Fp8Layout("fp8", "static" if is_static else "group", "block", read_block(block), scale)
    return everywhere(StoredLinear(layout), plain)


def read_block(value: object) -> tuple[int, int]:
    """Rows and columns of a block.

    Raises:
        CheckpointError: it is no pair of sizes.
    """
    if isinstance(value, str):  # as older files have it: "128x128"
        value = [int(size) if size.isdecimal() else size for size in value.split("x")]
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)
    ):
        raise CheckpointError(
            f"a block of quantized weights must be two sizes such as [128, 128], not {shorten(value)}"
        )
    return value[0], value[1]
