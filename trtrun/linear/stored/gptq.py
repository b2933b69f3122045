"""`quant_method: gptq`: codes of 4 or 8 bits, as AutoGPTQ and GPTQModel lay them down.

Sources: Frantar et al. 2022 (arXiv:2210.17323), and GPTQModel's qlinear. Version 1 of the format stores zero points
less 1, version 2 as they are, and files say the wrong one: published ones with symmetric codes are told by the zero
points themselves, which are half of the codes' range everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import (
    FLOATS,
    STORED_QUANTIZATIONS,
    StoredQuantizations,
    TensorSlice,
)
from trtrun.linear.stored.layout import Codes, StoredLinear, codes_of_groups, cut_groups, cut_words, stored_as
from trtrun.linear.stored.packed_layout import read_order
from trtrun.linear.stored.settings import (
    ModuleNames,
    everywhere,
    read_group_size,
    read_names,
    read_section,
    refuse,
)

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import PackedWeight

_WORD_BITS = 32


@dataclass(frozen=True)
class GptqLayout:
    """qweight int32 [in * bits / 32, out], packed along `in`; qzeros int32 [groups, out * bits / 32], packed along
    `out`; scales [groups, out]; and g_idx [in], the group of each input feature.

    Attributes:
        bits: of a code.
        group_size: input features of a group; None where all are one.
        has_order: whether groups are scattered over the features (act-order).
        is_symmetric: whether all zero points should be half of the codes' range.
        zero_offset: what is to be added to stored zero points, by the format's name.
    """

    bits: int
    group_size: int | None
    has_order: bool
    is_symmetric: bool
    zero_offset: int

    name = "gptq"
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        """See Layout."""
        return None if self.has_order else codes_of_groups(part, self.bits, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
        (features, inputs), (rows, columns) = part.shape, part.ranges
        places, size = _WORD_BITS // self.bits, self.group_size or inputs
        num_groups = -(-inputs // size)
        # Groups are scattered over the features where they have an order: all of them are on every rank.
        groups = range(num_groups) if self.has_order else cut_groups(part, 1, size)
        words, rows_of_words = cut_words(part, 1, places), cut_words(part, 0, places)

        def tensor(end: str, shape: tuple[int, ...], ranges: tuple[range, ...], *dtypes: str) -> TensorSlice:
            return TensorSlice(stored_as(part, end), shape, ranges, dtypes)

        order = TensorSlice(
            stored_as(part, "g_idx"), (inputs,), (columns,), ("int32", "int64"), is_optional=not self.has_order
        )
        return {
            "qweight": tensor("qweight", (inputs // places, features), (words, rows), "int32"),
            "qzeros": tensor("qzeros", (num_groups, features // places), (groups, rows_of_words), "int32"),
            "scales": tensor("scales", (num_groups, features), (groups, rows), *FLOATS),
            "g_idx": order,
        }

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        """See Layout."""
        from trtrun.linear.stored.forms import PackedWeight

        return PackedWeight(
            packed=tensors["qweight"].T.contiguous(),
            scale=tensors["scales"].T,
            bits=self.bits,
            group_size=self.group_size or part.shape[1],
            zero=self._zero_points(tensors["qzeros"]),
            groups=self._groups(part, tensors),
        )

    def _zero_points(self, words: torch.Tensor) -> torch.Tensor | None:
        """[out, groups]; None where they are half of the codes' range, whichever version stored them so."""
        from trtrun.linear.stored.forms import unpack

        stored, half = unpack(words, self.bits), 1 << (self.bits - 1)
        if self.is_symmetric and stored.numel() and any(bool((stored == it).all()) for it in (half - 1, half)):
            return None
        return stored.add_(self.zero_offset).T.short()  # by number and not by word: the largest one would carry

    def _groups(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        import torch

        found, size = tensors.get("g_idx"), self.group_size or part.shape[1]
        if self.has_order:
            assert found is not None
            return read_order(part, found, tensors["scales"].shape[0])
        columns = part.ranges[1]
        in_order = torch.arange(columns.start, columns.stop) // size
        if found is not None and not torch.equal(found.long().cpu(), in_order):
            raise CheckpointError(
                f"{stored_as(part, 'g_idx')} has groups in another order, and desc_act of quantization_config is false"
            )
        return None


@STORED_QUANTIZATIONS.register("gptq")
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    version = values.get("checkpoint_format") or values.get("format")
    refuse({"format": version}, "format", "gptq", "gptq_v2", method="gptq", default="gptq")
    refuse(values, "bits", 4, 8, method="gptq")
    refuse(values, "pack_dtype", "int32", method="gptq", default="int32")
    refuse(values, "is_marlin_format", False, method="gptq", default=False)
    refuse(values, "modules_in_block_to_quantize", None, method="gptq")
    for key, default in (("desc_act", False), ("sym", True), ("lm_head", False)):
        refuse(values, key, True, False, method="gptq", default=default)
    layout = GptqLayout(
        bits=int(values["bits"]),
        group_size=read_group_size(values),
        has_order=bool(values.get("desc_act")),
        is_symmetric=values.get("sym") is not False,
        zero_offset=0 if version == "gptq_v2" else 1,
    )
    plain = ModuleNames([*read_names(values, "modules_to_not_convert"), *_read_exceptions(values)])
    return everywhere(StoredLinear(layout), plain, has_head=bool(values.get("lm_head")))


def _read_exceptions(values: Mapping[str, Any]) -> list[str]:
    """Entries of modules that `dynamic` leaves out ("-:expression"); what it stores otherwise is not supported."""
    names = []
    for key, changes in read_section(values, "dynamic").items():
        if not key.startswith("-:"):
            raise CheckpointError(
                f"gptq weights with settings of some modules (dynamic: {shorten(key)}: {shorten(changes)}) are not "
                "supported"
            )
        names.append(f"re:{key.removeprefix('-:')}")
    return names
