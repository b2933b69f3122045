"""Kernels that begin before the one before them has ended: none touches memory until it has waited."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trtrun import kernels

pytest.importorskip("triton", reason="needs triton: pip install triton")
FOLDER = Path(kernels.__file__).parent / "triton"


def early_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
            if is_kernel and "EARLY" in {argument.arg for argument in node.args.args}:
                yield f"{path.relative_to(FOLDER)}:{node.name}", node


ALL = dict(early_kernels())
STREAMED = (
    "fp8_stream/product.py:_stream_kernel",
    "fp8_stream/block_product.py:_stream_blocks_kernel",
    "int4_stream/product.py:_stream_kernel",
)
"""Whose groups of warps wait by themselves."""

KERNELS = {name: node for name, node in ALL.items() if name not in STREAMED}


def calls(node: ast.AST) -> set[str]:
    return {ast.unparse(item.func) for item in ast.walk(node) if isinstance(item, ast.Call)}


def test_they_are_found() -> None:
    assert {
        "matmul/dense.py:_product_kernel",
        "attention/attend_kernel.py:attend_kernel",
        "fused.py:_activate_and_multiply_kernel",
    } <= set(KERNELS)
    assert set(STREAMED) <= set(ALL)


LOADS = {
    "fused.py:_add_and_normalise_kernel": {"tl.load(weight + element, mask=inside, other=0.0)"},
    "rank_sums.py:_sum_and_normalise_kernel": {"tl.load(weight + element, mask=inside, other=0.0)"},
    "experts.py:_product_kernel": {"tl.load(experts + tile, cache_modifier='.cg')"},
}
"""What kernels read before they wait: weights; and, past their own cache, what was written before the kernel in front,
which has waited for it, if only to ask for weights."""

PLAIN = {"tl.program_id", "tile_and_part", "tl.arange", "tl.where", "tl.zeros", "tl.minimum", "tl.maximum", "fetch"}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_waits_before_it_reads_writes_or_ends(name: str) -> None:
    """Also where it has nothing to do: whoever waits for it counts on it having waited for those before."""
    body = KERNELS[name].body
    waits = [it for it, one in enumerate(body) if calls(one) & {"begin", "wait_for_all", "_wait_for_all"}]
    assert len(waits) == 1
    said = [ast.unparse(statement) for statement in body]
    before, wait = body[: waits[0]], said[waits[0]]
    if name == "experts.py:_gate_up_kernel":
        assert (wait, said[waits[0] + 1]) == ("wait_for_all(EARLY)", "launch_next(EARLY)")
    elif name in LOADS and wait != "begin(EARLY)":
        assert (said[0], wait) == ("launch_next(EARLY)", "wait_for_all(EARLY)")
        before = before[1:]
    elif wait != "begin(EARLY)":  # in Gluon, both by themselves
        assert [said[waits[0] - 1], wait] == ["_launch_next(EARLY)", "_wait_for_all(EARLY)"]
        before = before[:-1]
    for statement in before:
        assert not any(isinstance(item, ast.Return) for item in ast.walk(statement))
        found = [item for item in ast.walk(statement) if isinstance(item, ast.Call)]
        read = {ast.unparse(item) for item in found if ast.unparse(item.func) == "tl.load"}
        assert read <= LOADS.get(name, set())
        allowed = PLAIN | {call for call in calls(statement) if call.endswith(".to")} | ({"tl.load"} if read else set())
        assert calls(statement) <= allowed, ast.unparse(statement)


@pytest.mark.parametrize("name", STREAMED[:2])
def test_groups_of_warps_ask_for_nothing_but_weights_before_they_wait(name: str) -> None:
    groups: dict[str, list[ast.stmt]] = {}
    for file in ("fp8_stream/product.py", name.partition(":")[0]):
        module = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
        groups |= {node.name: node.body for node in module.body if isinstance(node, ast.FunctionDef)}
    begun = [statement for statement in ALL[name].body if "launch_next" in calls(statement)]
    assert [ast.unparse(statement) for statement in begun] == ["launch_next(EARLY)"]
    assert not {"gl.load", "gl.store", "copy_to_shared"} & calls(ALL[name])
    before = {
        "copy_steps": {"gl.minimum", "range", "_ask_weights"},
        "_multiply": {"gl.NVMMADistributedLayout", "_read_tile_scales"},
    }
    for group, allowed in before.items():
        waits = [ast.unparse(statement) == "wait_for_all(EARLY)" for statement in groups[group]]
        assert waits.count(True) == 1
        early = groups[group][: waits.index(True)]
        assert set().union(*map(calls, early)) <= allowed
    assert calls(ast.Module(groups["_ask_weights"], [])) == {
        "mbarrier.expect", "ready.index", "gl.program_id", "gl.num_programs", "_ask",
    }  # fmt: skip
    # What is read then is the weight's own.
    reads = ast.Module(groups.get("_read_tile_scales", []), [])
    assert calls(reads) <= {"gl.minimum", "gl.program_id", "gl.num_programs", "gl.load"}
    loads = [item for item in ast.walk(reads) if isinstance(item, ast.Call) and ast.unparse(item.func) == "gl.load"]
    assert all(ast.unparse(item.args[0]).startswith("of_tile + ") for item in loads)


@pytest.mark.parametrize(("features", "inputs", "dtype"), [(16, 2048, torch.bfloat16), (64, 40, torch.float8_e4m3fn)])
def test_what_is_asked_for_beforehand_is_little(features: int, inputs: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.early_launch import early, lines_of

    weight = torch.empty((128, inputs), dtype=dtype)
    lines = lines_of(weight, features)
    assert lines >= 1 and lines & (lines - 1) == 0
    assert lines == 1 or lines * 128 <= min(inputs * weight.itemsize, (1 << 14) // features)
    assert early(weight) == {"EARLY": False}, "the CPU has no such launch"


def test_a_kernel_behind_two_streams_does_not_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may."""
    from trtrun.kernels.triton import early_launch

    weight = torch.empty(1)
    assert early_launch.lets_next_begin(weight) == {"EARLY": False}
    monkeypatch.setattr(early_launch, "_options", lambda device: {"EARLY": True, "launch_pdl": True})
    assert early_launch.lets_next_begin(weight) == {"EARLY": True, "launch_pdl": False}
    assert early_launch.early(weight) == {"EARLY": True, "launch_pdl": True}, "which stays as it is"
