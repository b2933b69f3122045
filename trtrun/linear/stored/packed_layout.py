"""The layout of compressed-tensors' pack-quantized: codes of 4 or 8 bits along the input features.

Source: compressed-tensors' pack_quantized compressor. It knows names, shapes and bytes. It does not know
configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trtrun.errors import CheckpointError
from trtrun.linear.quantization.base import FLOATS, TensorSlice
from trtrun.linear.stored.layout import Codes, codes_of_groups, cut_groups, cut_words, stored_as

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
        """See Layout."""
        return None if self.has_order else codes_of_groups(part, self.bits, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
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
        """See Layout."""
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
