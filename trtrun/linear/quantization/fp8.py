"""Weights of 8 bits with an exponent (E4M3), for targets and drafts: half the bytes of a bfloat16 weight to read.

Each output feature is scaled so that its largest weight becomes 448, and rounded to nearest; no calibration data is
needed. `fp8` rounds activations, too, each token by the largest number of its own row (dynamic quantization per token
and per channel, as vLLM and TensorRT-LLM have it), so that the matrix units multiply codes by codes.
`fp8_weight_only` leaves them as they are. The vocabulary head stays dense, as it does there: its rounding would show
most, and it is read once a round. `fp8_with_head` rounds the head, too, for drafts: they read theirs for every token,
and beside layers of 8 bits a dense head is a third of all bytes that a model of 1B reads.

The model so made is what a target is then: speculative output is the rounded target's own, to the bit. A rank of a
tensor-parallel group scales its own slices, so that row-parallel layers of groups of several sizes differ a little.

Products, by device:

- CUDA with Triton, on GPUs that multiply E4M3 (8.9, and from 9.0 on): trtrun.kernels.triton.matmul.fp8_matmul.
- CPU with AVX-512 BF16: trtrun.kernels.cpu.matmul.
- anything else: torch's operations (trtrun.kernels.torch.fp8), right anywhere.

It knows one weight and its products. It does not know how these work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trtrun.linear.quantization.base import (
    QUANTIZATIONS,
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

_ROW_BYTES = 32
"""Beside the codes of a rounded row: its scale, and what aligns them."""


def has_fp8_products(device_type: str) -> bool:
    """Whether codes are multiplied as they are: on GPUs whose matrix units take E4M3. Where there is none, as where a
    plan is made for another host, one like that is meant."""
    import torch

    from trtrun.kernels.triton.support import multiplies_fp8

    return device_type == "cuda" and (not torch.cuda.is_available() or multiplies_fp8(torch.device("cuda")))


class Fp8:
    """Two tensors, "codes" [out, in] E4M3 and "scale" [out] float32: a weight is codes * scale; see `Quantization`.

    Args:
        name: that it is registered by, for messages.
        rounds_activations: whether each token's activations are rounded to E4M3, too.
        takes_head: see `Quantization`.
    """

    fits_targets = True

    def __init__(self, name: str, *, rounds_activations: bool, takes_head: bool = False) -> None:
        self._name = name
        self._rounds_activations = rounds_activations
        self.takes_head = takes_head

    def check(self, dtype: str, device_type: str) -> None:
        """bfloat16 on CPUs; on GPUs float16, too."""
        check_half_precision(self._name, dtype, device_type)

    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Never."""
        return False

    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        """See `Quantization`."""
        return weight.parts

    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        """See `Quantization`."""
        import torch

        return {
            "codes": TensorSpec(weight.shape, torch.float8_e4m3fn),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """See `Quantization`: rounded activations on GPUs that multiply codes; elsewhere what rounding takes, or
        torch's operations."""
        from trtrun.kernels.torch.fp8 import TorchFp8Matmul

        inputs = weight.shape[1]
        if has_fp8_products(device_type):
            return rows * (inputs + _ROW_BYTES)
        return TorchFp8Matmul.working_bytes(rows, inputs)

    def load(self, source: WeightSource) -> Tensors:
        """See `Quantization`."""
        from trtrun.kernels.torch.fp8 import quantize

        return quantize(source.dense())

    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """See `Quantization`. Rows are bit-equal in any company on all devices."""
        from trtrun.kernels.chooser import operations_of

        codes, rounds = tensors["codes"], self._rounds_activations
        return operations_of(codes.device.type).fp8_product(codes, tensors["scale"], bias, rounds_activations=rounds)


QUANTIZATIONS.register("fp8")(Fp8("fp8", rounds_activations=True))
QUANTIZATIONS.register("fp8_with_head")(Fp8("fp8_with_head", rounds_activations=True, takes_head=True))
QUANTIZATIONS.register("fp8_weight_only")(Fp8("fp8_weight_only", rounds_activations=False))
