"""Layouts of codes of 4 or 8 bits with a scale for each group of inputs: compressed-tensors' pack-quantized, GPTQ's
and AWQ's; and the methods `quant_method: gptq` and `awq`.

Sources: compressed-tensors' pack_quantized compressor; Frantar et al. 2022 (arXiv:2210.17323) and GPTQModel's qlinear;
Lin et al. 2023 (arXiv:2306.00978) and AutoAWQ's awq/modules/linear/gemm.py. Version 1 of GPTQ's format stores zero
points less 1, version 2 as they are, and files say the wrong one: published ones with symmetric codes are told by the
zero points themselves, which are half of the codes' range everywhere. The scales that AWQ protects weights with are
folded into the layer before, so that nothing is left to do when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.errors import CheckpointError, shorten
from trtrun.linear.quantization.base import FLOATS, STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.stored.layout import Codes, StoredLinear, codes_of_groups, cut_groups, cut_words, stored_as
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
class PackedLayout:
    """weight_packed int32 [out, in * bits / 32], weight_scale [out, groups], and where they are asymmetric
    weight_zero_point int32 [out * bits / 32, groups], packed along the output features. Stored are codes and zero
    points plus half of their range. With act-order weight_g_idx [in] says the group of each input feature.

    Attributes:
        bits: of a code.
        group_size: input features of a group; None where all are one.
        is_symmetric: whether there are no zero points.
        has_order: whether there is a weight_g_idx.
    """

    bits: int
    group_size: int | None
    is_symmetric: bool
    has_order: bool = False

    name = "compressed-tensors pack-quantized"
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        return None if self.has_order else codes_of_groups(part, self.bits, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        (features, inputs), (rows, columns) = part.shape, part.ranges
        places, size = _WORD_BITS // self.bits, self.group_size or inputs
        num_groups = -(-inputs // size)
        # Groups are scattered over the features where they have an order: all of them are on every rank.
        groups = range(num_groups) if self.has_order else cut_groups(part, 1, size)
        words = cut_words(part, 1, places)

        def tensor(end: str, shape: tuple[int, ...], ranges: tuple[range, ...], *dtypes: str) -> TensorSlice:
            return TensorSlice(stored_as(part, end), shape, ranges, dtypes)

        found = {
            "packed": tensor("weight_packed", (features, inputs // places), (rows, words), "int32"),
            "scale": tensor("weight_scale", (features, num_groups), (rows, groups), *FLOATS),
        }
        if not self.is_symmetric:
            rows_of_words = cut_words(part, 0, places)
            shape = features // places, num_groups
            found["zero"] = tensor("weight_zero_point", shape, (rows_of_words, groups), "int32")
        if self.has_order:
            found["order"] = tensor("weight_g_idx", (inputs,), (columns,), "int32", "int64")
        return found

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        from trtrun.linear.stored.forms import PackedWeight, unpack

        zero, order = tensors.get("zero"), tensors.get("order")
        return PackedWeight(
            packed=tensors["packed"],
            scale=tensors["scale"],
            bits=self.bits,
            group_size=self.group_size or part.shape[1],
            zero=None if zero is None else unpack(zero.T.contiguous(), self.bits).T.short(),
            groups=None if order is None else read_order(part, order, tensors["scale"].shape[1]),
        )


def read_order(part: TensorSlice, order: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The group of each input feature, int64.

    Raises:
        CheckpointError: there are no such groups.
    """
    if order.numel() and not 0 <= int(order.min()) <= int(order.max()) < num_groups:
        found = f"{int(order.min())} to {int(order.max())}"
        raise CheckpointError(f"{part.name}: its features are of groups {found}, and there are {num_groups} groups")
    return order.long()


_PLACES = 8
_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word, counted from the lowest bits, each of its eight output features lies."""


@dataclass(frozen=True)
class AwqLayout:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]: all of them transposed.

    Attributes:
        group_size: input features of a group; None where all are one.
    """

    group_size: int | None

    name = "awq"
    rounds_activations = False

    def codes(self, part: TensorSlice) -> Codes | None:
        return codes_of_groups(part, 4, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        features, inputs = part.shape
        size = self.group_size or inputs
        words, groups = cut_words(part, 0, _PLACES), cut_groups(part, 1, size)
        cut_words(part, 1, _PLACES)  # as words are along them in memory
        narrow, num_groups = features // _PLACES, -(-inputs // size)

        def tensor(end: str, shape: tuple[int, int], ranges: tuple[range, range], *dtypes: str) -> TensorSlice:
            return TensorSlice(stored_as(part, end), shape, ranges, dtypes)

        return {
            "qweight": tensor("qweight", (inputs, narrow), (part.ranges[1], words), "int32"),
            "qzeros": tensor("qzeros", (num_groups, narrow), (groups, words), "int32"),
            "scales": tensor("scales", (num_groups, features), (groups, part.ranges[0]), *FLOATS),
        }

    def form(self, part: TensorSlice, tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
        from trtrun.linear.stored.forms import PackedWeight, pack, unpack
        from trtrun.tensors import numbers_at_a_time

        def spread(words: torch.Tensor) -> torch.Tensor:
            """[rows, out / 8] words → codes [out, rows]."""
            return unpack(words, 4).view(*words.shape, _PLACES)[..., _ORDER].flatten(1).T

        words = tensors["qweight"]
        packed = words.new_empty((words.shape[1] * _PLACES, words.shape[0] // _PLACES))
        step = max(1, numbers_at_a_time(words.device) // (words.shape[1] * _PLACES**2))
        for start in range(0, packed.shape[1], step):
            place = packed[:, start : start + step]
            place.copy_(pack(spread(words[start * _PLACES : (start + step) * _PLACES]), 4))
        return PackedWeight(
            packed=packed,
            scale=tensors["scales"].T,
            bits=4,
            group_size=self.group_size or part.shape[1],
            zero=spread(tensors["qzeros"]).short(),
        )


@STORED_QUANTIZATIONS.register("awq")
def parse_awq(values: Mapping[str, Any]) -> StoredQuantizations:
    """How each matrix is stored.

    Raises:
        CheckpointError: `values` say something that is not supported.
    """
    version = values.get("version")
    values = {**values, "version": version.lower() if isinstance(version, str) else version}
    refuse(values, "version", "gemm", method="awq", default="gemm")
    refuse(values, "backend", "autoawq", method="awq", default="autoawq")
    refuse(values, "bits", 4, method="awq")
    refuse(values, "zero_point", True, method="awq", default=True)
    plain = ModuleNames(read_names(values, "modules_to_not_convert"))
    return everywhere(StoredLinear(AwqLayout(read_group_size(values))), plain)


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
        return None if self.has_order else codes_of_groups(part, self.bits, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
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
def parse_gptq(values: Mapping[str, Any]) -> StoredQuantizations:
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
