"""Kernels that begin before the one before them has ended: none touches memory until it has waited."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trtrun import kernels

pytest.importorskip("triton", reason="triton is not installed")
FOLDER = Path(kernels.__file__).parent / "triton"


def early_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(FOLDER.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_kernel = isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
            if is_kernel and "EARLY" in {argument.arg for argument in node.args.args}:
                yield f"{path.name}:{node.name}", node


KERNELS = dict(early_kernels())


def calls(node: ast.AST) -> set[str]:
    return {ast.unparse(item.func) for item in ast.walk(node) if isinstance(item, ast.Call)}


def test_they_are_found() -> None:
    assert {
        "matmul.py:_product_kernel",
        "paged_attention.py:_attend_kernel",
        "fused.py:_silu_and_multiply_kernel",
    } <= set(KERNELS)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_waits_before_it_reads_writes_or_ends(name: str) -> None:
    """Also where it has nothing to do: whoever waits for it counts on it having waited for those before."""
    body = KERNELS[name].body
    waits = [index for index, statement in enumerate(body) if "begin" in calls(statement)]
    assert len(waits) == 1 and ast.unparse(body[waits[0]]) == "begin(EARLY)"
    for statement in body[: waits[0]]:
        assert not any(isinstance(item, ast.Return) for item in ast.walk(statement))
        assert calls(statement) <= {"tl.program_id", "tl.arange", "tl.where", "tl.zeros", "fetch"} | {
            call for call in calls(statement) if call.endswith(".to")
        }, ast.unparse(statement)


@pytest.mark.parametrize(("features", "inputs", "dtype"), [(16, 2048, torch.bfloat16), (64, 40, torch.float8_e4m3fn)])
def test_what_is_asked_for_beforehand_is_little(features: int, inputs: int, dtype: torch.dtype) -> None:
    from trtrun.kernels.triton.early_launch import early, lines_of

    weight = torch.empty((128, inputs), dtype=dtype)
    lines = lines_of(weight, features)
    assert lines >= 1 and lines & (lines - 1) == 0
    assert lines == 1 or lines * 128 <= min(inputs * weight.itemsize, (1 << 14) // features)
    assert early(weight) == {"EARLY": False}, "the CPU has no such launch"
