"""Machine code made at run time for this processor, and the OpenMP threads of torch that run it.

It knows LLVM (llvmlite), what the processor can do, and libgomp. It does not know what a kernel computes.

A kernel is a C function `void kernel(const void *arguments)`, the form in which OpenMP calls an outlined parallel
region. Entering it through libgomp's own entry (GOMP_parallel; "Implementing PARALLEL construct" in the libgomp manual)
runs it on the threads that torch's operations run on, so that kernels and operations never compete for cores.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llvmlite import ir

Kernel = Callable[[int, int], None]
"""Called with the address of the arguments and the number of threads; returns when all of them are done."""

THREAD_NUMBER, NUM_THREADS, BARRIER = "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"
"""Functions of the OpenMP library that a kernel may declare: the first two return int32, the last waits for all."""


@functools.cache
def has_bfloat16_kernels() -> bool:
    """Whether kernels of bfloat16 dot products run here.

    They need AVX-512 BF16, a torch that runs on GNU OpenMP (the Linux wheels do) and llvmlite.
    """
    return _has_features("avx512bf16") and _openmp() is not None


@functools.cache
def has_attention_kernel() -> bool:
    """Whether the kernel of paged attention runs here: with AVX-512 BF16 or AVX2, whose dot products are made of
    multiplications in float32. Beside these it needs what `has_bfloat16_kernels` needs."""
    return has_bfloat16_kernels() or (_has_features("avx2", "fma") and _openmp() is not None)


def _has_features(*names: str) -> bool:
    """Whether the processor has these, of which torch may be told to use less; "avx512…" are those of AVX-512."""
    needed = ("AVX512", "AMX") if any(name.startswith("avx512") for name in names) else ("AVX2", "AVX512", "AMX")
    if torch.backends.cpu.get_cpu_capability() not in needed:
        return False  # spares every other machine LLVM
    features = _processor_features()
    return all(features.get(name, False) for name in names)


def _processor_features() -> dict[str, bool]:
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return {}
    return dict(llvm.get_host_cpu_features())


def processor_name() -> str:
    """This processor as LLVM calls it: "znver5", "sapphirerapids"."""
    import llvmlite.binding as llvm

    return str(llvm.get_host_cpu_name())


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch has loaded, if it is libgomp."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return None
    try:
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def compile_kernels(module: ir.Module, *names: str) -> dict[str, Kernel]:
    """Compile `module` for this processor and return its functions `names`. Needs `has_bfloat16_kernels`, or what else
    says that the module's code runs here."""
    import llvmlite.binding as llvm

    library = _openmp()
    assert library is not None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=processor_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    # Kernels come with their loops unrolled and their registers counted: a whole pipeline of passes only takes time.
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=1))
    passes = llvm.create_new_function_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    for function in parsed.functions:
        if not function.is_declaration:
            passes.run(function, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    declared = {function.name: function for function in parsed.functions if function.is_declaration}
    for symbol in (THREAD_NUMBER, NUM_THREADS, BARRIER):
        if symbol in declared:
            address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
            engine.add_global_mapping(declared[symbol], address)
    engine.finalize_object()
    _ENGINES.append(engine)
    enter = library.GOMP_parallel
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return {name: _kernel(enter, engine.get_function_address(name)) for name in names}


def _kernel(enter: Callable[[int, int, int, int], None], address: int) -> Kernel:
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)

    def run(arguments: int, threads: int) -> None:
        if threads == 1:
            alone(arguments)  # a thread outside a parallel region is number 0 of 1
        else:
            enter(address, arguments, threads, 0)

    return run


_ENGINES: list[object] = []
"""What owns the compiled code: it lives as long as the process."""
