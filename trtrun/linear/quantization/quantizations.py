"""How linear layers hold their weights: dense (`none`), or as codes with scales (`int8`, `int4`, `fp8`, `fp8_block`).

Codes need no calibration data: a weight is rounded to nearest as it is read, unless a checkpoint has its codes already
(trtrun.linear.stored). The model so made is what a target is then: speculative output is the rounded target's own, to
the bit. A rank of a tensor-parallel group scales its own slices, so that row-parallel layers of groups of several sizes
differ a little.

Products on CUDA are those of trtrun.kernels.triton.matmul where Triton works and the GPU multiplies such codes, and
cuBLAS elsewhere. On CPUs with AVX-512 BF16 weights of a byte without blocks go through trtrun.kernels.cpu.matmul, and
dense ones in bfloat16 and float32 with AVX2, too; other dense ones through oneDNN, packed once. Anything else is
torch's operations (trtrun.kernels.torch), which are right on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from typing_extensions import override

from trtrun.errors import ConfigError
from trtrun.linear.quantization.base import (
    QUANTIZATIONS,
    LinearWeight,
    Product,
    Quantization,
    Tensors,
    TensorSlice,
    TensorSpec,
    WeightSource,
)

if TYPE_CHECKING:
    import torch

BLOCK = 128
"""Output features of a block of `fp8_block`, and inputs."""

FEATURES, INPUTS = 64, 128
"""Output features and inputs of a weight of `int4` are multiples of these."""

_DTYPES = {"cpu": ("bfloat16",), "cuda": ("bfloat16", "float16")}

_GROUP_SIZES = (128, 64, 32)

_ROW_BYTES = 32
"""Bytes beside the codes of a row that `fp8` rounds: its scale, and what aligns them."""

_ROUNDED_TOGETHER = 16
"""Rows of `fp8_block` whose scales lie beside each other in memory, and bytes that codes of a row are aligned to."""


def has_fp8_products(device_type: str) -> bool:
    """Whether codes in E4M3 are multiplied as they are: on GPUs whose matrix units take them (8.9, and from 9.0 on).
    Where there is no GPU, as where a plan is made for another host, one like that is meant."""
    import torch

    from trtrun.kernels.triton.support import multiplies_fp8

    return device_type == "cuda" and (not torch.cuda.is_available() or multiplies_fp8(torch.device("cuda")))


def has_int4_products(device_type: str) -> bool:
    """Whether codes of 4 bits are multiplied as they are: on GPUs of compute capability 9.0. Where there is no GPU, as
    where a plan is made for another host, one like that is meant."""
    import torch

    from trtrun.kernels.triton.gluon_works import is_hopper

    return device_type == "cuda" and (not torch.cuda.is_available() or is_hopper(torch.device("cuda")))


def has_expert_codes(device_type: str) -> bool:
    """Whether experts in codes of 4 bits are multiplied as they are: on GPUs with Triton. Where there is no GPU, as
    where a plan is made for another host, one like that is meant."""
    import torch

    from trtrun.kernels.triton.support import triton_works

    return device_type == "cuda" and (not torch.cuda.is_available() or triton_works(device_type))


def int4_group(group_size: int) -> int | None:
    """Inputs of the groups that a rank holds where a checkpoint's have `group_size`; None where it cannot hold them."""
    return next((size for size in _GROUP_SIZES if not group_size % size), None)


class Dense(Quantization):
    """Weights in the dtype of activations: one tensor, "weight" [out, in]."""

    takes_head = True
    fits_targets = True
    fits_experts = True

    @override
    def check(self, dtype: str, device_type: str) -> None:
        """Accept any dtype on any device."""

    @override
    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the weight is not packed, which device and dtype alone decide."""
        from trtrun.kernels.chooser import operations_of

        return device.type != "cpu" or not operations_of(device.type).packs_weights(dtype)

    @override
    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        return weight.parts

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        return {"weight": TensorSpec(weight.shape, dtype)}

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Bytes of activations in float32, which they become first on CPUs that do not multiply bfloat16."""
        if len(weight.shape) != 2 or device_type != "cpu" or dtype.itemsize != 2:
            return 0
        return rows * weight.shape[1] * 4

    @override
    def load(self, source: WeightSource) -> Tensors:
        return {"weight": source.dense()}

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        from trtrun.kernels.chooser import operations_of

        weight = tensors["weight"]
        return operations_of(weight.device.type).product(weight, bias, batch_invariant=batch_invariant)


class Coded(Quantization):
    """Base of the quantizations with codes: a name for messages, and what they have in common.

    Products are bfloat16's on CPUs, and float16's, too, on GPUs.
    """

    takes_head = True
    fits_targets = True
    rounds_activations = False

    def __init__(self, name: str) -> None:
        self._name = name

    @override
    def check(self, dtype: str, device_type: str) -> None:
        if dtype not in _DTYPES[device_type]:  # it would run slower than unquantized
            raise ConfigError(
                f"quantization {self._name} computes in {' or '.join(_DTYPES[device_type])}, not in {dtype}: set dtype "
                "to bfloat16 or quantization to none"
            )

    @override
    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        return False

    @override
    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        return weight.parts


class Int8(Coded):
    """Weights of 8 bits, activations as they are (W8A16): "codes" [out, in] int8 and "scale" [out] float32.

    Each output feature is scaled so that its largest weight becomes 127: absmax quantization by vectors (Dettmers et
    al. 2022, arXiv:2208.07339, section 2.1) without their treatment of activations. It is for drafts alone: rows are
    bit-equal in any company by the CPU's kernel, but torch's products, and those of many rows on GPUs, promise nothing.
    A draft loses a little acceptance by it, the output of a run nothing.
    """

    fits_targets = False
    fits_experts = True

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        import torch

        return {
            "codes": TensorSpec(weight.shape, torch.int8),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Bytes of the whole weight, widened, and of sums in float32."""
        features, inputs = weight.shape
        return features * inputs * dtype.itemsize + rows * features * 4

    @override
    def load(self, source: WeightSource) -> Tensors:
        from trtrun.kernels.torch.integers import quantize_int8

        return quantize_int8(source.dense())

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        from trtrun.kernels.chooser import operations_of

        codes = tensors["codes"]
        return operations_of(codes.device.type).int8_product(codes, tensors["scale"], bias)


class Int4(Coded):
    """Weights of 4 bits in groups of inputs, each with a scale and a zero point, activations as they are (W4A16):
    "words" and "scales", both int32 (trtrun.kernels.torch.integers).

    Only checkpoints that are quantized so are held so, on GPUs: rounding to nearest, without calibration data, loses
    too much for targets. Dummy weights are rounded to nearest. No kernel rounds a weight on the way.

    Args:
        size: inputs of a group.
        is_expert: whether it is one of a layer's experts, whose words fill fewer inputs up.
    """

    def __init__(self, size: int, *, is_expert: bool = False) -> None:
        super().__init__("int4")
        self._size, self._is_expert = size, is_expert

    @property
    def step(self) -> int:
        """Inputs that words are filled up to."""
        from trtrun.kernels.torch.integers import GROUP, STEP

        return GROUP if self._is_expert else STEP

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        import torch

        from trtrun.kernels.torch.integers import scales_shape, words_shape

        features, inputs = weight.shape
        return {
            "words": TensorSpec(words_shape(features, inputs, self.step), torch.int32),
            "scales": TensorSpec(scales_shape(features, inputs, self._size, self.step), torch.int32),
        }

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Bytes of the dense weight, which torch's operations need."""
        features, inputs = weight.shape
        return 0 if device_type == "cuda" else features * inputs * dtype.itemsize

    @override
    def load(self, source: WeightSource) -> Tensors:
        from trtrun.kernels.torch.integers import quantize_int4

        return quantize_int4(source.dense(), self._size, self.step)

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        """The product, whose rows are bit-equal in any company on GPUs with Triton."""
        from trtrun.kernels.chooser import operations_of

        words = tensors["words"]
        return operations_of(words.device.type).int4_product(words, tensors["scales"], bias)


class Fp4(Coded):
    """Weights of experts of 4 bits with an exponent in blocks of 16 (NVFP4) or 32 (MXFP4), activations as they are:
    "words" int32, "blocks" uint8 and "factor" float32 (trtrun.kernels.torch.fp4). Only checkpoints that are quantized
    so are held so, on GPUs with Triton, where all experts of a layer are multiplied with together. Dummy weights are
    rounded to nearest.

    Args:
        size: inputs of a block.
    """

    def __init__(self, size: int) -> None:
        super().__init__("fp4")
        self._size = size

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        import torch

        from trtrun.kernels.torch import fp4, integers

        features, inputs = weight.shape
        return {
            "words": TensorSpec(integers.words_shape(features, inputs, integers.GROUP), torch.int32),
            "blocks": TensorSpec(fp4.scales_shape(features, inputs, self._size), torch.uint8),
            "factor": TensorSpec((features,), torch.float32),
        }

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        return 0

    @override
    def load(self, source: WeightSource) -> Tensors:
        from trtrun.kernels.torch import fp4

        made = fp4.quantize_mxfp4(source.dense()) if self._size == 32 else fp4.quantize_nvfp4(source.dense())
        return fp4.pack(made["codes"], made["scales"], made.get("whole", 1.0), self._size)

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        raise NotImplementedError("experts are multiplied with together")


class Fp8(Coded):
    """Weights of 8 bits with an exponent: "codes" [out, in] E4M3 and "scale" [out] float32.

    Each output feature is scaled so that its largest weight becomes 448. `fp8` rounds activations, too, each token by
    the largest number of its own row (dynamic quantization per token and per channel, as vLLM and TensorRT-LLM have
    it), so that the matrix units multiply codes by codes. `fp8_weight_only` leaves them as they are. The vocabulary
    head stays dense, as it does there: its rounding would show most, and it is read once a round. `fp8_with_head`
    rounds the head, too, for drafts: they read theirs for every token, and beside layers of 8 bits a dense head is a
    third of all bytes that a model of 1B reads. Rows are bit-equal in any company on all devices.

    Args:
        name: that it is registered by, for messages.
        rounds_activations: whether each token's activations are rounded to E4M3, too.
        takes_head: whether the vocabulary head is held so, too.
    """

    def __init__(self, name: str, *, rounds_activations: bool, takes_head: bool = False) -> None:
        super().__init__(name)
        self.rounds_activations = rounds_activations
        self.takes_head = takes_head

    @property
    def fits_experts(self) -> bool:
        """Whether GPUs multiply codes."""
        return has_fp8_products("cuda")

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        import torch

        return {
            "codes": TensorSpec(weight.shape, torch.float8_e4m3fn),
            "scale": TensorSpec(weight.shape[:1], torch.float32),
        }

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Bytes of rounded activations on GPUs that multiply codes; elsewhere of what rounding takes, or torch's
        operations."""
        from trtrun.kernels.torch.fp8 import TorchFp8Matmul

        inputs = weight.shape[1]
        if has_fp8_products(device_type):
            return rows * (inputs + _ROW_BYTES)
        return TorchFp8Matmul.working_bytes(rows, inputs)

    @override
    def load(self, source: WeightSource) -> Tensors:
        from trtrun.kernels.torch.fp8 import quantize

        return quantize(source.dense())

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        from trtrun.kernels.chooser import operations_of

        codes, rounds = tensors["codes"], self.rounds_activations
        return operations_of(codes.device.type).fp8_product(codes, tensors["scale"], bias, rounds_activations=rounds)


class Fp8Block(Coded):
    """Weights in E4M3 with a scale for each block of 128 by 128, as DeepSeek and Qwen publish theirs: "codes" [out, in]
    and "block_scale" [ceil(out / 128), ceil(in / 128)] float32.

    Activations are rounded, too, 128 numbers of a token at a time by the largest of them, as those checkpoints are made
    for, so that the matrix units multiply codes by codes. Checkpoints that are quantized so are held so on GPUs; others
    are rounded as they are read, by the largest weight of each block, and their vocabulary head stays dense. Cuts at
    multiples of 128 are the whole matrix's blocks. Rows are bit-equal in any company on all devices.
    """

    takes_head = False

    @property
    def fits_experts(self) -> bool:
        """Whether GPUs multiply codes."""
        return has_fp8_products("cuda")

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        import torch

        features, inputs = weight.shape
        return {
            "codes": TensorSpec((features, inputs), torch.float8_e4m3fn),
            "block_scale": TensorSpec((-(-features // BLOCK), -(-inputs // BLOCK)), torch.float32),
        }

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        """Bytes of rounded activations on GPUs that multiply codes; elsewhere of what torch's operations take."""
        from trtrun.kernels.torch.fp8 import TorchFp8BlockMatmul

        features, inputs = weight.shape
        if has_fp8_products(device_type):
            scales = -(-inputs // BLOCK) * 4
            return rows * (inputs + scales + _ROUNDED_TOGETHER) + _ROUNDED_TOGETHER * scales
        return TorchFp8BlockMatmul.working_bytes(rows, features, inputs)

    @override
    def load(self, source: WeightSource) -> Tensors:
        from trtrun.kernels.torch.fp8 import quantize_blocks

        return quantize_blocks(source.dense())

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        from trtrun.kernels.chooser import operations_of

        codes = tensors["codes"]
        return operations_of(codes.device.type).fp8_block_product(codes, tensors["block_scale"], bias)


@dataclass(frozen=True)
class Rounded(Quantization):
    """Weights that files have in an order of their own, held as a quantization holds plain ones.

    Attributes:
        stored_as: reads them, "weight" [out, in].
        held_as: holds them.
    """

    stored_as: Quantization
    held_as: Quantization

    @property
    def takes_head(self) -> bool:
        return self.held_as.takes_head

    @property
    def fits_targets(self) -> bool:
        return self.held_as.fits_targets

    @property
    def fits_experts(self) -> bool:
        return self.held_as.fits_experts

    @property
    def rounds_activations(self) -> bool:
        return self.held_as.rounds_activations

    @override
    def check(self, dtype: str, device_type: str) -> None:
        self.held_as.check(dtype, device_type)

    @override
    def keeps_dense(self, dtype: torch.dtype, device: torch.device) -> bool:
        return self.held_as.keeps_dense(dtype, device)

    @override
    def stored(self, weight: LinearWeight) -> Sequence[TensorSlice]:
        return self.stored_as.stored(weight)

    @override
    def create(self, weight: LinearWeight, dtype: torch.dtype, device_type: str) -> Mapping[str, TensorSpec]:
        return self.held_as.create(weight, dtype, device_type)

    @override
    def working_bytes(self, weight: LinearWeight, rows: int, dtype: torch.dtype, device_type: str) -> int:
        return self.held_as.working_bytes(weight, rows, dtype, device_type)

    @override
    def load(self, source: WeightSource) -> Tensors:
        return self.held_as.load(source.with_dense(self.stored_as.load(source)["weight"]))

    @override
    def apply(self, tensors: Tensors, bias: torch.Tensor | None, *, batch_invariant: bool) -> Product:
        return self.held_as.apply(tensors, bias, batch_invariant=batch_invariant)


QUANTIZATIONS.register("none")(Dense())
QUANTIZATIONS.register("fp8")(Fp8("fp8", rounds_activations=True))
QUANTIZATIONS.register("fp8_with_head")(Fp8("fp8_with_head", rounds_activations=True, takes_head=True))
QUANTIZATIONS.register("fp8_weight_only")(Fp8("fp8_weight_only", rounds_activations=False))
QUANTIZATIONS.register("fp8_block")(Fp8Block("fp8_block"))
QUANTIZATIONS.register("int8")(Int8("int8"))
