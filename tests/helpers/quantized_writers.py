"""Writes matrices in the formats of quantized checkpoints, byte by byte from the formats' descriptions.

The writers share no code with the product: each takes a weight, lays codes and scales of it down, and says which
numbers that makes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
Writer = Callable[[torch.Tensor, torch.Generator], tuple[Tensors, torch.Tensor]]
"""A weight [out, in] float32 → stored tensors by the end of their names, and their numbers [out, in] float32."""


def write_fp8(strategy: str, end: str = "weight_scale", dtype: torch.dtype = torch.float32, ones: int = 0) -> Writer:
    """E4M3 codes; `ones` dimensions of one number behind those of the scale."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        if strategy == "tensor":
            scale = weight.abs().amax() / 448
        elif strategy == "channel":
            scale = weight.abs().amax(1) / 448
        else:
            scale = torch.zeros(-(-rows // 128), -(-columns // 128))
            for row in range(scale.shape[0]):
                for column in range(scale.shape[1]):
                    block = weight[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
                    scale[row, column] = block.abs().amax() / 448
        scale = scale.to(dtype)
        whole = scale.float()
        if strategy == "channel":
            whole = whole[:, None].expand(rows, columns)
        elif strategy == "block":
            whole = whole.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        codes = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, end: scale.reshape([*scale.shape, *[1] * ones])}
        if strategy == "tensor":
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, codes.float() * whole

    return write


def asymmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zero points and float16 scales [out, groups]: each group's range cut into 2^bits - 1 steps."""
    grouped = weight.view(weight.shape[0], -1, group)
    least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    scale = ((most - least) / (2**bits - 1)).half()
    zero = (-least / scale.float()).round().clamp(0, 2**bits - 1).int()
    codes = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1).int()
    return codes.view_as(weight), zero, scale


def numbers_of(codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """(q - z) * s, by the group of each column."""
    return (codes - zero[:, groups]).float() * scale.float()[:, groups]


def words_along(codes: torch.Tensor, dimension: int, places: list[int]) -> torch.Tensor:
    """Words of 32 bits along a dimension; the j-th bits from below are of the number at `places`[j] of the word."""
    bits, moved = 32 // len(places), codes.movedim(dimension, 0).long()
    words = torch.zeros(moved.shape[0] // len(places), *moved.shape[1:], dtype=torch.int64)
    for word in range(words.shape[0]):
        for at, place in enumerate(places):
            words[word] += moved[len(places) * word + place] << (bits * at)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.int().movedim(0, dimension)


def write_awq(group: int) -> Writer:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size = weight.shape[1] if group == -1 else group
        codes, zero, scale = asymmetric(weight, size)
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        tensors = {
            "qweight": words_along(codes.T, 1, order),
            "qzeros": words_along(zero.T, 1, order),
            "scales": scale.T,
        }
        return tensors, numbers_of(codes, zero, scale, torch.arange(weight.shape[1]) // size)

    return write


def symmetric(weight: torch.Tensor, group: int, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [out, in] from -2^(bits - 1) on, and bfloat16 scales [out, groups]."""
    grouped, half = weight.view(weight.shape[0], -1, group), 2 ** (bits - 1)
    scale = (grouped.abs().amax(2) / (half - 0.5)).bfloat16()
    return (grouped / scale.float()[..., None]).round().clamp(-half, half - 1).int().view_as(weight), scale


def groups_of(weight: torch.Tensor, size: int, order: torch.Generator | None) -> torch.Tensor:
    """The group of each column: as many columns each, one behind the other, or with `order` anywhere."""
    groups = torch.arange(weight.shape[1]) // size
    return groups if order is None else groups[torch.randperm(len(groups), generator=order)]


def write_packed(group: int, *, bits: int = 4, zeros: bool = False, order: bool = False) -> Writer:
    """compressed-tensors' pack-quantized."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size, half, places = weight.shape[1] if group == -1 else group, 2 ** (bits - 1), list(range(32 // bits))
        groups = groups_of(weight, size, generator if order else None)
        sorted_by_group = weight[:, groups.argsort(stable=True)]
        if zeros:
            codes, zero, scale = asymmetric(sorted_by_group, size, bits)
            codes, zero = codes - half, zero - half
        else:
            codes, scale = symmetric(sorted_by_group, size, bits)
            zero = torch.zeros(scale.shape, dtype=torch.int32)
        codes = codes[:, groups.argsort(stable=True).argsort()]
        tensors = {
            "weight_packed": words_along(codes + half, 1, places),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }
        if zeros:
            tensors["weight_zero_point"] = words_along(zero + half, 0, places)
        if order:
            tensors["weight_g_idx"] = groups.int()
        return tensors, numbers_of(codes, zero, scale, groups)

    return write


def write_gptq(
    group: int, *, bits: int = 4, zeros: bool = False, order: bool = False, offset: int = 1, has_g_idx: bool = True
) -> Writer:
    """`offset` is what stored zero points lack."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        size, half, places = weight.shape[1] if group == -1 else group, 2 ** (bits - 1), list(range(32 // bits))
        groups = groups_of(weight, size, generator if order else None)
        sorted_by_group = weight[:, groups.argsort(stable=True)]
        if zeros:
            codes, zero, scale = asymmetric(sorted_by_group, size, bits)
            zero = zero.clamp(min=1)  # what version 1 can store
        else:
            codes, scale = symmetric(sorted_by_group, size, bits)
            codes, zero, scale = codes + half, torch.full(scale.shape, half, dtype=torch.int32), scale.half()
        codes = codes[:, groups.argsort(stable=True).argsort()]
        tensors = {
            "qweight": words_along(codes.T, 0, places),
            "qzeros": words_along((zero - offset).T, 1, places),
            "scales": scale.T,
        }
        if has_g_idx:
            tensors["g_idx"] = groups.int()
        return tensors, numbers_of(codes, zero, scale, groups)

    return write


def write_int8(strategy: str) -> Writer:
    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        most = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().amax().view(1)
        scale = (most / 127).bfloat16()
        codes = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return write


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def write_fp4(group: int, names: tuple[str, ...]) -> Writer:
    """NVFP4 with the names of codes, and of the scale of the whole matrix, by which ModelOpt multiplies and
    compressed-tensors divides; or MXFP4 with the name of the codes alone."""

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        rows = len(weight)
        most = weight.view(rows, -1, group).abs().amax(2).clamp(min=1e-6) / 6
        tensors: Tensors = {}
        if len(names) == 1:
            exponent = most.log2().ceil().int()
            scale, tensors["weight_scale"] = 2.0**exponent, (exponent + 127).to(torch.uint8)
        else:
            whole = weight.abs().amax() / 6 / 448
            codes = (most / whole).clamp(2**-6, 448).to(torch.float8_e4m3fn)
            given = 1 / whole if "global" in names[1] else whole
            scale = codes.float() / given if "global" in names[1] else codes.float() * given
            tensors |= {"weight_scale": codes, names[1]: given.reshape(1) if "global" in names[1] else given}
        spread = scale.repeat_interleave(group, 1)
        nearest = (weight.abs() / spread)[..., None].sub(E2M1).abs().argmin(-1)
        signs = weight < 0
        nibbles = nearest + 8 * signs
        tensors[names[0]] = (nibbles[:, ::2] + 16 * nibbles[:, 1::2]).to(torch.uint8)
        return tensors, E2M1[nearest] * torch.where(signs, -1.0, 1.0) * spread

    return write


def write_modelopt_awq(group: int) -> Writer:
    """Every other matrix has its scale of activations folded into the layer before."""
    count = 0

    def write(weight: torch.Tensor, generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        nonlocal count
        count += 1
        before = 0.5 + torch.rand(weight.shape[1], generator=generator)
        codes, scale = symmetric(weight / before, group)
        groups = torch.arange(weight.shape[1]) // group
        numbers = codes.float() * scale.float()[:, groups]
        twos = torch.where(codes < 0, codes + 16, codes)
        tensors = {"weight": (twos[::2] + 16 * twos[1::2]).to(torch.uint8), "weight_scale": scale.float()}
        if count % 2:
            return tensors, numbers
        return {**tensors, "pre_quant_scale": before}, numbers * before

    return write
