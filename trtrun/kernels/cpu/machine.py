"""Machine code made at run time for this processor, and the OpenMP threads of torch that run it.

It knows LLVM (llvmlite), what the processor can do, and libgomp. It does not know what a kernel computes.

A kernel is a C function `void kernel(const void *arguments)`, the form in which OpenMP calls an outlined parallel
region. Entering it through libgomp's own entry (GOMP_parallel; "Implementing PARALLEL construct" in the libgomp manual)
runs it on the threads that torch's operations run on, so that kernels and operations never compete for cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trtrun.environment import CPU_LIMIT, CPU_LIMITS
from trtrun.errors import ConfigError
from trtrun.kernels.cpu.object_cache import read_object, write_object
from trtrun.warmup_misses import count_compilation

if TYPE_CHECKING:
    from llvmlite import ir

Kernel = Callable[[int, int], None]
"""Called with the address of the arguments and the number of threads; returns when all of them are done."""

Kernels = dict[str, Kernel]
"""By their names."""

_BEYOND = {"avx2": ("amx", "avx10", "avx512"), "avx512": ("amx", "avx10", "avx512bf16", "avx512fp16")}
"""Beginnings of the names of features that each limit rules out."""

THREAD_NUMBER, NUM_THREADS, BARRIER = "omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier"
"""Functions of the OpenMP library that a kernel may declare: the first two return int32, the last waits for all."""


MULTIPLIES_BFLOAT16 = "avx512_bf16"
"""The kind of processor that has dot products of bfloat16; the others multiply it as float32."""

NEON = "neon"
"""The kind of all ARM processors of 64 bits."""

KINDS = {
    MULTIPLIES_BFLOAT16: ("avx512bf16",),
    "avx512": ("avx512f", "avx512bw", "avx512vl"),
    "avx2": ("avx2", "fma"),
    NEON: (NEON,),
}
"""Kinds of processors that kernels are compiled for, and the features that each must have; the best comes first."""


WORTH_A_TEAM_NS = 100_000
"""Work that is shared out over threads. Less is done sooner by one: others sleep soon after their last work, so that
they do not take cores from other programs (GOMP_SPINCOUNT in trtrun.environment), and waking one takes some 40 µs on a
Xeon."""


def team(nanoseconds: float, most: int) -> int:
    """How many of torch's threads, `most` at most, do work that would take one of them about so long."""
    return 1 if nanoseconds < WORTH_A_TEAM_NS else max(1, min(torch.get_num_threads(), most))


@functools.cache
def processor_kind() -> str | None:
    """Name, among KINDS, of what this processor is; None where no kernel runs.

    Kernels need a torch that runs on GNU OpenMP (the Linux wheels do) and llvmlite, too.
    """
    if _openmp() is None:
        return None
    return next((kind for kind, features in KINDS.items() if _has_features(*features)), None)


def _has_features(*names: str) -> bool:
    """Whether the processor has these, of which torch may be told to use less; "avx512…" are those of AVX-512."""
    needed = ("AVX512", "AMX") if any(name.startswith("avx512") for name in names) else ("AVX2", "AVX512", "AMX")
    if NEON in names:
        if platform.machine() != "aarch64":
            return False
    elif torch.backends.cpu.get_cpu_capability() not in needed:
        return False  # spares every other machine LLVM
    features = _processor_features()
    return all(features.get(name, False) for name in names)


def _processor_features() -> dict[str, bool]:
    """What the processor has and may use, by LLVM's names; nothing where there is no llvmlite.

    Raises:
        ConfigError: an unknown limit.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return {}
    features = dict(llvm.get_host_cpu_features())
    if platform.machine() == "aarch64":
        features[NEON] = True  # also where the system does not tell features
    limit = os.environ.get(CPU_LIMIT, "")
    if limit and limit not in CPU_LIMITS:
        raise ConfigError(f"{CPU_LIMIT} is {limit!r}: set it to {' or '.join(CPU_LIMITS)}, or not at all")
    for name in features:
        if limit and name.startswith(_BEYOND[limit]):
            features[name] = False
    return features


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


def load_kernels(
    make: Callable[..., ir.Module], *arguments: Hashable, names: Sequence[str], **named: Hashable
) -> Kernels:
    """Functions of a module for this processor: as they were compiled before (`object_cache`), or compiled now.

    Args:
        make: makes the module; one of this package's functions.
        arguments, named: what it gets; their `repr` tells them from others.
        names: of the functions.
    """
    processor, features = _target()
    told = (make.__module__, make.__qualname__, repr(arguments), repr(sorted(named.items())), processor, features)
    key = hashlib.sha256("\0".join((_versions(), *told)).encode()).hexdigest()
    compiled = read_object(key)
    if compiled is None:
        compiled = _compile(make(*arguments, **named))
        write_object(key, compiled)
    count_compilation()
    return _link(compiled, names)


def compile_kernels(module: ir.Module, *names: str) -> Kernels:
    """Compile `module` for this processor, which has a `processor_kind`, and return its functions `names`."""
    return _link(_compile(module), names)


def _compile(module: ir.Module) -> bytes:
    """The object file of a module."""
    import llvmlite.binding as llvm

    machine = _target_machine()
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
    return bytes(machine.emit_object(parsed))


def _link(compiled: bytes, names: Sequence[str]) -> Kernels:
    """Functions of an object file, in this process."""
    import llvmlite.binding as llvm

    library = _openmp()
    assert library is not None
    # What an object calls is bound by declarations, of which a module without code has any.
    declarations = "\n".join(f"declare void @{symbol}()" for symbol in (THREAD_NUMBER, NUM_THREADS, BARRIER))
    declared = llvm.parse_assembly(declarations)
    engine = llvm.create_mcjit_compiler(declared, _target_machine())
    for function in declared.functions:
        engine.add_global_mapping(function, ctypes.cast(getattr(library, function.name), ctypes.c_void_p).value)
    engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    engine.finalize_object()
    _ENGINES.append(engine)
    enter = library.GOMP_parallel
    enter.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    enter.restype = None
    return {name: _kernel(enter, engine.get_function_address(name)) for name in names}


def _target() -> tuple[str, str]:
    """The processor that code is made for, and its features, as LLVM's machines take them."""
    import llvmlite.binding as llvm

    return processor_name(), llvm.FeatureMap(_processor_features()).flatten()


def _target_machine() -> Any:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    processor, features = _target()
    return llvm.Target.from_default_triple().create_target_machine(cpu=processor, features=features, opt=3)


@functools.cache
def _versions() -> str:
    """Tells what makes code of modules, and these themselves, from what other versions of both do."""
    import llvmlite
    import llvmlite.binding as llvm

    sources = sorted(Path(__file__).parent.rglob("*.py"))
    written = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{llvmlite.__version__} {llvm.llvm_version_info} {written}"


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
