"""What a quantization is: one class that says which tensors a linear layer has, loads them, and multiplies with them.

A new one is one file here that registers itself by its name in the YAML file, or one in trtrun.linear.stored where
checkpoints are stored so, by their `quant_method`: `stored` and `create` (tensors, shapes and dtypes, from which files
are checked and sizes counted), `load` (from the checkpoint: a dense weight, rounded as it is read, or tensors of its
own) and `apply` (the fastest product on the tensors' device). Loading, sizing and the layer ask it and never look at
what it holds. `check` and `stored` are asked before any rank starts, by a process that does without torch: a
quantization imports torch, and its kernels, only where tensors are held. This module knows shapes, dtypes and devices.
It does not know models, files or any product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trtrun.errors import ConfigError
from trtrun.registry import Registry

if TYPE_CHECKING:
    import torch

Tensors = Mapping[str, "torch.Tensor"]
"""What a layer's weight is held in, by the names that `create` gives."""

Product = Callable[["torch.Tensor"], "torch.Tensor"]
"""x [rows, in] → x @ weight.T + bias [rows, out], in x's dtype.

One that rounds rows of x may say in `takes_rounded_rows` how: it takes RoundedRows (trtrun.kernels) of that kind, too.
"""


FLOATS = ("float32", "float16", "bfloat16")
"""Dtypes of what is stored plainly, by torch's names."""


@dataclass(frozen=True)
class TensorSlice:
    """A slice of one tensor of a checkpoint.

    Attributes:
        name: such as "model.layers.0.mlp.down_proj.weight".
        shape: of the whole tensor.
        ranges: what is wanted of it, one for each dimension.
        dtypes: that the tensor may have, by torch's names.
        is_optional: whether files may lack it.
        ones_vary: whether the file's shape may have dimensions of one number more or fewer: formats do not agree on
            those of scales.
        usual: what its numbers are where files lack one that is optional, of those that no quantization looks for.
    """

    name: str
    shape: tuple[int, ...]
    ranges: tuple[range, ...]
    dtypes: tuple[str, ...] = FLOATS
    is_optional: bool = False
    ones_vary: bool = False
    usual: float = 0.0


class LinearWeight(Protocol):
    """What a rank's layer multiplies with, as the architecture has it, whatever it will be held in."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]."""
        ...

    @property
    def use(self) -> str:
        """What for: "expert" for one of a layer's experts, which devices multiply with together."""
        ...

    @property
    def parts(self) -> Sequence[TensorSlice]:
        """Slices of the model's matrices [out, in], one behind the other along `out`; zeros follow up to `shape`.

        Their names end in ".weight"; a checkpoint that is quantized has other tensors of the same beginning.
        """
        ...


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor that a layer holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def count_bytes(held: Mapping[str, TensorSpec]) -> int:
    """Bytes of what `create` answers."""
    return sum(spec.num_bytes for spec in held.values())


class WeightSource(Protocol):
    """Where one layer's weight comes from, as `load` gets it."""

    @property
    def weight(self) -> LinearWeight:
        """The weight that is loaded."""
        ...

    def dense(self) -> torch.Tensor:
        """The weight [out, in] in the dtype of activations on the layer's device, checked to be finite.

        Where the quantization does not keep it (`keeps_dense`), it may lie in a buffer that the next layer overwrites
        once this one is made.
        """
        ...

    def with_dense(self, dense: torch.Tensor) -> WeightSource:
        """The same, with a dense weight that is read already."""
        ...

    @property
    def is_dummy(self) -> bool:
        """Whether there are no files: only `dense` answers then."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where `load` makes its tensors."""
        ...

    @property
    def device_type(self) -> str:
        """Type of the device that will multiply with them: that of `device`, unless they are made for another host."""
        ...

    def allocate(self) -> torch.Tensor:
        """Memory as `dense` returns it, not filled yet: for weights that become dense as they are read."""
        ...

    def put(self, name: str, destination: torch.Tensor, values: torch.Tensor) -> None:
        """Copy values to a part of `destination`, converted to its dtype.

        Raises:
            CheckpointError: they are not finite there; it names the tensor `name`.
        """
        ...

    def has(self, stored: TensorSlice) -> bool:
        """Whether the files have one of `Quantization.stored` that is optional."""
        ...

    def read(self, stored: TensorSlice) -> torch.Tensor:
        """One of `Quantization.stored` in the file's dtype on the layer's device.

        Raises:
            CheckpointError: it holds NaN or infinite values.
        """
        ...


class Quantization(Protocol):
    """One way to hold the weights of linear layers. It has no state: layers are in what `apply` returns.

    Attributes:
        takes_head: whether the vocabulary head is held so, too. Else it is dense, as with the quantization "none".
        fits_targets: whether a target may be held so: a row's result is bit-equal in any company wherever it is for a
            dense weight, so that verification is exact.
        fits_experts: whether all of a layer's experts can be multiplied with together on GPUs, where they are held so.
        rounds_activations: whether products with such weights of experts round rows to E4M3, by token.
    """

    @property
    def takes_head(self) -> bool: ...

    @property
    def fits_targets(self) -> bool: ...

    @property
    def fits_experts(self) -> bool:
        return False

    @property
    def rounds_activations(self) -> bool:
        return False

    def check(self, dtype: str, device_type: str) -> None:
        """Raise ConfigError where activations of a dtype, by name, cannot be multiplied with such weights on a type of
        device."""
        ...

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether layers multiply with the dense weight itself, so that tied embeddings are the same tensor."""
        ...

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """What is read of the checkpoint for a layer with `weight`. Every name and shape is checked before the first
        weight is read.

        Raises:
            CheckpointError: what is stored cannot be cut where the rank's slices are.
        """
        ...

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """The tensors of a layer with `weight` that stay on a type of device, by name, for activations of `dtype`. Host
        arithmetic; nothing is allocated."""
        ...

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Upper bound of what a product of `rows` rows needs beside its operands and its result, told from shapes."""
        ...

    def load(self, source: WeightSource) -> Tensors:
        """The tensors that `create` tells, on the layer's device, filled from `source`.

        Raises:
            CheckpointError: values that are not finite, or that contradict each other.
        """
        ...

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """The fastest product with loaded `tensors` on their device. It may pack copies and let the tensors go.

        Args:
            tensors: from `load`.
            bias: [out] in the dtype of activations, or None.
            batch_invariant: whether a row's result must be bit-equal whatever the number of rows: in bfloat16 on
                the CPU, and in half precision on a GPU with Triton, where it is so in any case.
        """
        ...


QUANTIZATIONS: Registry[Quantization] = Registry(
    "quantization",
    advice="others, such as 4 bits, are read as they are from checkpoints, which `trtrun quantize` writes",
)
"""By the names that the YAML file gives to how plain weights are to be held."""

StoredQuantizations = Callable[[str], Quantization | None]
"""Name of a matrix of the architecture, such as "model.layers.0.mlp.down_proj.weight" → how a checkpoint has stored it,
which must be hashable; None where it has stored it plainly, as what is on an ignore list."""

STORED_QUANTIZATIONS: Registry[Callable[[Mapping[str, Any]], StoredQuantizations]] = Registry("quant_method")
"""By the `quant_method` of a config.json's `quantization_config`, which they are given."""


def find_quantization(name: str, *, for_target: bool) -> Quantization:
    """The quantization called `name`.

    Raises:
        ConfigError: there is none of that name, or a target cannot be held so.
    """
    found = QUANTIZATIONS.get(name)
    if for_target and not found.fits_targets:
        others = ", ".join(other for other in QUANTIZATIONS if QUANTIZATIONS.get(other).fits_targets)
        raise ConfigError(
            f"quantization {name} is for drafts alone, as its rows depend on their company: use one of {others}"
        )
    return found


def of_head(quantization: Quantization) -> Quantization:
    """How the vocabulary head is held where the other linear layers are held as `quantization` says."""
    return quantization if quantization.takes_head else QUANTIZATIONS.get("none")
