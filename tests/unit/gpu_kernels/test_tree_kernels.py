"""Draft trees by kernels: on a GPU where there is one, else in Triton's interpreter. Against torch's operations."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from trtrun.kernels.torch import draft_trees as by_torch

pytest.importorskip("triton", reason="needs triton: pip install triton")
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if HAS_GPU else "cpu")


def random_trees(count: int, nodes: int, num_paths: int, depth: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Paths [count, num_paths, depth] of random trees of `nodes` nodes, some of which no path has; and where each row's
    tree is cut off, from none at all on."""
    generator = torch.Generator().manual_seed(seed)
    paths = torch.full((count, num_paths, depth), -1)
    for row in range(count):
        parents = [int(torch.randint(-1, max(node, 1), (1,), generator=generator)) for node in range(nodes)]
        for path in range(num_paths - row % 2):  # of some rows the last path is not there
            node, trail = int(torch.randint(0, nodes, (1,), generator=generator)), []
            while node >= 0:
                trail.insert(0, node)
                node = parents[node] if parents[node] < node else -1
            paths[row, path, : min(depth, len(trail))] = torch.tensor(trail[:depth])
    lens = torch.randint(-1, depth + 1, (count,), generator=generator)
    lens[:2] = depth
    return paths.to(DEVICE), lens.to(DEVICE)


SIZES = pytest.mark.parametrize(
    ("count", "nodes", "num_paths", "depth"),
    [(1, 1, 1, 1), (3, 6, 4, 3), *([(5, 63, 42, 5), (2, 70, 66, 17)] if HAS_GPU else [(2, 35, 18, 17)])],
)


@SIZES
def test_trees_are_laid_out_as_by_torch(count: int, nodes: int, num_paths: int, depth: int) -> None:
    from trtrun.kernels.triton import draft_trees as by_kernel

    torch.manual_seed(nodes)
    paths, lens = random_trees(count, nodes, num_paths, depth, seed=nodes)
    max_rows, block_size, blocks, own = count + 2, 8, 150, 2 + depth // 8
    token_ids = torch.randint(0, 900, (max_rows, 400), dtype=torch.int32, device=DEVICE)
    lengths = torch.randint(1, 300, (max_rows,), device=DEVICE)
    rows = torch.randperm(max_rows, device=DEVICE)[:count]
    tokens = torch.randint(0, 900, (count, nodes + 3), device=DEVICE)[:, :nodes]  # rows that are not dense
    tables = torch.randint(0, 5000, (count, blocks + 9), device=DEVICE)[:, :blocks]
    own_blocks = torch.arange(max_rows * (num_paths + 1) * own, device=DEVICE).view(max_rows, num_paths + 1, own)
    arguments = (token_ids, lengths, rows, tokens, paths, lens, tables, own_blocks, block_size)
    for name, found, expected in zip(
        by_torch.ForkedRows._fields, by_kernel.lay_out(*arguments), by_torch.lay_out(*arguments), strict=True
    ):
        assert torch.equal(found, expected), name


@SIZES
def test_paths_are_accepted_as_by_torch(count: int, nodes: int, num_paths: int, depth: int) -> None:
    """Of few tokens, so that much is kept; several paths are as long."""
    from trtrun.kernels.triton import draft_trees as by_kernel

    kept = 0
    for seed in range(8 if HAS_GPU else 3):
        torch.manual_seed(seed)
        paths, lens = random_trees(count, nodes, num_paths, depth, seed)
        tokens = torch.randint(0, 2, (count, nodes), device=DEVICE)
        chosen = torch.randint(0, 2, (count, nodes + 1), device=DEVICE)
        logits = torch.randn((count, nodes + 1, 13), device=DEVICE)[:, :, :11]  # as of a head that is shared out
        arguments = (chosen, logits, tokens, paths, lens)
        expected = by_torch.accept_paths(*arguments)
        for name, found, wanted in zip(expected._fields, by_kernel.accept_paths(*arguments), expected, strict=True):
            assert torch.equal(found, wanted), name
        kept += int((expected.num_tokens - 1).sum())
    assert kept > 0


PROGRAM = """
from trtrun.kernels.triton import draft_trees
for kernel in (draft_trees._lay_out_kernel, draft_trees._accept_paths_kernel):
    told = [one.name for one in kernel.params if not one.is_constexpr and not one.do_not_specialize]
    print(" ".join(name for name in told if name.endswith("_stride") or name in draft_trees._SIZES))
"""


def test_no_size_of_a_round_makes_another_kernel() -> None:
    """A start compiles one for all rounds. In a process without the interpreter, which knows nothing of this."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
