"""The recurrence of a gated delta net in CUDA C++: tokens go through matrices of states that stay in registers, one
after the other, in prompts and in rounds by the same kernel. So a token's bits depend neither on the cut of a prompt,
nor on drafts, nor on other rows.

It knows the kernel's arguments and how it is compiled. It does not know what is in front of it and behind
(trtrun.kernels.triton.delta_net).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parallel.transports.peer_all_reduce import begins_early, launch_early
from trtrun.errors import CheckpointError, StartError
from trtrun.kernels.torch.delta_net import DeltaNetWeights
from trtrun.kvcache.row_states import LayerStates, SegmentStates

_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

_SPLIT, _TOKENS = 8, 8
_OF_ROWS, _OF_PROMPTS = ((4, 64), (2, 64), (2, 32)), ((2, 256), (2, 128), (2, 64), (2, 32))
"""Of `Form`, columns and threads, the fastest of six on an H200 first. Blocks of fewer threads leave the card room for
the states of more rows; of a prompt, more threads share what it brings."""


class Form(NamedTuple):
    """How work is shared out.

    Attributes:
        split: threads that have a column of a matrix: the one number that bits depend on.
        columns: that each of them has a part of.
        tokens: that are asked for together.
        threads: of a block.
        of_prompts: whether it is for rows with many tokens.
    """

    split: int
    columns: int
    tokens: int
    threads: int
    of_prompts: bool

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.threads // self.split * self.columns


class Forms(NamedTuple):
    """One for rows with few tokens, and one for tiles of prompts. Bits are the same with either."""

    rows: Form
    prompts: Form


def forms_for(weights: DeltaNetWeights) -> Forms:
    """How work is shared out for heads.

    Raises:
        CheckpointError: the kernel does not take such heads.
    """
    rows = _first_that_fits(weights.value_dim, _OF_ROWS, of_prompts=False)
    prompts = _first_that_fits(weights.value_dim, _OF_PROMPTS, of_prompts=True)
    if weights.key_dim % (4 * _SPLIT) or weights.value_dim % rows.width:
        raise CheckpointError(
            f"heads of gated delta nets with keys of {weights.key_dim} numbers and values of {weights.value_dim}: on "
            f"GPUs these are multiples of {4 * _SPLIT} and {rows.width}; use CPU slots"
        )
    return Forms(rows, prompts)


def _first_that_fits(value_dim: int, numbers: Sequence[tuple[int, int]], *, of_prompts: bool) -> Form:
    """The first form of so many columns and threads that divides heads into whole blocks; the last where none does."""
    forms = [Form(_SPLIT, columns, _TOKENS, threads, of_prompts) for columns, threads in numbers]
    return next((form for form in forms if value_dim % form.width == 0), forms[-1])


class Tokens(NamedTuple):
    """What the tokens of one segment's rows bring, by row and in the order in which they go through its state.

    Attributes:
        query_key: [rows * tokens, 2 * key heads, key_dim] float32: queries, then keys.
        value: [rows * tokens, value heads, value_dim].
        factors: [rows * tokens, value heads, 2] float32: what heads keep of their matrix, and how much they correct.
    """

    query_key: torch.Tensor
    value: torch.Tensor
    factors: torch.Tensor


def kernel_source() -> str:
    """The CUDA C++ of the kernel."""
    return Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


def definitions(weights: DeltaNetWeights, form: Form, state: torch.dtype = torch.float32) -> dict[str, int]:
    """What is given at compilation; `state` is the dtype of matrices in memory."""
    return {
        "KEYS": weights.keys,
        "VALUES": weights.values,
        "KEY_DIM": weights.key_dim,
        "VALUE_DIM": weights.value_dim,
        "SPLIT": form.split,
        "COLUMNS": form.columns,
        "TOKENS": form.tokens,
        "THREADS": form.threads,
        "PROMPTS": int(form.of_prompts),
        "KIND": _KINDS[weights.norm.dtype],
        "STATE": _KINDS[state],
    }


class CudaRecurrence:
    """The kernel for one shape of heads, on the device of its weights.

    Args:
        weights: of the rank's heads; activations have the dtype of its norm.

    Raises:
        CheckpointError: it does not take such heads.
        StartError: there is no CuPy, or it cannot compile.
    """

    def __init__(self, weights: DeltaNetWeights) -> None:
        self._weights, self._device = weights, weights.fading.device
        self._forms = forms_for(weights)
        self._kernels = {torch.float32: self._kernels_of(torch.float32)}
        self._begins_early = begins_early(self._device)

    def _kernels_of(self, state: torch.dtype) -> list[tuple[Any, int]]:
        """Module and kernel of each form, for matrices that are kept in a dtype."""
        found = (definitions(self._weights, form, state) for form in self._forms)
        return [_compile(tuple(f"-D{name}={value}" for name, value in it.items()), self._device) for it in found]

    def __call__(self, brought: Tokens, states: LayerStates, segment_states: SegmentStates, read: torch.Tensor) -> None:
        """Carry the states of a segment's rows on, and fill in what its tokens read, [tokens, values * value_dim].

        States and the rows' numbers are read before the kernel in front has ended, which therefore must wait before it
        lets this one begin (kernels.triton.early_launch).
        """
        segment, weights, state = segment_states.segment, self._weights, states.states[1].dtype
        if state not in self._kernels:
            self._kernels[state] = self._kernels_of(state)
        are_prompts = segment.queries >= weights.tile
        form, (_, kernel) = self._forms[are_prompts], self._kernels[state][are_prompts]
        tensors = (
            *brought, states.states[1], states.snapshots[1], weights.key_of_value, read, segment_states.numbers
        )  # fmt: skip
        numbers = (segment.rows, len(brought.value) // segment.rows, segment.queries, segment.start)
        values = (*(tensor.data_ptr() for tensor in tensors), *numbers)
        blocks = segment.rows * weights.values * (weights.value_dim // form.width)
        array = (ctypes.c_int64 * len(values))(*values)
        first = ctypes.addressof(array)
        places = (ctypes.c_void_p * len(values))(*range(first, first + 8 * len(values), 8))
        with torch.cuda.device(self._device):  # the driver wants its context to be the current one
            stream, arguments = torch.cuda.current_stream(self._device).cuda_stream, ctypes.addressof(places)
            if self._begins_early:
                launch_early(kernel, blocks, form.threads, stream, arguments)
            else:
                shape = (blocks, 1, 1, form.threads, 1, 1)
                _driver().launchKernel(kernel, *shape, 0, stream, arguments, 0)


@cache
def _driver() -> Any:
    return importlib.import_module("cupy.cuda").driver


@cache
def _compile(words: tuple[str, ...], device: torch.device) -> tuple[Any, int]:
    """The module, which is to be kept as long as its kernel, and the kernel's handle; once for all layers."""
    try:
        cupy: Any = importlib.import_module("cupy")
        with torch.cuda.device(device), cupy.cuda.Device(torch.cuda.current_device()):
            module = cupy.RawModule(code=kernel_source(), options=("-std=c++17", *words))
            return module, int(module.get_function("carry_on").kernel.ptr)
    except Exception as error:  # import, loader, compiler, driver
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise StartError(
            f"gated delta nets need CuPy and NVRTC on {device}, which do not work ({reason}): install "
            "trtrun[cuda12] or trtrun[cuda13], or use CPU slots"
        ) from error
