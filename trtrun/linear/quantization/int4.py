"""Weights of 4 bits in groups of 32, 64 or 128 inputs, each with a scale and a zero point; activations as they are
(W4A16): a quarter of the bytes of a bfloat16 weight to read, and a little more for the scales.

Only checkpoints that are quantized so are held so, on GPUs (trtrun.linear.stored): rounding to nearest, which needs no
calibration data, loses too much for targets. Made-up weights are rounded to nearest.

Products, by device:

- CUDA with Triton, on GPUs of compute capability 9.0: trtrun.kernels.triton.matmul.int_matmul, which rounds no weight.
- anything else: torch's operations (trtrun.kernels.torch.integers), right anywhere.

It knows one weight and its products. It does not know how these work, nor files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import (
    LinearWeight,
    Product,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
    check_half_precision,
)

if TYPE_CHECKING:
    import torch

FEATURES, INPUTS = 64, 128
"""A weight's output features and inputs must be multiples of these."""

_SIZES = (128, 64, 32)


def has_int4_products(device_type: str) -> bool:
    """Whether codes are multiplied as they are: on GPUs of compute capability 9.0. Where there is none, as where a plan
    is made for another host, one like that is meant."""
    import torch

    from trtrun.kernels.triton.gluon_works import is_hopper

    return device_type == "cuda" and (not torch.cuda.is_available() or is_hopper(torch.device("cuda")))


def int4_group(group_size: int) -> int | None:
    """Of how many inputs groups are held, where a checkpoint's have `group_size`; None where they cannot be."""
    return next((size for size in _SIZES if not group_size % size), None)


class Int4:
    """Two tensors, "words" and "scales", both int32; see `Quantization` and trtrun.kernels.torch.integers.

    Args:
        size: inputs of a group.
    """

    takes_head = True
    fits_targets = True

    def __init__(self, size: int) -> None:
        self._size = size

    def check(self, dtype: str, device_type: str) -> None:
        """bfloat16 on CPUs; on GPUs float16, too."""
        check_half_precision("int4", dtype, device_type)

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """See `Quantization`."""
        return weight.parts

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """See `Quantization`."""
        import torch

        from trtrun.kernels.torch.integers import scales_shape, words_shape

        features, inputs = weight.shape
        return {
            "words": TensorSpec(words_shape(features, inputs), torch.int32),
            "scales": TensorSpec(scales_shape(features, inputs, self._size), torch.int32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: torch's operations need the dense weight."""
        features, inputs = weight.shape
        return 0 if device_type == "cuda" else features * inputs * dtype.itemsize

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        from trtrun.kernels.torch.integers import quantize_int4

        return quantize_int4(source.dense(), self._size)

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`. Rows are bit-equal in any company on GPUs with Triton."""
        from trtrun.kernels.chooser import operations_of

        words = tensors["words"]
        return operations_of(words.device.type).int4_product(words, tensors["scales"], bias)
