"""Trees that grow from made-up numbers: which nodes are continued and kept, and who is told."""

from __future__ import annotations

import pytest
import torch

from trtrun.configuration.drafting.draft_trees import DynamicTree
from trtrun.speculation.growing_trees import DynamicGrowth, Given, Ranked

Way = tuple[int, ...]


def grow(
    bounds: DynamicTree, depth: int, seed: int, *, rounded: bool = False, lens: list[int] | None = None
) -> tuple[list[dict[Way, float]], torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Trees of three rows: of each row all nodes that were met with their scores, tokens and paths, and what is told.
    `rounded` scores are often equal, and often certain."""
    generator, rows, told = torch.Generator().manual_seed(seed), 3, list[torch.Tensor]()
    growth = DynamicGrowth(
        bounds, rows, depth, torch.device("cpu"), None if lens is None else torch.tensor(lens, dtype=torch.int64)
    )

    def share(tensor: torch.Tensor) -> torch.Tensor:
        told.append(tensor.clone())
        return tensor

    met: list[dict[Way, float]] = [{} for _ in range(rows)]
    frontier: list[list[Way]] = [[()] for _ in range(rows)]
    for step in range(depth):
        nodes = len(frontier[0])
        tokens = torch.stack(
            [torch.randperm(50, generator=generator)[: bounds.top_k] for _ in range(rows * nodes)]
        ).view(rows, nodes, -1)
        log_probs = -3 * torch.rand(tokens.shape, generator=generator).sort(dim=2).values
        if rounded:
            log_probs = (log_probs / 2).round()
        for row in range(rows):
            is_needed = lens is None or step < lens[row]
            for node, way in enumerate(frontier[row] if is_needed else ()):
                for token, value in zip(tokens[row, node].tolist(), log_probs[row, node].tolist(), strict=True):
                    met[row][*way, token] = (met[row][way] if way else 0.0) + value
        chosen, parents = growth.spread(Ranked(tokens, log_probs), None, share)
        frontier = [
            [
                (*frontier[row][parent], token)
                for token, parent in zip(chosen[row].tolist(), parents[row].tolist(), strict=True)
            ]
            for row in range(rows)
        ]
        for row in range(rows if lens is None else 0):
            best = sorted((way for way in met[row] if len(way) == step + 1), key=lambda way: -met[row][way])
            values = [met[row][way] for way in frontier[row]]
            assert values == pytest.approx([met[row][way] for way in best[: bounds.top_k]])
    return met, *growth.finish(share), told


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("top_k", "most", "depth"), [(3, 10, 4), (2, 2, 1), (2, 6, 3), (4, 20, 2), (5, 7, 6)])
def test_the_likeliest_of_all_are_kept_with_their_parents(top_k: int, most: int, depth: int, rounded: bool) -> None:
    bounds = DynamicTree(top_k, most, depth)
    for seed in range(6):
        met, tokens, paths, _ = grow(bounds, depth, seed, rounded=rounded)
        assert tokens.shape[1] == bounds.num_nodes(depth) and paths.shape[1:] == (bounds.num_paths(depth), depth)
        for row in range(3):
            ways = ways_of(tokens[row], paths[row])
            assert sorted(ways) == list(range(tokens.shape[1])), "each is on a path, and so are all before it"
            kept = sorted((met[row][way] for way in ways.values()), reverse=True)
            assert kept == pytest.approx(sorted(met[row].values(), reverse=True)[: len(kept)])
            ends = [path[path >= 0].tolist() for path in paths[row]]
            leaves = [end[-1] for end in ends if end]
            inner = {node for end in ends for node in end[:-1]}
            assert len(set(leaves)) == len(leaves) and not inner & set(leaves)


def ways_of(tokens: torch.Tensor, paths: torch.Tensor) -> dict[int, Way]:
    """The tokens on the way to each node."""
    found: dict[int, Way] = {}
    for path in paths.tolist():
        nodes = [node for node in path if node >= 0]
        for end in range(1, len(nodes) + 1):
            way = tuple(tokens[nodes[:end]].tolist())
            assert found.setdefault(nodes[end - 1], way) == way
    return found


def test_what_a_row_does_not_need_keeps_nothing_out_that_it_does() -> None:
    bounds, lens = DynamicTree(3, 10, 4), [4, 2, 1]
    met, tokens, paths, _ = grow(bounds, 4, 5, lens=lens)
    for row, needed in enumerate(lens):
        ways = [way for way in ways_of(tokens[row], paths[row]).values() if len(way) <= needed]
        best = sorted(met[row].values(), reverse=True)[:10]
        assert sorted((met[row][way] for way in ways), reverse=True) == pytest.approx(best)


def test_a_rank_that_is_told_has_the_same_trees() -> None:
    bounds, depth = DynamicTree(3, 10, 4), 4
    _, tokens, paths, told = grow(bounds, depth, 1)
    growth, said = DynamicGrowth(bounds, 3, depth, torch.device("cpu")), iter(told)

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(next(said))

    for _ in range(depth):
        chosen, parents = growth.spread(None, None, share)
        assert chosen.shape == parents.shape == (3, 3)
    found = growth.finish(share)
    assert torch.equal(found[0], tokens) and torch.equal(found[1], paths) and next(said, None) is None


def test_impossible_tokens_and_numbers_that_are_none_are_kept_last() -> None:
    growth = DynamicGrowth(DynamicTree(2, 3, 2), 1, 2, torch.device("cpu"))
    nothing = float("-inf")
    growth.spread(Ranked(torch.tensor([[[1, 2]]]), torch.tensor([[[-9.0, nothing]]])), None, lambda told: told)
    growth.spread(
        Ranked(torch.tensor([[[3, 4], [5, 6]]]), torch.tensor([[[-9.0, -9.0], [float("nan"), nothing]]])),
        None,
        lambda told: told,
    )
    tokens, paths = growth.finish(lambda told: told)
    assert (tokens.tolist(), paths.tolist()) == ([[1, 3, 4]], [[[0, 1], [0, 2]]])


def test_a_given_token_is_the_best_path_of_rows_that_have_one() -> None:
    growth = DynamicGrowth(DynamicTree(2, 3, 2), 2, 2, torch.device("cpu"))
    for token in (40, 41):
        nodes = 1 if token == 40 else 2
        ranked = Ranked(torch.tensor([[[1, 2]] * nodes] * 2), torch.tensor([[[-1.0, -1.5]] * nodes] * 2))
        given = Given(torch.tensor([token, token]), torch.tensor([True, False]))
        growth.spread(ranked, given, lambda told: told)
    tokens, paths = growth.finish(lambda told: told)
    assert [40, 41] in [tokens[0, path[path >= 0]].tolist() for path in paths[0]]
    assert 40 not in tokens[1].tolist() and 41 not in tokens[1].tolist()
