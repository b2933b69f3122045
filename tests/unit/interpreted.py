"""Triton's interpreter, faster: what it looks for again at each call of a function in a kernel is looked for once.

It runs kernels of GPUs where there is none. Before each call it gives the builtins of the language a meaning in numpy,
and looks through every name of the language for them: milliseconds, where most calls take microseconds. Which names
those are never changes. It does not know trtrun's kernels.
"""

from __future__ import annotations

import inspect
from typing import Any


def remember_builtins() -> None:
    """Let the interpreter of this process remember the names of builtins. Call it before the first kernel runs; of an
    interpreter that is made otherwise nothing is changed."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_patch_builtin") or not hasattr(interpreter, "_patch_attr"):
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
