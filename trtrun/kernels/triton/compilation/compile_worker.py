"""A program that compiles the kernels it is asked for, one after the other, and holds no GPU.

Each line of its input is a request (JSON: module, name, data, target), each line of its output "done" or "failed".

Kernels stand beside functions that use torch, and importing torch takes seconds, more where sixteen processes do it at
once. A kernel's source needs none of it, so something of no use takes torch's place here. Where a process needs more it
fails, and whoever launches the kernel compiles it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from typing_extensions import override


class _Thing:
    """Whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        return _thing(name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Leave a function as it is, where it is used as a decorator."""
        is_decorator = len(arguments) == 1 and callable(arguments[0]) and not named
        return arguments[0] if is_decorator else _Thing()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return ()

    def __getitem__(self, index: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _thing(name)


class _Finder(MetaPathFinder, Loader):
    @override
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torch" else None

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    @override
    def exec_module(self, module: ModuleType) -> None:
        pass


def _thing(name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return _Thing()


def replace_torch() -> None:
    """Keep everything in this process from importing torch, from here on."""
    sys.meta_path.insert(0, _Finder())


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
