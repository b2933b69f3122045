"""States of rows by kernels: on a GPU where there is one, else in Triton's interpreter. Against torch's operations."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiling import last_line

from trtrun.kvcache.row_states import RowStates, StateSpace
from trtrun.kvcache.segments import AttentionBatch, AttentionSegment
from trtrun.kvcache.specs import RecurrentState
from trtrun.kvcache.state_numbers import StateOperations, StateTables, TorchStates

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")
SIZE, BLOCKS = 4, 12
"""Tokens of a block, and blocks of a row's table."""


def kernels() -> StateOperations:
    from trtrun.kernels.triton.row_states import TritonStates

    return TritonStates()


def tables_of(rows: int, refed: int, draw: random.Random, *, begins_at_newest: bool) -> StateTables:
    """Of rows with blocks of their own behind the null block, which nobody writes."""
    owners = torch.arange(rows).repeat_interleave(BLOCKS)
    made = [torch.cat((torch.tensor([rows]), owners))]
    made += [torch.tensor([draw.randrange(-1, most) for _ in range(rows + 1)]) for most in (40, 9, 3)]
    made[1].clamp_(min=0)
    return StateTables(*(one.to(DEVICE) for one in made), refed, begins_at_newest=begins_at_newest)


def segment_of(rows: int, count: int, queries: int, draw: random.Random) -> AttentionSegment:
    """Rows in any order, some with padding in front of their tokens or behind them, some tiles of one row, and some of
    which nothing is fed or which no row writes; tables and positions are parts of wider ones."""
    positions = torch.full((count, queries), -1)
    tables = torch.zeros((count, BLOCKS), dtype=torch.int64)
    free = draw.sample(range(rows), rows)
    at = 0
    while at < count:
        row = free.pop()
        first, is_written = draw.randrange(SIZE * BLOCKS - queries), draw.random() < 0.9
        for tile in range(min(draw.choice((1, 1, 2, 30)), count - at)):
            length = draw.randint(0, queries) if tile == 0 and draw.random() < 0.3 else draw.randint(1, queries)
            if first + length > SIZE * BLOCKS:
                break
            before = draw.choice((0, queries - length))
            positions[at, before : before + length] = torch.arange(first, first + length)
            if is_written:
                tables[at] = 1 + row * BLOCKS + torch.arange(BLOCKS)
            first += length
            at += 1
    wide = torch.full((count, queries + 3), 99), torch.full((count, BLOCKS + 5), 99)
    wide[0][:, :queries], wide[1][:, :BLOCKS] = positions, tables
    positions, tables = wide[0].to(DEVICE)[:, :queries], wide[1].to(DEVICE)[:, :BLOCKS]
    return AttentionSegment(draw.randrange(50), count, queries, tables, positions)


@pytest.mark.parametrize(
    ("count", "queries"), [(1, 1), (1, 5), (7, 1), (9, 4), (33, 3), (2, 9), (3, 37), (140, 2), (5, 18)]
)
def test_places_of_states_are_those_of_torch(count: int, queries: int) -> None:
    for seed in range(40 if HAS_GPU else 6):
        draw = random.Random(seed)
        rows, refed = count + 3, draw.choice((1, 5, 17))
        tables = tables_of(rows, refed, draw, begins_at_newest=seed % 2 == 0)
        segment = segment_of(rows, count, queries, draw)
        own = replace(tables, kept=tables.kept.clone())
        expected = TorchStates().find_states(segment, SIZE, tables)
        found = kernels().find_states(segment, SIZE, own)
        assert torch.equal(found, expected), (seed, found, expected)
        assert torch.equal(own.kept[:rows], tables.kept[:rows]), seed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_all_layers_begin_and_are_shared_as_by_torch(dtype: str) -> None:
    """Layers of two kinds, one of which has an odd number of halves, which are no words."""
    specs = {
        index: RecurrentState(((3, 5), (2, 4 + index % 2, 3 + 2 * (index % 2))), ((5,), (2,)), num_narrow=1)
        for index in (0, 1, 4, 7)
    }
    specs[7] = RecurrentState(((3, 5), (1, 5, 5)), ((5,), (2,)), num_narrow=1)
    space = StateSpace(6, 3, begins_at_newest=True, num_snapshots=4, dtype=dtype)  # type: ignore[arg-type]
    made = [RowStates(specs, space, 7, DEVICE, operations) for operations in (kernels(), TorchStates())]
    for states in made:
        torch.manual_seed(4)
        for layer in states.layers.values():
            for part in (*layer.states, *layer.inputs, *layer.snapshots):
                part.copy_(torch.randn(part.shape))
        states.begin([(4, 7, 2), (1, 0, 0), (0, 3, 2), (5, 9, 3)])
        states.share([4, 0], [2, 3])
    for index in specs:
        layers = [states.layers[index] for states in made]
        for name in ("states", "inputs", "snapshots"):
            for found, expected in zip(*(getattr(layer, name) for layer in layers), strict=True):
                assert torch.equal(found, expected), (index, name)
        (found, *_), (snapshots, *_), (inputs, *_) = layers[0].states, layers[0].snapshots, layers[0].inputs
        assert torch.equal(found[[4, 1, 0, 5, 2, 3]], snapshots[[2, 0, 2, 3, 2, 2]])
        assert torch.equal(inputs[[2, 3]], inputs[[4, 0]])
    tables = torch.arange(1, 7, device=DEVICE)[:, None]
    for states in made:
        states.announce(torch.arange(6, device=DEVICE), tables[:, 0])
    segment = AttentionSegment(0, 6, 1, tables, torch.full((6, 1), 9, device=DEVICE))
    (found, expected) = (states.of_batch(AttentionBatch([segment], 16))[0] for states in made)
    assert expected.kept.tolist() == [3, 0, 7, 3, 7, 9]
    assert torch.equal(found.numbers, expected.numbers)


COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from trtrun.kernels.triton import row_states

kernel, found = row_states._find_kernel, []
names = list(kernel.arg_names)
for rows, queries, warps in (row_states._FEW, row_states._MANY):
    constants = {"BEGINS_AT_NEWEST": True, "ROWS": rows, "QUERIES": queries, "EARLY": True}
    lists = ("positions", "tables", "row_of_block", "kept", "saved_at", "snapshots", "numbers")
    kinds = {name: "constexpr" if name in constants else "*i64" if name in lists else "i32" for name in names}
    source = ASTSource(
        fn=kernel, signature=kinds, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    found.append("griddepcontrol.wait" in code.asm["ptx"])
told = [one.name for one in kernel.params if not one.is_constexpr and not one.do_not_specialize]
print(json.dumps([found, told]))
"""


def test_the_kernel_compiles_once_for_rounds_of_all_sizes(tmp_path: Path) -> None:
    """For Hopper, which needs no GPU; in a process without the interpreter."""
    line = last_line(COMPILE, tmp_path)
    lists = ["positions", "tables", "row_of_block", "kept", "saved_at", "snapshots", "numbers"]
    assert json.loads(line) == [[True, True], lists]
