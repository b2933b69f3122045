"""Sums over ranks in the kernel that normalises, in Triton's interpreter: a process for each rank, with memory of the
host in place of the devices'; on one GPU, what a rank makes of it; between GPUs: tests/ranks/test_sums.py."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from compiling import last_line
from gpus import needs_gpu

from parallel.communicator import PeerRows
from trtrun.kernels.arguments import RankSum, RoundedRows, Rounding

pytest.importorskip("triton", reason="needs triton: pip install triton")
needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
Made = torch.Tensor | RoundedRows
ROWS, WORDS, SLOTS = 5, 64, 4
SECONDS = 120


class Call(NamedTuple):
    """One sum: rows and their numbers."""

    rows: int
    size: int
    rounding: Rounding | None = None


def numbers(call: Call, index: int, rank: int) -> torch.Tensor:
    """What a rank adds; of rank -1 the stream, and of rank -2 the weight."""
    generator = torch.Generator().manual_seed(1000 * index + rank + 2)
    rows = (call.size,) if rank == -2 else (call.rows, call.size)
    return (torch.randn(rows, generator=generator) * 3).half()


def bits_of(made: Made, size: int) -> list[torch.Tensor]:
    """What a norm has written."""
    if isinstance(made, torch.Tensor):
        return [made.view(torch.int16)]
    return [made.codes[:, :size].view(torch.uint8), made.scale.contiguous().view(torch.int32)]


def run_rank(rank: int, ranks: int, memory: torch.Tensor, calls: list[Call], path: Path) -> None:
    """One rank's life: all calls, whose results it writes to a file."""
    from trtrun.kernels.triton.rank_sums import sum_and_normalise, sum_and_normalise_rounded

    bases = [memory[(rank + step) % ranks].data_ptr() for step in range(ranks)]
    own, *others = (base + 8 * ROWS for base in bases)
    peers = PeerRows(rank, ranks, ROWS, WORDS, SLOTS, bases[0], own, tuple(others))
    communicator: Any = SimpleNamespace(peer_rows=peers)
    results = []
    for index, call in enumerate(calls):
        hidden, part = numbers(call, index, -1), numbers(call, index, rank)
        weight, delta = numbers(call, index, -2), RankSum(part, communicator)
        if call.rounding is None:
            made: Made = sum_and_normalise(hidden, delta, weight, 1e-5)
        else:
            made = sum_and_normalise_rounded(hidden, delta, weight, 1e-5, call.rounding)
        results.append((hidden, made))
    torch.save(results, path)


def run_ranks(ranks: int, calls: list[Call], folder: Path, first_call: int) -> list[list[tuple[torch.Tensor, Made]]]:
    """What each rank made of the calls: the stream, and its norm."""
    memory = torch.zeros((ranks, ROWS + SLOTS * ranks * ROWS * WORDS), dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    memory[:, :ROWS].view(torch.int32)[:, :ROWS] = torch.tensor(first_call).to(torch.int32)
    context = multiprocessing.get_context("fork")
    paths = [folder / f"rank-{rank}.pt" for rank in range(ranks)]
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, memory, calls, path)) for rank, path in enumerate(paths)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, "ranks wait for each other"
    counts = memory[:, :ROWS].view(torch.int32)[:, :ROWS]
    due = [sum(row < call.rows for call in calls) for row in range(ROWS)]
    assert (counts - torch.tensor(first_call).to(torch.int32)).tolist() == [due] * ranks
    return [torch.load(path, weights_only=False) for path in paths]


def check(ranks: int, calls: list[Call], folder: Path, first_call: int = 0) -> None:
    """Bits are those of a sum in the order of the ranks, rounded once, and of the norm behind it."""
    from trtrun.kernels.triton.fused import add_and_normalise, add_and_normalise_rounded

    found = run_ranks(ranks, calls, folder, first_call)
    for index, call in enumerate(calls):
        total = numbers(call, index, 0).float()
        for rank in range(1, ranks):
            total += numbers(call, index, rank).float()
        hidden, weight = numbers(call, index, -1), numbers(call, index, -2)
        if call.rounding is None:
            made: Made = add_and_normalise(hidden, total.half(), weight, 1e-5)
        else:
            made = add_and_normalise_rounded(hidden, total.half(), weight, 1e-5, call.rounding)
        for of_rank in found:
            stream, norm = of_rank[index]
            assert torch.equal(stream, hidden), (index, call)
            both = zip(bits_of(norm, call.size), bits_of(made, call.size), strict=True)
            assert all(torch.equal(one, other) for one, other in both), (index, call)


@needs_interpreter
def test_bits_are_those_of_a_sum_and_a_norm(tmp_path: Path) -> None:
    """Whatever rows and sizes follow each other in the same places."""
    calls = [
        Call(1, 70),
        Call(5, 128),
        Call(2, 64),
        Call(1, 128),
        Call(1, 2),
        Call(4, 126, "row"),
        Call(3, 128, "group"),
    ]
    check(2, [*calls, Call(1, 70), Call(5, 70)], tmp_path)


@needs_interpreter
def test_ranks_are_added_in_their_order(tmp_path: Path) -> None:
    check(3, [Call(2, 128), Call(1, 70)], tmp_path)


@needs_interpreter
@pytest.mark.parametrize("first_call", [2**24 - 3, 2**31 - 3, 2**32 - 3], ids=hex)
def test_numbers_of_calls_wrap(tmp_path: Path, first_call: int) -> None:
    check(2, [Call(1 + index % 2, 64) for index in range(8)], tmp_path, first_call)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 4096), (1, 5120), (3, 8192), (2, 70)], ids=str)
def test_bits_on_one_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Where the other rank's words are there already: the first of two ranks sends its own, and has the bits of a sum
    and a norm."""
    from trtrun.kernels.triton.fused import add_and_normalise
    from trtrun.kernels.triton.rank_sums import sum_and_normalise

    device, (rows, size), words = torch.device("cuda"), shape, 4096
    stream, *parts = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
    weight = torch.rand(size, device=device).to(dtype)
    memory = torch.zeros((2, 2 + SLOTS * 2 * ROWS * words), dtype=torch.int64, device=device)
    places = memory[:, 2:].unflatten(1, (SLOTS, 2, ROWS, words))
    counts = torch.zeros(ROWS, dtype=torch.int32, device=device)
    addresses = [one.data_ptr() + 16 for one in memory]
    peers = PeerRows(0, 2, ROWS, words, SLOTS, counts.data_ptr(), addresses[0], (addresses[1],))
    communicator: Any = SimpleNamespace(peer_rows=peers)
    for call in range(6):
        sent = [(one.view(torch.int32).long() & 0xFFFFFFFF) | ((call | 1 << 31) << 32) for one in parts]
        places[0, (call + 2) % SLOTS] = -1  # what is cleared
        places[0, call % SLOTS, 1, :rows, : size // 2] = sent[1]
        total, expected = (parts[0].float() + parts[1].float()).to(dtype), stream.clone()
        norm = add_and_normalise(expected, total, weight, 1e-5)
        made = sum_and_normalise(stream, RankSum(parts[0], communicator), weight, 1e-5)
        assert torch.equal(made, norm) and torch.equal(stream, expected)
        assert torch.equal(places[1, call % SLOTS, 0, :rows, : size // 2], sent[0])
        assert (places[0, (call + 2) % SLOTS, :, :rows] == (0 if call < SLOTS else -1)).all()
    assert counts.tolist() == [6] * rows + [0] * (ROWS - rows)


COMPILE = """
import json
import re
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import fused, rank_sums

KINDS = dict.fromkeys(("hidden", "delta", "shares", "weight", "output", "scales"), "*bf16")
KINDS |= {"part": "*i32", "epsilon": "fp32"}
KINDS |= dict.fromkeys(("hidden_stride", "output_stride", "scale_stride", "rows"), "i32")
KINDS |= {"shares": "*fp32"} | dict.fromkeys(("calls", "own", *(f"other{number}" for number in range(7))), "i64")

def compiled(kernel, size, **constants):
    warps, names = 4 if size <= 4096 else 8, list(kernel.arg_names)
    constants |= {"SIZE": size, "PADDED": next_power_of_2(size), "ROUNDS": 0, "EARLY": True}
    kinds = {name: KINDS[name] for name in names if name not in constants}
    even = [name for name, kind in kinds.items() if kind[0] == "*" or name in ("hidden_stride", "output_stride")]
    source = ASTSource(
        fn=kernel,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in even},
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm
    layouts = dict(re.findall("^(#blocked[0-9]*) = (.*)$", code["ttgir"], re.M))
    sums = re.findall(r"\\}\\) : \\(tensor<([0-9]+xf32), (#blocked[0-9]*)>\\) -> f32", code["ttgir"])
    return {"sums": [[shape, layouts[name]] for shape, name in sums], "ptx": code["ptx"]}

print(json.dumps([
    [compiled(fused._add_and_normalise_kernel, size, ADDS=True, CHOSEN=0),
     compiled(rank_sums._sum_and_normalise_kernel, size, RANK=rank, RANKS=ranks, SLOTS=4, WORDS=4096, ORDERED=True)]
    for size, rank, ranks in ((4096, 0, 2), (5120, 7, 8))
]))
"""


SKIP = """
from types import SimpleNamespace
import torch
import triton
from triton.backends.compiler import GPUTarget

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
from parallel.communicator import PeerRows
from trtrun.kernels.arguments import RankSum
from trtrun.kernels.triton import rank_sums
from trtrun.kernels.triton.compilation.launches import collecting

group = SimpleNamespace(peer_rows=PeerRows(0, 2, 8, 64, 4, 2**40, 2**41, (2**42,)))

def call(rows):
    hidden, part = torch.zeros(rows, 64).bfloat16(), torch.zeros(rows, 64).bfloat16()
    rank_sums.sum_and_normalise(hidden, RankSum(part, group), torch.zeros(64).bfloat16(), 1e-5)

asked = []
with collecting(asked.append):
    call(1)
    call(8)
rank_sums.is_collecting = lambda: True  # one that is compiled by now
call(2)
with collecting(asked.append):
    call(2)
print([request.name for request in asked])
"""


def test_a_start_that_asks_what_is_launched_runs_none(tmp_path: Path) -> None:
    """Also one that the process has compiled: other ranks may skip it, and would be waited for. There is no GPU."""
    line = last_line(SKIP, tmp_path)
    assert line == "['_sum_and_normalise_kernel']", "once for all rows"


def test_compiled_kernels_add_squares_in_one_order(tmp_path: Path) -> None:
    """Which follows from the layout; for compute capability 9.0, which needs no GPU. Words are written and read whole,
    for the whole system, and tiny numbers are kept."""
    line = last_line(COMPILE, tmp_path)
    for plain, summed in json.loads(line):
        assert len(plain["sums"]) == 1 and plain["sums"] == summed["sums"]
        of_squares = [code["ptx"].count("fma.rn.f32") for code in (plain, summed)]
        assert of_squares[0] == of_squares[1] > 0
        assert "st.relaxed.sys.global.v2.b64" in summed["ptx"] and "ld.volatile.global.v2.b64" in summed["ptx"]
        assert "add.ftz" not in summed["ptx"] and "griddepcontrol.wait" in summed["ptx"]
