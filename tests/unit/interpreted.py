"""Triton's interpreter, faster: what it looks for again at each call of a function in a kernel is looked for once.

It runs kernels of GPUs where there is none. Before each call it gives the builtins of the language a meaning in numpy,
and looks through every name of the language for them: milliseconds, where most calls take microseconds. Which names
those are never changes, and a function that a kernel calls finds done what was done for the kernel. Types of blocks are
looked through whenever one is made, and there are few. It does not know trtrun's kernels.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

PARTS = (
    "_patch_builtin", "_patch_attr", "_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder",
    "interpreter_semantic",
)  # fmt: skip


def remember_builtins() -> None:
    """Let the interpreter of this process remember the names of builtins. Call it before the first kernel runs; of an
    interpreter that is made otherwise nothing is changed."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in PARTS):
        return
    search = interpreter._patch_builtin
    holders = [tl, tl.core, tl.math, tl.tensor, getattr(tl.core, "tensor_descriptor_base", tl.core)]
    names = {
        id(holder): [name for name, member in inspect.getmembers(holder) if tl.core.is_builtin(member)]
        for holder in holders
    }

    def patch(holder: Any, *others: Any) -> None:
        if id(holder) not in names:
            search(holder, *others)
            return
        for name in names[id(holder)]:
            member = getattr(holder, name)
            if tl.core.is_builtin(member):  # and has its meaning not yet
                interpreter._patch_attr(holder, name, member, *others)

    interpreter._patch_builtin = patch
    _patch_once(interpreter, [tl, tl.core])
    _remember_dtypes(interpreter)
    _leave_out_what_nobody_reads(interpreter)
    _remember_shapes(tl.core, interpreter.interpreter_semantic)


def _patch_once(interpreter: Any, modules: list[Any]) -> None:
    """Give the language its meaning for a kernel, and not again for the functions that it calls."""
    patch_for = interpreter._patch_lang
    of_kernel = interpreter._LangPatchScope()  # what is restored behind the kernel that runs, empty while none does
    patched: list[Any] = []  # the modules that have their meaning for it
    visible: dict[Any, list[Any]] = {}

    def patch(function: Any) -> Any:
        nonlocal of_kernel
        if function not in visible:
            there = function.__globals__.values()
            visible[function] = [module for module in modules if any(value is module for value in there)]
        seen = visible[function]
        if not of_kernel._changes:
            of_kernel = patch_for(function)
            patched[:] = seen
            return of_kernel
        if any(module not in patched for module in seen):  # as of functions that come with the language
            of_kernel._changes += patch_for(function)._changes
            patched.extend(seen)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch


def _remember_dtypes(interpreter: Any) -> None:
    """Look numpy's dtypes up by the names of the language's."""
    look_up, found = interpreter._get_np_dtype, dict[str, Any]()

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in found:
            found[name] = look_up(dtype)
        return found[name]

    interpreter._get_np_dtype = np_dtype


def _leave_out_what_nobody_reads(interpreter: Any) -> None:
    """Each sum of integers is made again in 64 bits, to see whether it overflows: what is found is told when debugging
    alone."""
    builder = interpreter.interpreter_builder
    if getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _remember_shapes(core: Any, semantic: Any) -> None:
    """Look through a shape once, for types of blocks and for blocks; a type is equal to itself, and blocks of one shape
    need no broadcasting."""
    make_type, make_block, equal = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    of_types, of_blocks = dict[Any, dict[str, Any]](), dict[int, tuple[Any, dict[str, Any]]]()
    shapes, broadcast = dict[tuple[Any, ...], Any](), type(semantic).broadcast_impl_value

    def init_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(size if type(size) is int else getattr(size, "value", size) for size in shape)
        known = of_types.get((sizes, str(element_ty)))
        if known is None:
            make_type(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            known = {name: value for name, value in vars(self).items() if name != "element_ty"}
            of_types[sizes, str(element_ty)] = known
        else:
            self.element_ty = element_ty
            vars(self).update(known)

    def init_block(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        kept, known = of_blocks.get(id(shape), (None, None))
        if known is not None and kept is shape:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            vars(self).update(known)
            return
        make_block(self, handle, type)
        if vars(self).keys() == {"handle", "shape", "numel", "type", "dtype"}:
            of_blocks[id(shape)] = shape, {"shape": self.shape, "numel": self.numel}

    def broadcast_blocks(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
            return left, right
        found: tuple[Any, Any] = broadcast(self, left, right)
        return found

    core.block_type.__init__, core.tensor.__init__ = init_type, init_block
    type(semantic).broadcast_impl_value = broadcast_blocks
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
