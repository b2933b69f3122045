"""Machine code made at run time for this processor, and the OpenMP threads of torch that run it.

It knows LLVM (llvmlite), what the processor can do, and libgomp. It does not know what a kernel computes.

A kernel is a C function `void kernel(const void *arguments)`, the form that OpenMP calls an outlined parallel region in.
Entering it through libgomp's own entry (GOMP_parallel, "Implementing PARALLEL construct" in the libgomp manual) runs it
on the threads that torch's operations run on, so that kernels and operations never compete for cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llvmlite import ir

Kernel = Callable[[int, int], None]
"""Called with the address of the arguments and the number of threads; returns when all of them are done."""

_THREAD_NUMBER, _NUM_THREADS = "omp_get_thread_num", "omp_get_num_threads"


@functools.cache
def has_bfloat16_kernels() -> bool:
    """Whether kernels of bfloat16 dot products run here, and are what this processor is best at.

    They need AVX-512 BF16, a torch that runs on GNU OpenMP (the Linux wheels do) and llvmlite. Processors with AMX
    multiply several times faster through oneDNN, which uses it.
    """
    features = _processor_features()
    return bool(features.get("avx512bf16")) and not features.get("amx-bf16") and _openmp() is not None


def _processor_features() -> dict[str, bool]:
    if torch.backends.cpu.get_cpu_capability() not in ("AVX512", "AMX"):
        return {}  # spares every other machine LLVM
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return {}
    return dict(llvm.get_host_cpu_features())


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded, if it is libgomp."""
    if not torch.backends.openmp.is_available():
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def declare_threads(module: ir.Module) -> tuple[ir.Function, ir.Function]:
    """Functions without arguments that return this thread's number and the number of threads, both int32."""
    from llvmlite import ir

    signature = ir.FunctionType(ir.IntType(32), [])
    return ir.Function(module, signature, _THREAD_NUMBER), ir.Function(module, signature, _NUM_THREADS)


@contextmanager
def count(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: ir.Value | int) -> Iterator[ir.Value]:
    """Emit `for (index = start; index < stop; index += step)` around what the body emits; yields the index, int64."""
    before = builder.block
    head, body = builder.append_basic_block("head"), builder.append_basic_block("body")
    after = builder.append_basic_block("after")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(start.type)
    index.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
    builder.position_at_end(body)
    yield index
    stride = start.type(step) if isinstance(step, int) else step
    index.add_incoming(builder.add(index, stride), builder.block)
    builder.branch(head)
    builder.position_at_end(after)


def compile_kernel(module: ir.Module, name: str) -> Kernel:
    """Compile `module` for this processor and return its function `name`. Needs `has_bfloat16_kernels`."""
    import llvmlite.binding as llvm

    library = _openmp()
    assert library is not None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    # Kernels come with their loops unrolled and their registers chosen: a whole pipeline of passes would only take time.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    for function in parsed.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    for symbol in (_THREAD_NUMBER, _NUM_THREADS):
        engine.add_global_mapping(
            parsed.get_function(symbol), ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        )
    engine.finalize_object()
    _ENGINES.append(engine)
    function = engine.get_function_address(name)
    enter = library.GOMP_parallel
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None

    def run(arguments: int, threads: int) -> None:
        enter(function, arguments, threads, 0)

    return run


_ENGINES: list[object] = []
"""What owns the compiled code: it lives as long as the process."""
