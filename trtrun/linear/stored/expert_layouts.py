"""Layouts of experts that lie in one tensor for all of a layer; and `quant_method: mxfp4`, which has some in 4 bits.

As gpt-oss has them: gates and the factors that they are multiplied with lie in turns, as rows of `gate_up_proj`, and
`down_proj` beside it. Plainly both are turned over, [experts, in, out]. In MXFP4 they are blocks of 32 columns, 16
bytes of two numbers each (E2M1, the even column in the lower bits), and a power of two for each block (E8M0, OCP
Microscaling Formats 1.0). Every such number is one of bfloat16.

On GPUs codes stay as they are where ranks hold whole blocks; everything else becomes dense as it is read, an expert at
a time. It knows names and numbers. It does not know models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import FLOATS, STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.stored.byte_layouts import power_of_two
from trtrun.linear.stored.layout import Codes, Layout
from trtrun.linear.stored.settings import ModuleNames, read_names

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import StoredForm

GATE_UP, DOWN = "gate_up_proj", "down_proj"
"""What a matrix of one expert is called: "…experts.5.gate_up_proj.weight", of "…experts.gate_up_proj"."""

_METHOD = "mxfp4"
_BLOCK, _BLOCK_BYTES = 32, 16


def _place(part: TensorSlice) -> tuple[str, str, range]:
    """The name of the tensor of all experts, that of the matrix, and where in the tensor an expert lies."""
    experts, number, matrix, _ = part.name.rsplit(".", 3)
    return f"{experts}.{matrix}", matrix, range(int(number), int(number) + 1)


def _in_order(rows: torch.Tensor, matrix: str) -> torch.Tensor:
    """Rows of one expert with gates first, where they lie in turns with factors."""
    import torch

    return torch.cat((rows[::2], rows[1::2])) if matrix == GATE_UP else rows


@dataclass(frozen=True)
class TurnedExperts:
    """Plain numbers, [experts, in, out].

    Attributes:
        num_experts: of a layer.
    """

    num_experts: int

    name = "experts in one tensor"
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        return None

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        name, _, expert = _place(part)
        (features, inputs), (rows, columns) = part.shape, part.ranges
        return {"values": TensorSlice(name, (self.num_experts, inputs, features), (expert, columns, rows), FLOATS)}

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> StoredForm:
        from trtrun.linear.stored.forms import PlainWeight

        _, matrix, _ = _place(part)
        return PlainWeight(_in_order(tensors["values"][0].T, matrix))


@dataclass(frozen=True)
class Mxfp4Experts:
    """Blocks uint8 [experts, out, in / 32, 16] and exponents uint8 [experts, out, in / 32].

    Attributes:
        num_experts: of a layer.
    """

    num_experts: int

    name = _METHOD
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        """None where a rank begins or ends within a block."""
        columns = part.ranges[1]
        return None if columns.start % _BLOCK or columns.stop % _BLOCK else "mxfp4"

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """Whole blocks, also where ranks share one."""
        name, _, expert = _place(part)
        (features, inputs), (rows, columns) = part.shape, part.ranges
        if inputs % _BLOCK:
            raise CheckpointError(f"{name}: {inputs} input features are not a multiple of {_BLOCK}, as mxfp4 has them")
        shape = (self.num_experts, features, inputs // _BLOCK)
        blocks = range(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
        ranges = (expert, rows, blocks)
        return {
            "blocks": TensorSlice(f"{name}_blocks", (*shape, _BLOCK_BYTES), (*ranges, range(_BLOCK_BYTES)), ("uint8",)),
            "scales": TensorSlice(f"{name}_scales", shape, ranges, ("uint8",)),
        }

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> StoredForm:
        from trtrun.linear.stored.forms import Fp4Weight, SomeColumns

        _, matrix, _ = _place(part)
        codes, scales = tensors["blocks"][0].flatten(1), tensors["scales"][0]
        exponents = _in_order(scales, matrix)
        whole = Fp4Weight(_in_order(codes, matrix), power_of_two(exponents), _BLOCK, exponents)
        columns, first = part.ranges[1], part.ranges[1].start // _BLOCK * _BLOCK
        if len(columns) == whole.shape[1]:
            return whole
        return SomeColumns(whole, range(columns.start - first, columns.stop - first))


def expert_layout(section: Mapping[str, Any] | None, module: str, num_experts: int) -> Layout:
    """How files have a layer's experts.

    Args:
        section: `quantization_config` of config.json, where it has one.
        module: of the experts, such as "model.layers.0.mlp.experts".
        num_experts: of the layer.

    Raises:
        CheckpointError: they are quantized in another way.
    """
    method = section.get("quant_method", "unknown") if isinstance(section, dict) and section else None
    if method not in (None, _METHOD):
        raise CheckpointError(
            f"{module}: experts in one tensor that are quantized as {shorten(method)} are not supported; known: "
            f"{_METHOD}"
        )
    is_plain = section is None or method is None or _is_named(module, _read_plain(section))
    return TurnedExperts(num_experts) if is_plain else Mxfp4Experts(num_experts)


@STORED_QUANTIZATIONS.register(_METHOD)
def parse_mxfp4(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored, but for experts that lie in one tensor, whose plan asks `expert_layout`: plainly.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    names = _read_plain(values)
    has_names = bool(read_names(values, "modules_to_not_convert"))

    def find_stored(name: str) -> None:
        module = name.removesuffix(".weight")
        if has_names and not _is_named(module, names):
            raise CheckpointError(
                f"{name} is not among modules_to_not_convert, and mxfp4 weights other than experts in one tensor are "
                "not supported"
            )

    return find_stored


def _read_plain(values: Mapping[str, Any]) -> ModuleNames:
    return ModuleNames(read_names(values, "modules_to_not_convert"), are_globs=True)


def _is_named(module: str, names: ModuleNames) -> bool:
    """Whether a module, or one that it is part of, is on a list."""
    parts = module.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts) + 1))
