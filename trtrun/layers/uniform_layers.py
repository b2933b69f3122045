"""Whether layers run the same kernels: they are made of the same parts, and differ in nothing but where tensors lie.

What is asked is objects, whatever their classes: a layer's parts are its family's and its quantization's business. It
knows tensors, numbers and attributes. What it cannot look into counts as the same only where it is the same object.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

_ALIGNED = 16
"""Triton tells kernels apart by whether a tensor begins at a multiple of so many bytes."""

_DEEPEST = 16


def are_uniform(layers: Sequence[object]) -> bool:
    """Whether all layers run the same kernels for the same batch; False where it cannot be told.

    To be asked before any of them has run: parts may make something of their own at their first use.

    Args:
        layers: of any classes.
    """
    return all(_is_uniform(layers[0], layer, 0) for layer in layers[1:])


def _is_uniform(one: Any, other: Any, depth: int) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or depth == _DEEPEST:
        return False
    for is_of_kind, compare in _KINDS:
        if is_of_kind(one):
            return compare(one, other, depth + 1)
    return False


def _tensors(one: torch.Tensor, other: torch.Tensor, depth: int) -> bool:
    """Whether tensors are of one kind and place; what they hold does not matter, as no kernel is chosen by it."""
    kinds = [(tensor.shape, tensor.dtype, tensor.device, tensor.layout) for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if one.layout is not torch.strided:  # a library's own, which tells nothing of how it lies
        return True
    places = [(tensor.stride(), tensor.data_ptr() % _ALIGNED) for tensor in (one, other)]
    return places[0] == places[1]


def _plain(one: Any, other: Any, depth: int) -> bool:
    return bool(one == other)


def _sequences(one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
    return len(one) == len(other) and all(_is_uniform(*both, depth) for both in zip(one, other, strict=True))


def _mappings(one: Mapping[Any, Any], other: Mapping[Any, Any], depth: int) -> bool:
    return one.keys() == other.keys() and all(_is_uniform(one[key], other[key], depth) for key in one)


def _objects(one: Any, other: Any, depth: int) -> bool:
    return _mappings(vars(one), vars(other), depth)


def _structures(one: ctypes.Structure, other: ctypes.Structure, depth: int) -> bool:
    """What kernels on the CPU are called with: numbers count, addresses do not."""
    names = [name for name, kind, *_ in one._fields_ if kind is not ctypes.c_void_p]
    return all(_is_uniform(getattr(one, name), getattr(other, name), depth) for name in names)


def _functions(one: Any, other: Any, depth: int) -> bool:
    """Whether functions are of one definition, with uniform things around it."""
    if one.__code__ is not other.__code__:
        return False
    try:
        around = [[cell.cell_contents for cell in function.__closure__ or ()] for function in (one, other)]
    except ValueError:  # a name that has no value yet
        return False
    given = [(function.__defaults__, function.__kwdefaults__) for function in (one, other)]
    return _sequences(around[0], around[1], depth) and _sequences(given[0], given[1], depth)


def _methods(one: Any, other: Any, depth: int) -> bool:
    return one.__func__ is other.__func__ and _is_uniform(one.__self__, other.__self__, depth)


def _partials(one: Any, other: Any, depth: int) -> bool:
    parts = [(it.func, it.args, it.keywords) for it in (one, other)]
    return _sequences(parts[0], parts[1], depth)


def _has_slots(it: object) -> bool:
    """Whether an object has attributes beside those of its dictionary. Protocol itself has slots, but no names in
    them."""
    return any(vars(kind).get("__slots__") for kind in type(it).__mro__)


def _is_instance(*kinds: type) -> Callable[[Any], bool]:
    return lambda it: isinstance(it, kinds)


_KINDS: tuple[tuple[Callable[[Any], bool], Callable[[Any, Any, int], bool]], ...] = (
    (_is_instance(torch.Tensor), _tensors),
    (_is_instance(bool, int, float, str, bytes, Enum, torch.dtype, torch.device, torch.Size, range), _plain),
    (_is_instance(tuple, list), _sequences),
    (_is_instance(dict), _mappings),
    (_is_instance(ctypes.Structure), _structures),
    (lambda it: hasattr(it, "__func__"), _methods),  # which have what functions have, too
    (lambda it: hasattr(it, "__code__"), _functions),
    (lambda it: hasattr(it, "keywords") and hasattr(it, "args"), _partials),
    (lambda it: hasattr(it, "__dict__") and not _has_slots(it), _objects),
)
