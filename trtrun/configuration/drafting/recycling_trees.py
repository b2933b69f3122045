"""Draft trees for token recycling: of all trees of so many nodes the one that is likely to be right the furthest.

The paper has one tree of 80 nodes (Luo et al. 2024, arXiv:2408.08696); here it is made for any number, as Sequoia makes
its own (Chen et al. 2024, arXiv:2402.12374): a node is right where all on the way to it are, and the likeliest nodes
are taken. It knows numbers. It does not know tokens.
"""

from __future__ import annotations

import heapq
from functools import cache

from trtrun.configuration.drafting.medusa_choices import ChoiceTree

_RIGHT = (0.39, 0.083, 0.044, 0.033, 0.019, 0.018, 0.014, 0.009)
"""How often the successor of each rank was right where its parent was, as measured on the shipped target, half of it
greedy and half at temperature 0.7."""


def _chance(rank: int) -> float:
    """Ranks behind those that were measured fall on as the last ones do."""
    return _RIGHT[rank] if rank < len(_RIGHT) else _RIGHT[-1] * len(_RIGHT) / (rank + 1)


@cache
def recycling_tree(depth: int, num_ranks: int, num_nodes: int) -> ChoiceTree:
    """The tree of the likeliest nodes, one path of which is `depth` deep.

    Args:
        depth: of the deepest node.
        num_ranks: successors of a token that there are.
        num_nodes: at least `depth`; fewer where there are no more.
    """
    nodes = {(0,) * length for length in range(1, depth + 1)}
    waiting: list[tuple[float, tuple[int, ...]]] = [(-_chance(rank), (rank,)) for rank in range(num_ranks)]
    heapq.heapify(waiting)
    while waiting and len(nodes) < num_nodes:
        chance, node = heapq.heappop(waiting)
        nodes.add(node)
        if len(node) < depth:
            for rank in range(num_ranks):
                heapq.heappush(waiting, (chance * _chance(rank), (*node, rank)))
    return ChoiceTree.of(sorted(nodes))
