"""Kernels that begin before the one before them has ended: none touches memory until it has waited."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trtrun import kernels

pytest.importorskip("triton", reason="needs triton: pip install triton")
import triton
import triton.language as tl

from trtrun.kernels.triton.early_launch import FETCHED_BYTES, early, last_asked, lines_of

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


def function(file: str, name: str) -> ast.FunctionDef:
    module = ast.parse((FOLDER / file).read_text(encoding="utf-8"))
    return next(node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == name)


def calls(node: ast.AST) -> set[str]:
    return {ast.unparse(item.func) for item in ast.walk(node) if isinstance(item, ast.Call)}


def test_they_are_found() -> None:
    assert {
        "matmul/dense.py:_product_kernel",
        "attention/attend_kernel.py:attend_kernel",
        "fused.py:_activate_and_multiply_kernel",
    } <= set(KERNELS)
    assert set(STREAMED) <= set(ALL)


LOOKING = {
    "experts.py:_product_kernel": "experts.py:_gate_up_kernel",
    "coded_experts/eight_bits.py:_product_kernel": "coded_experts/eight_bits.py:_product_kernel",
    "coded_experts/four_bits_stream.py:_product_kernel": "coded_experts/four_bits_stream.py:_product_kernel",
    "attention/attend_kernel.py:attend_kernel": "attention/paged_store.py:_rotate_and_write_kernel",
    "attention/latent_kernels.py:attend_latents_kernel": "attention/latent_kernels.py:write_kernel",
}
"""Kernels that read, before they wait, what was written before the kernel in front, and that one, or one before it."""

FRONTS = {*LOOKING.values(), "delta_net/inputs.py:convolve_kernel"}
"""Kernels behind which that is read; the recurrence of delta nets is CUDA C++."""

LOADS = {
    "fused.py:_add_and_normalise_kernel": {"tl.load(weight + element, mask=inside, other=0.0)"},
    "rank_sums.py:_sum_and_normalise_kernel": {"tl.load(weight + element, mask=inside, other=0.0)"},
    "coded_experts/four_bits_stream.py:_product_kernel": {"gl.load(experts + tile, cache_modifier='.cg')"},
}
"""What kernels read before they wait: weights; and, past their own cache, what LOOKING allows."""

PLAIN = {
    "program_id", "num_programs", "tile_and_part", "_tile_and_part", "arange", "where", "zeros", "minimum", "maximum",
    "fetch", "to", "launch_next", "fetch_of_expert", "deal_shares", "read_positions", "_ask_for", "BlockedLayout",
}  # fmt: skip
"""Functions, by their last names, that neither read what is written meanwhile nor write."""

WAITS = {"begin", "wait_for_all", "_wait_for_all"}
LAUNCHES = {"begin", "launch_next", "_launch_next", "launch_next_at"}
"""By which the next kernel is let begin."""

LOOPS = {"experts.py:_gate_up_kernel": "_gate_up", "experts.py:_product_kernel": "_multiply"}
"""Functions in whose loops that is done for these."""


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_waits_before_it_reads_writes_or_ends(name: str) -> None:
    """Also where it has nothing to do: whoever waits for it counts on it having waited for those before."""
    body = KERNELS[name].body
    waits = [it for it, one in enumerate(body) if calls(one) & WAITS]
    said = [ast.unparse(statement) for statement in body]
    if name == "attention/attend_kernel.py:attend_kernel":  # one or the other
        assert [said[it].splitlines()[0] for it in waits] == ["if not LOOKS:", "if LOOKS:"]
        del waits[0]
    assert len(waits) == 1
    assert said[waits[0]].splitlines()[-1].strip(" _") in ("begin(EARLY)", "wait_for_all(EARLY)")
    launching = calls(function(name.partition(":")[0], LOOPS[name])) if name in LOOPS else calls(KERNELS[name])
    assert launching & LAUNCHES, "else nothing begins early behind it"
    for statement in body[: waits[0]]:
        assert not any(isinstance(item, ast.Return) for item in ast.walk(statement))
        found = [item for item in ast.walk(statement) if isinstance(item, ast.Call)]
        read = {ast.unparse(item) for item in found if ast.unparse(item.func) in ("tl.load", "gl.load")}
        assert read <= LOADS.get(name, set())
        names = {call.rpartition(".")[2] for call in calls(statement)} - ({"load"} if read else set()) - WAITS
        assert names <= PLAIN, ast.unparse(statement)
        assert not {"read_positions", "fetch_of_expert"} & names or name in LOOKING


@pytest.mark.parametrize(
    ("file", "name", "load"),
    [
        ("attention/attend_kernel.py", "read_positions", "tl.load(places, mask=real, other=0, cache_modifier='.cg')"),
        ("expert_tiles.py", "fetch_of_expert", "tl.load(expert, cache_modifier='.cg')"),
    ],
)
def test_what_is_looked_at_is_read_past_the_own_cache(file: str, name: str, load: str) -> None:
    found = [it for it in ast.walk(function(file, name)) if isinstance(it, ast.Call)]
    loads = [ast.unparse(it) for it in found if ast.unparse(it.func) == "tl.load"]
    assert loads == [load]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")
def test_what_is_asked_for_beforehand_is_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second product's rows of the experts that were chosen, all lines of them as they are short."""
    from trtrun.kernels.torch.experts import Choice
    from trtrun.kernels.triton import early_launch, experts

    asked: list[int] = []
    monkeypatch.setattr(experts, "early", lambda tensor: {"EARLY": True})
    for name in ("launch_next", "wait_for_all", "launch_next_at"):
        monkeypatch.setattr(experts, name, lambda *_: None)
    monkeypatch.setattr(early_launch, "ask_for", lambda places: asked.extend(places.handle.data.flatten().tolist()))
    gate_up, down = torch.zeros(3, 512, 64, dtype=torch.float16), torch.zeros(3, 64, 256, dtype=torch.float16)
    product = experts.TritonExperts((gate_up, down), (None, None), "silu", 0.0)
    product.make(torch.zeros(1, 64, dtype=torch.float16), Choice(torch.tensor([[2, 0]]), torch.ones(1, 2)))
    assert asked == [down[it, row].data_ptr() + 128 * line for it in (2, 0) for row in range(64) for line in range(4)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize(
    ("inputs", "at_once", "stages", "chosen"),
    [(2048, 128, 6, 1408), (2049, 128, 6, 1536), (100, 64, 3, 0), (64, 64, 4, 0), (128, 64, 1, -1)],
)
def test_the_step_in_which_all_has_been_asked_for(inputs: int, at_once: int, stages: int, chosen: int) -> None:
    found = torch.tensor([-1])
    _last_asked_kernel[(1,)](found, inputs, INPUTS=at_once, STAGES=stages)
    assert found.item() == chosen


@triton.jit
def _last_asked_kernel(found, inputs, INPUTS: tl.constexpr, STAGES: tl.constexpr):
    chosen = last_asked(inputs, INPUTS, STAGES)
    for first in range(0, inputs, INPUTS):
        if first == chosen:
            tl.store(found, first)


@pytest.mark.parametrize("name", sorted(FRONTS))
def test_a_kernel_behind_which_is_looked_waits_before_it_lets_the_next_one_begin(name: str) -> None:
    waited = False
    for statement in KERNELS[name].body:
        waited = waited or bool(calls(statement) & WAITS)
        assert waited or not calls(statement) & LAUNCHES
        assert "begin" not in calls(statement)


def test_the_recurrence_waits_before_it_writes() -> None:
    """And reads what tokens brought; before that states, and where they are, past its own cache."""
    source = (FOLDER.parent / "cuda/delta_net.cu").read_text(encoding="utf-8")
    kernel = source.partition("carry_on(")[2]
    before, wait, after = kernel.partition("    wait_for_all();\n")
    assert wait and "wait_for_all" not in after and after.startswith("    fetch(0, 0);")
    assert before.count("__ldcg(") == 2 and "matrices[" not in before and "numbers[" not in kernel
    assert not any(word in before for word in ("fetch(0", "keep(", "= narrow("))


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
    weight = torch.empty((128, inputs), dtype=dtype)
    lines = lines_of(weight, features)
    assert lines >= 1 and lines & (lines - 1) == 0
    assert lines == 1 or lines * 128 <= min(inputs * weight.itemsize, FETCHED_BYTES // features)
    assert early(weight) == {"EARLY": False}, "the CPU has no such launch"


def test_a_kernel_behind_two_streams_does_not_begin_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one may."""
    from trtrun.kernels.triton import early_launch

    weight = torch.empty(1)
    assert early_launch.lets_next_begin(weight) == {"EARLY": False}
    monkeypatch.setattr(early_launch, "_options", lambda device: {"EARLY": True, "launch_pdl": True})
    assert early_launch.lets_next_begin(weight) == {"EARLY": True, "launch_pdl": False}
    assert early_launch.early(weight) == {"EARLY": True, "launch_pdl": True}, "which stays as it is"
