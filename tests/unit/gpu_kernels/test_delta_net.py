"""Gated delta nets by kernels: what plain torch makes of the same forwards, and the same bits whatever the cut of a
prompt, the drafts that were rejected, and the rows beside it. Where there is no GPU, Triton's kernels run in its
interpreter, around a recurrence that is written here."""

from __future__ import annotations

import ctypes
import json
import re
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiling import last_line
from delta_nets import (
    BLOCK,
    Fed,
    Rows,
    Shape,
    alone,
    check_rejections,
    check_snapshots,
    make_tokens,
    make_weights,
    plainly,
)
from gpus import needs_gpu
from norms import difference

from trtrun.errors import CheckpointError
from trtrun.kernels.cuda import delta_net as cuda_delta_net
from trtrun.kernels.cuda.delta_net import CudaRecurrence, Tokens, definitions, forms_for, kernel_source
from trtrun.kernels.torch.delta_net import DeltaNet, DeltaNetWeights
from trtrun.kvcache.row_states import LayerStates, SegmentStates
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import StateDtype

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = torch.device("cuda" if HAS_GPU else "cpu"), torch.bfloat16 if HAS_GPU else torch.float16
BOUND = 2e-2 if HAS_GPU else 3e-3
SHAPES: list[Shape] = [(2, 4, 32, 8)]
if HAS_GPU:
    SHAPES += [(1, 3, 64, 24), (16, 48, 128, 128), (16, 32, 128, 128)]
OF_ROWS = SHAPES if HAS_GPU else [(1, 2, 32, 8)]
"""Of tests of rows, which are long in the interpreter."""


@dataclass
class TorchRecurrence:
    """Token by token, for one row after the other."""

    weights: DeltaNetWeights

    def __call__(self, brought: Any, states: LayerStates, found: SegmentStates, read: torch.Tensor) -> None:
        weights, of_row = self.weights, len(brought.value) // found.segment.rows
        for row, line in enumerate(found.numbers.T.tolist()):
            slot, kept, first, end, settled, saved_at, snapshot, place, leader, own_first, own_end = line
            begins = found.segment.start + row * found.segment.queries
            read[begins : place + own_first], read[place + own_end : begins + found.segment.queries] = 0, 0
            if leader != row:
                continue
            dtype = states.states[1].dtype
            matrix = states.states[1][slot].float()
            for position in range(kept, end + 1):
                if position == settled:
                    states.states[1][slot] = matrix
                if position == saved_at:
                    states.snapshots[1][snapshot] = matrix
                if position == end:
                    break
                at = row * of_row + position - kept
                both = brought.query_key[at].view(2, weights.keys, -1)[:, weights.key_of_value]
                query, key = both.unsqueeze(-1)
                keeps, corrects = brought.factors[at].unsqueeze(-1).unbind(1)
                matrix = matrix * keeps.unsqueeze(-1)
                change = (brought.value[at].float() - (matrix * key).sum(1)) * corrects
                matrix = (matrix + key * change.unsqueeze(1)).to(dtype).float()
                if position >= first:
                    read[place + position] = (matrix * query).sum(1).flatten().to(read.dtype)


def nets(shape: Shape, tile: int = 8) -> tuple[DeltaNet, DeltaNetWeights]:
    """Of kernels, and its weights."""
    from trtrun.kernels.triton.delta_net.net import TritonDeltaNet

    weights = make_weights(shape, DTYPE, DEVICE)._replace(tile=tile)
    return TritonDeltaNet(weights, CudaRecurrence(weights) if HAS_GPU else TorchRecurrence(weights)), weights


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_reads_the_same_bits_whatever_the_cut_and_what_plain_torch_does(shape: Shape) -> None:
    net, weights = nets(shape)
    count = 60 if HAS_GPU else 23
    tokens = made, rates = make_tokens(weights, count, 1)
    whole = Rows(net, weights).feed(Fed(0, 0, made, rates))[0]
    assert torch.equal(alone(net, weights, tokens), whole)
    assert difference(whole, plainly(weights, made, rates)) < BOUND
    tiles = [Fed(0, 0, made[:5], rates[:5], before=3)]
    tiles += [Fed(0, at, made[at : at + 8], rates[at : at + 8]) for at in range(5, 21, 8)]
    own = [Fed(1, 0, made[:8], rates[:8]), Fed(2, 0, made[:6], rates[:6], before=2)]
    in_tiles = Rows(net, weights).feed(own[0], *tiles, own[1], Fed(0, 21, made[21:23], rates[21:23]))
    assert torch.equal(torch.cat((*in_tiles[1:4], in_tiles[5])), whole[:23])
    assert torch.equal(in_tiles[0], whole[:8]) and torch.equal(in_tiles[4], whole[:6])
    for cuts in ((9, 1, 13), (2, 3, 1, 17)):
        rows, found, at = Rows(net, weights), [], 0
        for size in (*cuts, count - sum(cuts)):
            if size:
                found += rows.feed(Fed(0, at, made[at : at + size], rates[at : at + size], before=size % 2))
                at += size
        assert torch.equal(torch.cat(found), whole), cuts


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"] if HAS_GPU else ["bfloat16"])
def test_narrow_states_are_rounded_behind_each_token(dtype: StateDtype) -> None:
    """So that cuts, and tokens that are gone through again, leave no trace in them, either."""
    net, weights = nets(OF_ROWS[0])
    made, rates = make_tokens(weights, 15, 1)
    expected = alone(net, weights, (made, rates), dtype)
    assert not torch.equal(expected, alone(net, weights, (made, rates)))
    assert difference(expected, plainly(weights, made, rates, dtype)) < (BOUND if HAS_GPU else 2e-2)
    rows, found = Rows(net, weights, dtype=dtype), []
    for first, count, right in ((0, 7, 7), (7, 5, 2), (9, 5, 1), (10, 5, 5)):
        found += [part[:right] for part in rows.feed(Fed(0, first, made[first:][:count], rates[first:][:count]))]
    assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("shape", OF_ROWS, ids=str)
def test_rejected_tokens_and_other_rows_leave_no_trace(shape: Shape) -> None:
    check_rejections(*nets(shape))


def test_narrow_tiles_of_a_prompt_are_one_row() -> None:
    """Of so few tokens that those of rows apart would be remembered as they are made."""
    net, weights = nets(OF_ROWS[0], tile=2)
    made, rates = make_tokens(weights, 12, 3)
    expected, rows = alone(net, weights, (made, rates)), Rows(net, weights, refed=2)
    found = rows.feed(Fed(0, 0, made[:1], rates[:1], before=1), *(_tile(made, rates, at) for at in (1, 3)))
    found += rows.feed(*(_tile(made, rates, at) for at in (5, 7, 9)))
    assert torch.equal(torch.cat(found), expected[:11])


def _tile(made: torch.Tensor, rates: torch.Tensor, first: int) -> Fed:
    return Fed(0, first, made[first : first + 2], rates[first : first + 2])


@pytest.mark.parametrize("saved_at", [4, 6, 11])
def test_rows_go_on_from_snapshots(saved_at: int) -> None:
    """Taken in front of what was fed before, within it, and at the end of a chunk."""
    check_snapshots(*nets(OF_ROWS[0]), saved_at)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(48, 128), (128, 20)])
def test_heads_that_the_kernel_does_not_take_are_refused(key_dim: int, value_dim: int) -> None:
    with pytest.raises(CheckpointError, match=f"keys of {key_dim} .*{value_dim}: on GPUs .*; use CPU slots"):
        forms_for(make_weights((1, 1, key_dim, value_dim), DTYPE, DEVICE))


@pytest.mark.parametrize("tile", [2, 64])
def test_the_kernel_gets_its_arguments_in_order(monkeypatch: pytest.MonkeyPatch, tile: int) -> None:
    """As its source names them, for so many blocks as there are columns, in the form that is for rows of two tokens, or
    for tiles of prompts of as many."""
    weights = make_weights((2, 4, 128, 128), DTYPE, DEVICE)._replace(tile=tile)
    launched, of_prompts = list[tuple[int, ...]](), tile == 2
    (parameters,) = re.findall(r"carry_on\(([^)]*)\)", kernel_source())
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters.split(",")]

    def launch(kernel: int, blocks: int, threads: int, stream: int, arguments: int) -> None:
        pointers = (ctypes.c_void_p * len(names)).from_address(arguments)
        launched.append((kernel, blocks, threads, *(ctypes.c_int64.from_address(one).value for one in pointers)))

    monkeypatch.setattr(cuda_delta_net, "_compile", lambda words, device: (None, 7 + ("-DPROMPTS=1" in words)))
    monkeypatch.setattr(cuda_delta_net, "begins_early", lambda device: True)
    monkeypatch.setattr(cuda_delta_net, "launch_early", launch)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    rows = Rows(lambda *_: torch.zeros(2, 512), weights)
    positions, tables = torch.tensor([[0, 1]], device=DEVICE), torch.tensor([[1]], device=DEVICE)
    (found,) = rows.states.of_batch(AttentionBatch([AttentionSegment(0, 1, 2, tables, positions)], BLOCK))
    brought = Tokens(torch.zeros(7, 4, 128), torch.zeros(7, 4, 128), torch.zeros(7, 4, 2))
    states, read = rows.states.layers[0], torch.zeros(2, 512)
    CudaRecurrence(weights)(brought, states, found, read)
    expected = {
        "query_key": brought.query_key,
        "value": brought.value,
        "factors": brought.factors,
        "matrices": states.states[1],
        "snapshots": states.snapshots[1],
        "key_of_value": weights.key_of_value,
        "read": read,
        "numbers": found.numbers,
    }
    sizes = {"rows": 1, "tokens": 7, "queries": 2, "start": 0}
    assert names == [*expected, *sizes]
    form = forms_for(weights)[of_prompts]
    places = [tensor.data_ptr() for tensor in expected.values()]
    assert launched == [(7 + of_prompts, 4 * 128 // form.width, form.threads, *places, *sizes.values())]


@needs_gpu  # CuPy and NVRTC are installed where there is one
@pytest.mark.parametrize("state", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("of_prompts", [False, True])
@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernel_compiles(architecture: int, of_prompts: bool, state: torch.dtype) -> None:
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    weights = make_weights((2, 4, 128, 128), DTYPE, DEVICE)
    numbers = definitions(weights, forms_for(weights)[of_prompts], state)
    words = [f"-D{name}={value}" for name, value in numbers.items()]
    program = nvrtc.createProgram(kernel_source(), "delta_net.cu", (), ())
    nvrtc.compileProgram(program, ["-std=c++17", f"-arch=compute_{architecture}", *words])
    code = nvrtc.getPTX(program).decode()
    assert ".entry carry_on(" in code
    assert code.count("griddepcontrol.wait") == (1 if architecture >= 90 else 0)


COMPILE = """
import json, re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton.delta_net.inputs import convolve_kernel

names, numbers = list(convolve_kernel.arg_names), "rows tokens capacity stride rates_stride".split()
kinds = dict.fromkeys(names[: names.index("rows")], "*fp32") | dict.fromkeys(numbers, "i32")
kinds |= {"made": "*bf16", "rates": "*bf16", "value": "*bf16", "key_of_value": "*i64", "numbers": "*i64"}
kinds |= {"scale": "fp32", "epsilon": "fp32"}
found = []
for remembers, tokens in ((True, 8), (False, 8), (True, 2)):
    constants = dict(KEYS=16, VALUES=48, KEY_DIM=128, VALUE_DIM=128, SIZE=128, KERNEL=4, TAPS=4, EARLY=True)
    constants |= dict(REMEMBERS=remembers, TOKENS=tokens)
    aligned = [names.index(name) for name in names if kinds.get(name, "")[:1] == "*" and name != "numbers"]
    source = ASTSource(
        fn=convolve_kernel, signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in (*aligned, names.index("stride"))},
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tokens // 2}).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\\w+) = (#ttg[^\\n]*)", code, re.M))
    found.append([layouts[name] for name in re.findall(r"\\}\\) : \\(tensor<[^>]*, (#\\w+)>\\) -> ", code)])
print(json.dumps(found))
"""


def test_lengths_of_keys_are_summed_in_one_order_in_rounds_and_prompts(tmp_path: Path) -> None:
    """As it is compiled for Hopper: by the same threads, which hold a token's numbers within a warp."""
    line = last_line(COMPILE, tmp_path, seconds=120)
    some, many, few = json.loads(line)
    assert some == many and len(some) == 1
    assert "warpsPerCTA = [4, 1]" in some[0]
    assert few == [some[0].replace("warpsPerCTA = [4, 1]", "warpsPerCTA = [1, 1]")]
