"""The small operations between products in bfloat16 or float32 on the CPU: each one pass over its rows in place of
several. Their code is in fused_code.py.

Every intermediate that the models' own code rounds to bfloat16 is rounded to it here, and a row's result is bit-equal
in any company: sums run over a row alone, in one order. In float32 that is why they are here: torch computes most of a
tensor with vectors and its last numbers without, by another exp, so that a number's bits depend on where it lies.
"""

from __future__ import annotations

import ctypes
import functools
import math

import torch

from trtrun.kernels.arguments import Activation
from trtrun.kernels.cpu import machine
from trtrun.kernels.cpu.emitter import LANES
from trtrun.kernels.cpu.fused_code import (
    ACTIVATIONS,
    NORMALISE,
    ROTATE,
    SQUARE_SUMS,
    XIELU,
    Arguments,
    fused_module,
)
from trtrun.kernels.cpu.machine import MULTIPLIES_BFLOAT16, Kernel, load_kernels

_ALONE = 16 * 1024
"""Numbers up to which one thread is faster than waking others (measured: a microsecond or two)."""


def fuses(dtype: torch.dtype, device: torch.device, size: int) -> bool:
    """Whether the kernels of this module take vectors of `size` numbers of this dtype on this device: any of float32,
    whole registers of bfloat16."""
    is_taken = dtype is torch.float32 or (dtype is torch.bfloat16 and size % LANES == 0)
    return is_taken and device.type == "cpu" and machine.processor_kind() is not None


def rotates(dtype: torch.dtype, device: torch.device, size: int) -> bool:
    """Whether `rotate` takes heads of `size` numbers. Of others torch's has the same bits in any company, too."""
    return size // 2 % LANES == 0 and fuses(dtype, device, size)


def normalise(x: torch.Tensor, weight: torch.Tensor, epsilon: float, delta: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) of x [rows, …, size] with weight [size], or x [rows, parts, size] with [parts, size].

    Where `delta` [rows, size] is given, x [rows, size] becomes x + delta first, in place. Vectors of a row lie one
    behind the other.
    """
    output = torch.empty(x.shape, dtype=x.dtype)
    parts = weight.shape[0] if weight.dim() == 2 else 1
    arguments = Arguments(
        x=x.data_ptr(),
        delta=None if delta is None else delta.data_ptr(),
        weight=weight.data_ptr(),
        output=output.data_ptr(),
        x_stride=x.stride(0) * x.itemsize,
        rows=x.shape[0],
        parts=parts,
        size=weight.shape[-1],
        epsilon=epsilon,
    )
    return _run(NORMALISE, arguments, output)


def square_sums(x: torch.Tensor) -> torch.Tensor:
    """The sum of squares of each row of x [rows, size], whose rows have no gaps, [rows] float32."""
    output = torch.empty(x.shape[0], dtype=torch.float32)
    arguments = Arguments(
        x=x.data_ptr(),
        output=output.data_ptr(),
        x_stride=x.stride(0) * x.itemsize,
        rows=x.shape[0],
        parts=1,
        size=x.shape[1],
    )
    return _run(SQUARE_SUMS, arguments, output, x)


def activate_and_multiply(
    fused: torch.Tensor, activation: Activation = "silu", limit: float = math.inf
) -> torch.Tensor:
    """fused [rows, 2 * size], gates before factors → [rows, size], as `TorchOperations.activate_and_multiply` has
    it."""
    rows, size = fused.shape[0], fused.shape[1] // 2
    output = torch.empty((rows, size), dtype=fused.dtype)
    arguments = Arguments(
        x=fused.data_ptr(),
        output=output.data_ptr(),
        x_stride=fused.stride(0) * fused.itemsize,
        rows=rows,
        parts=1,
        size=size,
        limit=limit,
    )
    return _run(ACTIVATIONS[activation], arguments, output)


def xielu(x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """xIELU of x [rows, size], whose rows have no gaps, as `TorchOperations.xielu` has it."""
    output = torch.empty(x.shape, dtype=x.dtype)
    arguments = Arguments(
        x=x.data_ptr(),
        weight=numbers.data_ptr(),
        output=output.data_ptr(),
        x_stride=x.stride(0) * x.itemsize,
        rows=x.shape[0],
        parts=1,
        size=x.shape[1],
    )
    return _run(XIELU, arguments, output)


def rotate_by_kernel(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """heads [rows, heads, size] turned by cosine and signed sine, each [rows, 1, size] (see rotary.py)."""
    output = torch.empty(heads.shape, dtype=heads.dtype)
    arguments = Arguments(
        x=heads.data_ptr(),
        weight=cosine.data_ptr(),
        sine=sine.data_ptr(),
        output=output.data_ptr(),
        x_stride=heads.stride(0) * heads.itemsize,
        rows=heads.shape[0],
        parts=heads.shape[1],
        size=heads.shape[2],
    )
    return _run(ROTATE, arguments, output)


def _run(name: str, arguments: Arguments, output: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    """Run a kernel; `x` is what it computes on, where that is of another size or dtype than its output."""
    like = output if x is None else x
    threads = 1 if like.numel() <= _ALONE else torch.get_num_threads()
    is_float32 = like.dtype is torch.float32
    multiplies_bfloat16 = not is_float32 and machine.processor_kind() == MULTIPLIES_BFLOAT16
    _kernels(multiplies_bfloat16, is_float32)[name](ctypes.addressof(arguments), threads)
    return output


@functools.cache
def _kernels(multiplies_bfloat16: bool, is_float32: bool) -> dict[str, Kernel]:
    names = (NORMALISE, SQUARE_SUMS, *ACTIVATIONS.values(), ROTATE, XIELU)
    return load_kernels(fused_module, multiplies_bfloat16, is_float32, names=names)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """heads [tokens, heads, head] turned by cosines and signed sines [tokens, 1, head]; a new tensor.

    Each product and the sum are rounded to the dtype, as transformers does; a fused multiply-add would round
    differently in vectorised loops and in their scalar tails, and so depend on the number of tokens.
    """
    half = heads.shape[2] // 2
    if rotates(heads.dtype, heads.device, heads.shape[2]):
        return rotate_by_kernel(heads, cosine, sine)
    return (heads * cosine).add_(torch.roll(heads, half, 2).mul_(sine))
