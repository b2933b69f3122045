"""`quant_method: awq`: codes of 4 bits with zero points, as AutoAWQ's GEMM version lays them down.

Sources: Lin et al. 2023 (arXiv:2306.00978), and AutoAWQ's awq/modules/linear/gemm.py. The scales that AWQ protects
weights with are folded into the layer before, so that nothing is left to do when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trtrun.linear.quantization.base import FLOATS, STORED_QUANTIZATIONS, StoredQuantizations, TensorSlice
from trtrun.linear.stored.layout import Codes, StoredLinear, codes_of_groups, cut_groups, cut_words, stored_as
from trtrun.linear.stored.settings import ModuleNames, everywhere, read_group_size, read_names, refuse

if TYPE_CHECKING:
    import torch

    from trtrun.linear.stored.forms import PackedWeight

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
        """See Layout."""
        return codes_of_groups(part, 4, self.group_size)

    def slices(self, part: TensorSlice) -> Mapping[str, TensorSlice]:
        """See Layout."""
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
        """See Layout."""
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
def parse(values: Mapping[str, Any]) -> StoredQuantizations:
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
