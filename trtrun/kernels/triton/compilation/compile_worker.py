"""A program that compiles the kernels it is asked for, one after the other, and holds no GPU.

Each line of its input is a request (JSON: module, name, data, target), each line of its output "done" or "failed". It
knows how Triton writes a kernel's arguments down. It does not know who asks.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from trtrun.kernels.triton.compilation.absent_torch import replace_torch


def compile_request(request: Mapping[str, Any]) -> None:
    """Compile a kernel into Triton's cache.

    Args:
        request: module and name of the kernel; data: its arguments and options as Triton writes them; target: backend,
            arch and warp_size of the GPU.

    Raises:
        Exception: whatever import or compiler say.
    """
    kernel = getattr(importlib.import_module(request["module"]), request["name"])
    data = json.loads(request["data"])
    constants = zip(data["constant_keys"], data["constant_vals"], strict=True)
    attributes = zip(data["attrs_keys"], data["attrs_vals"], strict=True)
    source = _source_of(kernel)(
        kernel,
        {name: _tuples(value) for name, value in data["signature"].items()},
        {tuple(key): _constant(value) for key, value in constants},
        {tuple(key): value for key, value in attributes},
    )
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in data["options"].items()}
    _make_launcher(triton.compile(source, target=GPUTarget(**request["target"]), options=options))


def _source_of(kernel: Any) -> Any:
    """What Triton compiles a kernel from."""
    if type(kernel).__name__ == "GluonJITFunction":
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource
    return ASTSource


def _make_launcher(compiled: Any) -> None:
    """Build what launches the kernel, where Triton has a C compiler do that for each kind of arguments (3.6): as long
    as a small kernel takes. Without the GPU's library here whoever launches it does."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):
            driver.CudaLauncher(compiled.src, compiled.metadata)


def _constant(value: Any) -> Any:
    if tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict):
        return tl.constexpr(_tuples(value["constexpr"]))
    return _tuples(value)


def _tuples(value: Any) -> Any:
    """Tuples, which JSON knows as lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def main() -> None:
    """Answer until the input ends."""
    replace_torch()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever else is printed is no answer
    for line in sys.stdin:
        try:
            compile_request(json.loads(line))
            answer = "done"
        except Exception:  # the one who launches the kernel compiles it, and tells what is wrong
            answer = "failed"
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
